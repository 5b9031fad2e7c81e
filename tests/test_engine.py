"""The engine end to end on tiny models: seeded draws, ends, forks, laziness, and the path that ran."""

from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB_SIZE, random_sequences, tiny_checkpoint
from transformers import AutoModelForCausalLM

from pagedgen import Engine, EngineConfig, PagedgenError, Request, SamplingParams, Status, UsageError
from pagedgen.request import FinishReason
from pagedgen.scheduling.sequence import random_key

EOS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def make_engine(checkpoint, **config):
    return Engine(EngineConfig(model=str(checkpoint), dtype="float32", **{"kv_memory": 1 << 22, **config}))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return make_engine(checkpoint)


def requests_for(prompts, params, rows=None):
    rows = range(len(prompts)) if rows is None else rows
    return [Request(i, f"id-{i}", prompt_token_ids=tuple(prompts[i]), params=params) for i in rows]


def run(engine, requests):
    found = {c.row: c for c in engine.generate(requests)}
    engine.scheduler.check()
    assert engine.blocks.num_used == 0
    return found


SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True)


def test_a_seeded_row_is_the_same_alone_in_a_batch_preempted_and_in_another_order(checkpoint, engine):
    prompts = random_sequences([5 + i % 30 for i in range(64)])
    requests = requests_for(prompts, SEEDED)
    together = {row: c.token_ids for row, c in run(engine, requests).items()}
    assert len(set(together.values())) == 64
    backwards = run(engine, requests[::-1])
    assert {row: c.token_ids for row, c in backwards.items()} == together
    for i in range(0, 64, 9):
        assert run(engine, [requests[i]])[i].token_ids == together[i]
    # A pool of 256 tokens, for 64 rows of up to 54.
    bytes_per_token = engine.kv_bytes // engine.scheduler.capacity
    small = make_engine(checkpoint, kv_memory=256 * bytes_per_token)
    tight = run(small, requests)
    assert small.scheduler.counts.preemptions > 0
    assert {row: c.token_ids for row, c in tight.items()} == together


def test_draws_differ_between_rows_and_seeds(engine):
    prompt = random_sequences([9])[0]
    same_prompt = requests_for([prompt] * 8, SEEDED)
    assert len({c.token_ids for c in run(engine, same_prompt).values()}) == 8
    other = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=8, ignore_eos=True)
    assert run(engine, same_prompt[:1])[0].token_ids != run(engine, requests_for([prompt], other))[0].token_ids


def test_what_was_found_of_parameters_is_kept_for_the_same_unchanged_object_only(engine):
    prompt = random_sequences([5])[0]

    def tokens(params):
        return run(engine, requests_for([prompt], params))[0].token_ids

    held = {"temperature": 0.0, "ignore_eos": True}
    seven = SamplingParams(max_tokens=2, logit_bias=((7, 1e6),), **held)
    nine = SamplingParams(max_tokens=3, logit_bias=((9, 1e6),), **held)
    assert [tokens(params) for params in (seven, nine, seven, seven)] == [(7, 7), (9, 9, 9), (7, 7), (7, 7)]
    beyond = replace(seven, top_k=VOCAB_SIZE + 1)
    for _ in range(2):
        assert run(engine, requests_for([prompt], beyond))[0].status is Status.BAD_ROW
    biases, ends = {7: 1e6}, [11]
    mutable = SamplingParams(max_tokens=3, logit_bias=biases, stop_token_ids=ends, **held)
    assert tokens(mutable) == (7, 7, 7)
    ends.append(7)
    assert tokens(mutable) == (7,)
    biases[9] = 1e9
    assert tokens(mutable) == (9, 9, 9)


def test_the_path_that_runs_is_named(engine):
    from pagedgen_kernels import cpu

    assert engine.spec.path == "native"
    assert engine.attention_name == ("cpp" if cpu.available() else "torch")
    assert (engine.kernels_note is None) == cpu.available()


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_greedy_equals_transformers(tmp_path, model_type):
    folder = tiny_checkpoint(tmp_path, model_type)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = make_engine(folder, block_size=4, max_batch_tokens=16)
    assert engine.spec.path == ("native" if model_type == "llama" else "hook")
    prompts = random_sequences([1, 3, 8, 17, 33])
    found = run(engine, requests_for(prompts, SamplingParams(max_tokens=12, temperature=0)))
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert list(found[i].token_ids) == out[0, len(prompt) :].tolist()


def test_an_end_token_stops_and_is_counted_but_is_no_text(engine):
    prompts = random_sequences([6] * 32, seed=3)
    params = SamplingParams(max_tokens=60, temperature=1.5, stop_token_ids=(17, 40))
    found = run(engine, requests_for(prompts, params)).values()
    stopped = [c for c in found if c.finish_reason is FinishReason.STOP]
    assert stopped
    for c in found:
        ended = c.token_ids[-1] in (EOS, 17, 40)
        assert (c.finish_reason is FinishReason.STOP) == ended
        assert not {EOS, 17, 40} & set(c.token_ids[:-1])
        assert c.text == engine.tokenizer.decode(list(c.token_ids[:-1] if ended else c.token_ids))


