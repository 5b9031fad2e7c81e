"""The machine code, for NVIDIA GPUs, of the kernels for states, caches and sampling; see triton_compiled.py."""

from typing import Any

import pytest
from triton_compiled import Call, CompiledKernel, compile_calls

# Query heads, key/value heads, dimensions of a head, and whether heads are normed.
SMOLLM2_135M, LLAMA_3_1_8B, QWEN3_8B = (9, 3, 64, False), (32, 8, 128, False), (32, 8, 128, True)
# Vocabularies of Llama 3 and of GPT-2, whose rows are not aligned.
LLAMA_3, GPT_2 = 128_256, 50_257
REGISTERS = 65536  # of a multiprocessor


def empty(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def rotary(model: tuple[int, int, int, bool], tokens: int = 256, dtype: str = "bfloat16", rotary_dim: int = 0) -> None:
    from pagedgen_kernels import triton as kernels

    heads, kv_heads, dim, norms = model
    fused, pool = empty(tokens, heads + 2 * kv_heads, dim, dtype=dtype), empty(99, 2, kv_heads, 16, dim, dtype=dtype)
    query, key, value = fused.split((heads, kv_heads, kv_heads), 1)
    angles = empty(tokens, rotary_dim or dim, dtype="float32")
    slots = empty(tokens, dtype="int64")
    weight = empty(dim, dtype=dtype) if norms else None
    kernels.rotary_write_kv(
        *(query, key, value, angles, angles, pool[:, 0], pool[:, 1], slots), query_norm=weight, key_norm=weight
    )


def write_kv(model: tuple[int, int, int, bool]) -> None:
    from pagedgen_kernels import triton as kernels

    _, kv_heads, dim, _ = model
    fused, pool = empty(256, 2 * kv_heads, dim), empty(99, 2, kv_heads, 16, dim)
    kernels.write_kv(*fused.chunk(2, 1), pool[:, 0], pool[:, 1], empty(256, dtype="int64"))


def norms(width: int, rows: int = 256, dtype: str = "bfloat16") -> None:
    from pagedgen_kernels import triton as kernels

    x, weight = empty(rows, width, dtype=dtype), empty(width, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-5)
    kernels.add_rms_norm(x, x, weight, 1e-5)


def gates(width: int, rows: int = 256, dtype: str = "bfloat16") -> None:
    from pagedgen_kernels import triton as kernels

    kernels.silu_mul(empty(rows, 2 * width, dtype=dtype))
    kernels.gelu_mul(empty(rows, 2 * width, dtype=dtype))


def copy_blocks(dim: int) -> None:
    from pagedgen_kernels import triton as kernels

    kernels.copy_blocks([empty(32, 99, 2, 8, 16, dim)], empty(5, 2, dtype="int64"))


def choose_tokens(vocab_size: int, rows: int = 256, dtype: str = "bfloat16", first_key: int = 0) -> None:
    """first_key: where the keys begin in a tensor of more."""
    from pagedgen_kernels import triton as kernels

    reals, integers = empty(rows, dtype="float32"), empty(rows, dtype="int64")
    keys = empty(first_key + rows, dtype="int64")[first_key:]
    kernels.choose_tokens(empty(rows, vocab_size, dtype=dtype), reals, integers, reals, reals, keys)


def greedy_argmax(vocab_size: int, rows: int = 256, dtype: str = "bfloat16") -> None:
    from pagedgen_kernels import triton as kernels

    kernels.greedy_argmax(empty(rows, vocab_size, dtype=dtype))


def top_tokens(vocab_size: int, k: int, rows: int = 256, dtype: str = "bfloat16") -> None:
    from pagedgen_kernels import triton as kernels

    kernels.top_tokens(empty(rows, vocab_size, dtype=dtype), empty(rows, dtype="float32"), k)


def penalise(vocab_size: int, rows: int = 256) -> None:
    from pagedgen_kernels import triton as kernels

    reals, integers = empty(rows, dtype="float32"), empty(rows, dtype="int32")
    scores, token_ids = empty(rows, vocab_size, dtype="float32"), empty(rows, 8192, dtype="int32")
    kernels.penalise(scores, token_ids, integers, integers, reals, reals, reals, empty(rows, dtype="int64"))


def call(function: Any, *positional: Any, **options: Any) -> Call:
    names = function.__code__.co_varnames
    return Call(function, dict(zip(names, positional, strict=False)) | options)


# Kernels that only move memory.
STREAMS = {
    "rotary": call(rotary, QWEN3_8B),
    "write_kv": call(write_kv, LLAMA_3_1_8B),
    "norms": call(norms, 4096),
    "gates": call(gates, 14336),
    "copy_blocks": call(copy_blocks, 128),
}
SAMPLING = {
    "choose_tokens": call(choose_tokens, LLAMA_3, 280),  # 16 blocks for each program
    "top_tokens": call(top_tokens, LLAMA_3, 20),
    "penalise": call(penalise, LLAMA_3),
}
# The same with a number of tokens or rows that is not as round.
OF_ONE = {
    "rotary": call(rotary, QWEN3_8B, 1),
    "norms": call(norms, 4096, 1),
    "choose_tokens": call(choose_tokens, LLAMA_3, 1, first_key=1),  # of a prompt's second sample
}
# Registers of a thread that leave room for several blocks on a multiprocessor.
BUDGETS = {
    "_rotary_write_kv_kernel": 64,
    "_write_kv_kernel": 32,
    "_rms_norm_kernel": 40,
    "_gate_kernel": 40,
    "_copy_blocks_kernel": 64,
    "_tile_statistics_kernel": 48,
    "_lowest_kept_kernel": 128,
    "_top_tokens_kernel": 128,
    "_best_of_parts_kernel": 64,
    "_best_of_rows_kernel": 32,
    "_penalise_kernel": 64,
}
# The kernels that read whole rows of logits, next to nothing else.
READERS = ("_tile_statistics_kernel", "_best_of_parts_kernel")


def check_budget(kernel: CompiledKernel, registers: int) -> None:
    assert kernel.spills() == kernel.stack == 0, kernel.summary()
    assert kernel.registers <= registers, kernel.summary()
    assert kernel.registers * 32 * kernel.num_warps <= REGISTERS, kernel.summary()


Compiled = dict[tuple[str, int], list[CompiledKernel]]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    of_one = {f"{name} of one": call for name, call in OF_ONE.items()}
    older = compile_calls({name: STREAMS[name] for name in ("rotary", "norms")}, archs=(80,))
    return older | compile_calls(STREAMS | SAMPLING | of_one, archs=(90,))


def test_nothing_is_spilled(compiled: Compiled) -> None:
    kernels = [kernel for launched in compiled.values() for kernel in launched]
    assert {kernel.name for kernel in kernels} == set(BUDGETS)
    for kernel in kernels:
        check_budget(kernel, BUDGETS[kernel.name])


def test_streams_move_sixteen_bytes_at_a_time(compiled: Compiled) -> None:
    """All that is stored, and what it is made of."""
    for kernel in (kernel for (name, _), launched in compiled.items() if name in STREAMS for kernel in launched):
        stores = kernel.count(r"STG.*[.]128")
        assert kernel.count(r"LDG.*[.]128") >= stores == kernel.count("STG") > 0, kernel.summary()
    for kernel in compiled["choose_tokens", 90] + compiled["top_tokens", 90]:
        assert kernel.name not in READERS or kernel.count(r"LDG.*[.]128") > 0, kernel.summary()
        assert kernel.count(r"LDG.*[.][US](8|16)") == 0, kernel.summary()


def test_nothing_is_compiled_again_for_another_batch(compiled: Compiled) -> None:
    """Numbers of tokens and rows change in every step."""
    for name in OF_ONE:
        codes = [[kernel.hash for kernel in compiled[key, 90]] for key in (name, f"{name} of one")]
        assert codes[0] == codes[1], name


def test_few_rows_fill_the_device(compiled: Compiled) -> None:
    """A row alone is read by many programs, and many rows by two rounds of what runs at a time."""
    many, one = (compiled[name, 90] for name in ("choose_tokens", "choose_tokens of one"))
    for i in (0, 2):
        assert one[i].name in READERS
        assert one[i].grid == (1, 63)
        assert many[i].grid[0] * many[i].grid[1] >= 16 * 132


@pytest.mark.slow
def test_all_dtypes_and_sizes() -> None:
    calls = {
        f"{function.__name__} {number} {dtype}": call(function, number, dtype=dtype)
        for dtype in ("bfloat16", "float16", "float32")
        for function, numbers in (
            (rotary, (SMOLLM2_135M, LLAMA_3_1_8B, QWEN3_8B, (16, 16, 256, True))),
            (norms, (128, 576, 2048, 2560, 5120, 8192, 16384, 32768)),
            (gates, (1536, 8960, 28672)),
            (choose_tokens, (LLAMA_3, GPT_2, 262_144)),
            (greedy_argmax, (LLAMA_3, GPT_2)),
        )
        for number in numbers
    }
    calls |= {
        f"top_tokens {vocab_size} {k} {dtype}": call(top_tokens, vocab_size, k, dtype=dtype)
        for vocab_size, k in ((LLAMA_3, 600), (GPT_2, 20), (262_144, 64))
        for dtype in ("bfloat16", "float32")
    }
    calls["partial rotary"] = call(rotary, (32, 32, 80, False), rotary_dim=32)
    calls["partial rotary, norms"] = call(rotary, (16, 2, 256, True), rotary_dim=64)
    for kernels in compile_calls(calls).values():
        for kernel in kernels:
            check_budget(kernel, 192)
