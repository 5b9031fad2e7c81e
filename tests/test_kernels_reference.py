"""The plain torch kernels against torch's own attention, transformers' layers and scipy's distributions."""

import numpy as np
import pytest
import torch
from kernel_cases import PagedCase, make_case
from pagedgen_kernels import reference
from scipy import stats


def dense_attention(case: PagedCase) -> torch.Tensor:
    """Each sequence alone, with torch's scaled_dot_product_attention in float64 over its dense keys and values."""
    outputs = []
    for s, (query_len, context) in enumerate(case.lengths):
        query = case.query[case.query_start[s] : case.query_start[s + 1]].double().transpose(0, 1)
        keys, values = (x.double().transpose(0, 1) for x in (case.keys[s], case.values[s]))
        group = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        query_position = torch.arange(context - query_len, context)[:, None]
        mask = torch.arange(context) <= query_position
        if case.options.get("sliding_window") is not None:
            mask &= torch.arange(context) > query_position - case.options["sliding_window"]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=case.options["scale"]
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("sliding_window", [None, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (7, 1)])
def test_attention_equals_dense_attention(
    block_size: int, sliding_window: int | None, heads: int, kv_heads: int
) -> None:
    case = make_case(
        [(1, 1), (1, 33), (5, 5), (7, 50), (17, 64)], heads, kv_heads, 32, 24, block_size, sliding_window=sliding_window
    )
    torch.testing.assert_close(case.run(reference).double(), dense_attention(case), atol=2e-6, rtol=1e-5)


def test_attention_softcap_and_sinks_equal_their_definition() -> None:
    case = make_case([(1, 9), (4, 4)], 4, 2, 16, 16, 4, softcap=2.0, sinks=True)
    out = case.run(reference)
    for s, (query_len, context) in enumerate(case.lengths):
        for i in range(query_len):
            row = int(case.query_start[s]) + i
            for head in range(4):
                visible = context - query_len + i + 1
                scores = case.keys[s][:visible, head // 2].double() @ case.query[row, head].double()
                scores = 2.0 * torch.tanh(scores * case.options["scale"] / 2.0)
                weights = scores.exp() / (scores.exp().sum() + case.options["sinks"][head].double().exp())
                expected = weights @ case.values[s][:visible, head // 2].double()
                torch.testing.assert_close(out[row, head].double(), expected, atol=1e-5, rtol=1e-5)


def test_norm_gate_and_rotary_equal_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(1)
    x, residual, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 96), (5, 96), (96,)))
    norm = LlamaRMSNorm(96, eps=1e-5)
    norm.weight.data.copy_(weight)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), norm(x).detach(), atol=1e-6, rtol=1e-6)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, norm(x + residual).detach(), atol=1e-6, rtol=1e-6)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(reference.silu_mul(x), torch.nn.functional.silu(gate) * up)

    query, key = torch.randn(5, 6, 16, generator=generator), torch.randn(5, 2, 16, generator=generator)
    angles = torch.randn(5, 8, generator=generator).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    ours = reference.apply_rotary(query, key, cos, sin)
    theirs = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
    partial = reference.apply_rotary(query, key, cos[:, 4:12], sin[:, 4:12])[0]
    assert torch.equal(partial[..., 8:], query[..., 8:])
    assert not torch.equal(partial[..., :8], query[..., :8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_tokens_are_those_of_a_sort(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(40, 90, generator=generator) * 3).round().to(dtype)
    logits[3, 5:] = -torch.inf
    logits[4, ::2] *= 0.0  # both zeros
    temperature = torch.linspace(0.2, 4, 40)
    values, ids, total = reference.top_tokens(logits, temperature, 30)
    rows = logits.double().numpy()
    for row in range(40):
        order = np.lexsort((np.arange(90), -rows[row]))[:30]
        possible = rows[row, order] > -np.inf
        assert ids[row].tolist() == np.where(possible, order, 0).tolist()
        assert values[row].tolist() == rows[row, order].tolist()
    expected = np.log(np.exp(rows / temperature.double().numpy()[:, None]).sum(1))
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-6)


def splitmix_bits(key: int, token: int) -> int:
    mask = 2**64 - 1
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) >> 32


def test_noise_equals_its_specification() -> None:
    keys = [0, 1, 2**63, 2**64 - 1, 0x1234567890ABCDEF]
    tokens = [0, 1, 5, 49151, 2**31 - 1]
    expected = [[-np.log(-np.log1p(-(splitmix_bits(key, token) + 0.5) / 2**32)) for token in tokens] for key in keys]
    unsigned = torch.tensor(keys, dtype=torch.uint64)
    noise = reference.gumbel_noise(unsigned, torch.tensor(tokens).expand(5, 5))
    assert noise.dtype == torch.float32
    np.testing.assert_allclose(noise.numpy(), np.array(expected, np.float32), rtol=1e-6)
    assert torch.equal(noise, reference.gumbel_noise(unsigned.view(torch.int64), torch.tensor(tokens).expand(5, 5)))


def test_first_splitmix_output_matches_the_published_generator() -> None:
    # The first outputs of SplitMix64 seeded with 1234567, as published with its reference implementation.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix_bits(1234567, i) for i in range(3)] == [x >> 32 for x in published]


def test_noise_follows_the_gumbel_distribution() -> None:
    keys = torch.arange(50, dtype=torch.int64) * 7919
    noise = reference.gumbel_noise(keys, torch.arange(2000).expand(50, 2000)).flatten().numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    other_axis = reference.gumbel_noise(torch.arange(100_000), torch.zeros(100_000, 1, dtype=torch.int64)).flatten()
    assert stats.kstest(other_axis.numpy(), "gumbel_r").pvalue > 1e-3


def test_copy_blocks_reads_every_source_first() -> None:
    pool = torch.arange(2 * 5, dtype=torch.float32).reshape(2, 5, 1, 1, 1).repeat(1, 1, 2, 3, 4)
    before = pool.clone()
    reference.copy_blocks([pool], torch.tensor([[0, 1], [1, 3]]))
    assert torch.equal(pool[:, [1, 3]], before[:, [0, 1]])
    assert torch.equal(pool[:, [0, 2, 4]], before[:, [0, 2, 4]])