def test_ignore_eos_and_min_tokens_hold_the_end_back(engine):
    prompts = random_sequences([6] * 24, seed=3)
    free = run(engine, requests_for(prompts, SamplingParams(max_tokens=150, temperature=2.0)))
    assert min(c.completion_tokens for c in free.values()) < 20
    held = run(engine, requests_for(prompts, SamplingParams(max_tokens=150, temperature=2.0, min_tokens=20)))
    assert min(c.completion_tokens for c in held.values()) >= 20
    assert all(EOS not in c.token_ids[:20] for c in held.values())
    assert any(c.finish_reason is FinishReason.STOP for c in held.values())
    ignoring = run(engine, requests_for(prompts, SamplingParams(max_tokens=150, temperature=2.0, ignore_eos=True)))
    assert {c.completion_tokens for c in ignoring.values()} == {150}
    assert any(EOS in c.token_ids for c in ignoring.values())


def test_stop_strings_cut_the_text_where_they_first_occur(engine):
    prompts = random_sequences([7] * 24, seed=5)
    plain = SamplingParams(max_tokens=40, temperature=1.2, seed=1, ignore_eos=True)
    texts = {row: c.text for row, c in run(engine, requests_for(prompts, plain)).items()}
    stop = ("e", "th", "xyz")
    stopping = SamplingParams(max_tokens=40, temperature=1.2, seed=1, ignore_eos=True, stop=stop)
    found = run(engine, requests_for(prompts, stopping))
    assert any(c.finish_reason is FinishReason.STOP for c in found.values())
    for row, c in found.items():
        places = [i for i in (texts[row].find(s) for s in stop) if i >= 0]
        assert c.text == (texts[row][: min(places)] if places else texts[row])
        assert (c.finish_reason is FinishReason.STOP) == bool(places)


def test_samples_share_the_prompt_and_go_on_as_if_they_were_alone(checkpoint):
    """Copy-on-write on the real cache: sample i is what a request alone draws with the same key."""
    engine = make_engine(checkpoint, block_size=4)
    prompt = tuple(random_sequences([10])[0])
    params = SamplingParams(max_tokens=16, temperature=0.9, ignore_eos=True, n=4, logprobs=2)
    samples = list(engine.generate([Request(0, "row", prompt_token_ids=prompt, params=params)]))
    assert [c.sample for c in samples] == [0, 1, 2, 3]
    assert len({c.token_ids for c in samples}) == 4
    assert engine.blocks.num_copies == 3
    assert engine.scheduler.counts.prompt_tokens == 10
    for sample in samples:
        group = engine.admission.group(Request(0, "row", prompt_token_ids=prompt, params=replace(params, n=1)), prompt)
        group.sequences[0].key = random_key(0, "row", sample.sample)
        engine.scheduler.add(group)
        while engine.scheduler.has_work:
            engine._pipeline.step()
            engine.scheduler.check()
        alone = engine._completion(group.sequences[0])
        assert alone.token_ids == sample.token_ids
        assert [x.top_ids for x in alone.logprobs] == [x.top_ids for x in sample.logprobs]
        assert alone.cumulative_logprob == pytest.approx(sample.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_are_the_same_preempted_and_beside_others(checkpoint, prefix_cache):
    params = SamplingParams(max_tokens=40, temperature=0.9, ignore_eos=True, n=5)
    requests = [
        Request(row, str(row), prompt_token_ids=tuple(ids), params=params)
        for row, ids in enumerate(random_sequences([9, 16, 23, 3]))
    ]
    ample = make_engine(checkpoint, block_size=4)
    expected = {(c.row, c.sample): c.token_ids for c in ample.generate(requests)}
    assert ample.scheduler.counts.preemptions == 0
    bytes_per_token = ample.kv_bytes // ample.scheduler.capacity
    tight = make_engine(checkpoint, block_size=4, kv_memory=330 * bytes_per_token, prefix_cache=prefix_cache)
    found = {(c.row, c.sample): c.token_ids for c in tight.generate(requests)}
    assert tight.scheduler.counts.preemptions > 0
    assert found == expected
    assert tight.blocks.num_used == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"n": 9}, "at most 8 sequences run at a time"),
        ({"logit_bias": ((5000, 1.0),)}, "logit_bias holds 5000, but the vocabulary has"),
        ({"top_k": 5000}, "top_k is 5000, but the vocabulary has"),
        ({"stop_token_ids": (5000,)}, "stop_token_ids holds 5000"),
        ({"presence_penalty": -1.0}, "presence_penalty is -1.0"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
    ],
)
def test_what_the_model_cannot_do_is_an_outcome_and_touches_no_neighbour(checkpoint, options, part):
    engine = make_engine(checkpoint, max_seqs=8)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    requests = [Request(row, str(row), prompt_token_ids=(3, 4, 5 + row), params=params) for row in range(3)]
    expected = {c.row: c.token_ids for c in engine.generate(requests)}
    requests[1] = requests[1]._replace(params=replace(params, **options))
    found = {c.row: c for c in engine.generate(requests)}
    assert found[1].status in (Status.BAD_ROW, Status.UNFIT)
    assert part in found[1].error
    assert {row: found[row].token_ids for row in (0, 2)} == {row: expected[row] for row in (0, 2)}


def test_a_bad_word_is_never_completed(checkpoint):
    engine = make_engine(checkpoint)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    request = Request(0, "0", prompt_token_ids=(3, 4, 5), params=params)
    (plain,) = engine.generate([request])
    group = engine.admission.group(request, (3, 4, 5))
    banned = plain.token_ids[4:7]
    group.sequences[0].bad_words = (banned,)
    engine.scheduler.add(group)
    while engine.scheduler.has_work:
        engine._pipeline.step()
    ids = group.sequences[0].generated.tolist()
    assert len(ids) == 30
    assert all(tuple(ids[i : i + 3]) != banned for i in range(len(ids)))


def test_requests_are_pulled_as_they_are_needed(engine):
    pulled = 0

    def endless():
        nonlocal pulled
        while True:
            pulled += 1
            yield Request(pulled, str(pulled), prompt="fox", params=SamplingParams(max_tokens=2))

    completions = engine.generate(endless())
    for _ in range(1000):
        next(completions)
    assert pulled < 1000 + 4 * engine.config.max_seqs
    completions.close()
    engine.scheduler.check()
    assert engine.blocks.num_used == 0
    assert not engine.scheduler.has_work


def test_only_one_generate_at_a_time(engine):
    first = engine.generate([Request(0, "0", prompt="fox"), Request(1, "1", prompt="dog")])
    next(first)
    if engine.scheduler.has_work:
        with pytest.raises(RuntimeError, match="still under way"):
            next(engine.generate([Request(2, "2", prompt="fox")]))
    first.close()


def test_what_cannot_be_generated_is_an_outcome(engine):
    fine = SamplingParams(max_tokens=2)
    found = run(
        engine,
        [
            Request(0, "0", prompt="", params=fine),
            Request(1, "1", prompt_token_ids=(VOCAB_SIZE,), params=fine),
            Request(2, "2", prompt_token_ids=(5,) * 1000, params=fine),
            Request(3, "3", prompt="fox", params=SamplingParams(top_p=0.0)),
            Request(4, "4", prompt="fox", params=SamplingParams(max_tokens=2, stop_token_ids=(VOCAB_SIZE,))),
            Request(5, "5", prompt="half a \ud800 pair", params=fine),
            Request(6, "6", prompt_token_ids=(2**70,), params=fine),
            Request(7, "7", prompt_token_ids=(1.7, 2.2), params=fine),
            Request(8, "8", prompt_token_ids=("a",), params=fine),
            Request(9, 9, prompt="fox", params=fine),
            Request(10, "10", prompt="fox", params=fine),
        ],
    )
    statuses = [found[i].status for i in range(11)]
    assert statuses == [Status.BAD_ROW] * 2 + [Status.TOO_LONG] + [Status.BAD_ROW] * 6 + [Status.OK] * 2
    assert all(found[i].error for i in range(9))
    assert all(found[i].text is None for i in range(9))


def test_poisoned_weights_give_nan_logits_and_not_a_crash(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][11] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(folder)
    found = run(engine, requests_for([[5, 11, 6], [5, 7, 6], [8, 9]], SamplingParams(max_tokens=3, temperature=0)))
    assert found[0].status is Status.NAN_LOGITS
    assert "NaN" in found[0].error
    assert found[1].status is found[2].status is Status.OK


def test_settings_that_cannot_work_are_refused(checkpoint):
    with pytest.raises(UsageError, match="--max-model-len"):
        make_engine(checkpoint, max_model_len=10_000)
    with pytest.raises(PagedgenError, match="--kv-memory"):
        make_engine(checkpoint, kv_memory=64)
    for name, value in [
        ("block_size", 0),
        ("max_model_len", 1),
        ("max_batch_tokens", 10**20),
        ("device", "gpu"),
        ("dtype", "fp16"),
        ("on_too_long", "truncate"),
    ]:
        with pytest.raises(UsageError, match=name):
            EngineConfig(**{name: value})


def test_the_default_pool_leaves_memory_free(checkpoint):
    from pagedgen.execution.memory import available_memory

    free, _ = available_memory(torch.device("cpu"))
    engine = make_engine(checkpoint, kv_memory=None, max_seqs=4)
    assert 0 < engine.kv_bytes < free
    # No more than all sequences at full length could use.
    assert engine.scheduler.capacity == 4 * engine.max_model_len


def test_params_default_to_the_model_s(engine):
    assert engine.default_params.temperature == 0
    (completion,) = engine.generate([Request(0, "0", prompt="fox", params=None)])
    assert completion.status is Status.OK
