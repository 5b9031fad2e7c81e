"""The size of the KV pool: what is asked for, what is free, and the errors when it is not there."""

import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny_models import tiny_checkpoint

from pagedgen.config import EngineConfig
from pagedgen.errors import PagedgenError
from pagedgen.execution import memory
from pagedgen.execution.attention import choose_backend
from pagedgen.execution.kv_cache import KVCache, LayerKV
from pagedgen.models.loader import load_model

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    return load_model(EngineConfig(model=str(folder), dtype="float32")).model


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with this much memory, in a control group when there are files in the returned folder."""

    def set_up(available, total, within="slice/job", **group):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=total))
        monkeypatch.setattr(memory, "CONTROL_GROUPS", tmp_path)
        monkeypatch.setattr(memory, "OWN_GROUP", tmp_path / "own")
        (tmp_path / "own").write_text("1:name=x:/\n0::/slice/job\n")
        (tmp_path / "slice" / "job").mkdir(parents=True, exist_ok=True)
        for name, text in group.items():
            (tmp_path / within / f"memory.{name}").write_text(text)

    return set_up


def size(model, max_model_len=256, **config):
    return memory.size_pool(EngineConfig(**config), model, choose_backend(CPU), max_model_len).num_blocks


def per_block(model, block_size=16):
    return KVCache.bytes_per_block(model.spec.layers, block_size, model.spec.dtype)


def test_bytes_per_block_are_what_the_cache_takes():
    layers = (LayerKV(2, 8, 8), LayerKV(3, 12, 4), LayerKV(2, 8, 8))
    cache = KVCache(layers, 5, 4, torch.bfloat16, CPU)
    taken = sum(pool.numel() * pool.element_size() for pool in cache.pools.values())
    assert taken == 5 * KVCache.bytes_per_block(layers, 4, torch.bfloat16)
    assert cache.key(1).shape == (5, 3, 4, 12)
    assert cache.value(1).shape == (5, 3, 4, 4)
    cache.key(0).fill_(1)
    cache.key(2).fill_(2)
    assert cache.key(0).max() == 1


def test_the_pool_is_as_large_as_asked(model):
    assert size(model, kv_memory=10 * per_block(model) + 1) == 10


def suggested(error, flag):
    """The setting that an error's sentence names for a flag."""
    found = re.search(rf"{flag}(?: to)? (\d+)(MiB)?", str(error.value).rpartition(";")[2])
    assert found, str(error.value)
    return int(found[1]) << (20 if found[2] else 0)


def test_less_than_a_block_is_refused_with_the_block_that_fits(model):
    with pytest.raises(PagedgenError, match=r"--kv-memory .* less than one KV block .* --block-size") as error:
        size(model, kv_memory=per_block(model) - 1)
    block_size = suggested(error, "--block-size")
    assert block_size == 15
    assert size(model, kv_memory=per_block(model) - 1, block_size=block_size) == 1


def test_more_than_there_is_is_refused_with_what_would_fit(model, machine):
    machine(6 * GIB, 16 * GIB)
    with pytest.raises(PagedgenError, match=r"--kv-memory 7.0 GiB does not fit: 6.0 GiB of cpu .* the most") as error:
        size(model, kv_memory=7 * GIB)
    fits = suggested(error, "--kv-memory")
    assert 2 * GIB < fits < 3 * GIB
    assert size(model, kv_memory=fits) == fits // per_block(model)


def test_where_the_steps_take_it_all_the_largest_batch_is_named(tmp_path, machine):
    folder = tiny_checkpoint(tmp_path, "llama", intermediate_size=20_000)
    wide = load_model(EngineConfig(model=str(folder), dtype="float32")).model
    machine(5 * GIB, 16 * GIB)
    with pytest.raises(PagedgenError, match=r"no memory is left for the KV pool: 5.0 GiB of cpu memory") as error:
        size(wide, max_batch_tokens=1 << 16)
    fits = suggested(error, "--max-batch-tokens")
    assert 256 < fits < 1 << 16
    assert size(wide, max_batch_tokens=fits // 2) >= 1  # what is measured differs a little from time to time


def test_tables_that_do_not_fit_are_refused_with_how_many_would(model, machine):
    machine(8 * GIB, 16 * GIB)
    with pytest.raises(PagedgenError, match=r"--max-seqs 100000000 does not fit: .* 8.0 GiB of memory") as error:
        size(model, max_seqs=10**8)
    fits = suggested(error, "--max-seqs")
    memory.check_tables(EngineConfig(max_seqs=fits), 256)
    with pytest.raises(PagedgenError):
        memory.check_tables(EngineConfig(max_seqs=fits + 1), 256)


def test_what_is_set_up_is_named_when_memory_runs_out():
    with (
        pytest.raises(
            PagedgenError, match=r"KV pool takes 2.0 GiB \(--kv-memory\).* 256 sequences .* MiB \(--max-seqs"
        ),
        memory.naming_memory(EngineConfig(), 2 * GIB, 8192),
    ):
        raise MemoryError


def test_by_default_it_is_what_is_free_less_a_reserve(model, machine):
    machine(8 * GIB, 16 * GIB)
    activations = memory.measure_activations(EngineConfig(), model, choose_backend(CPU), 256)
    blocks = size(model, max_model_len=1 << 20)
    taken = blocks * per_block(model)
    assert taken <= 8 * GIB - int(0.2 * 16 * GIB) - 3 * 4 * 256 * model.spec.vocab_size
    assert taken > 8 * GIB - int(0.2 * 16 * GIB) - 4 * activations - GIB // 2


def test_by_default_it_is_no_more_than_could_be_used(model, machine):
    machine(8 * GIB, 16 * GIB)
    assert size(model, max_model_len=100, max_seqs=3) == 3 * 7


def test_no_room_for_a_block_is_refused(model, machine):
    machine(3 * GIB, 16 * GIB)
    with pytest.raises(PagedgenError, match=r"no memory is left for the KV pool"):
        size(model)


def test_a_control_group_s_limit_counts_and_its_page_cache_does_not(machine):
    machine(8 * GIB, 16 * GIB)
    assert memory.available_memory(CPU) == (8 * GIB, 16 * GIB)
    machine(8 * GIB, 16 * GIB, max="max\n", current=f"{GIB}\n", stat="inactive_file 0\n")
    assert memory.available_memory(CPU) == (8 * GIB, 16 * GIB)
    machine(8 * GIB, 16 * GIB, max=f"{4 * GIB}\n", current=f"{3 * GIB}\n", stat=f"anon 1\ninactive_file {GIB}\n")
    assert memory.available_memory(CPU) == (2 * GIB, 4 * GIB)
    machine(8 * GIB, 16 * GIB, "slice", max=f"{2 * GIB}\n", current=f"{GIB}\n", stat="anon 1\n")
    assert memory.available_memory(CPU) == (GIB, 2 * GIB)


def test_what_torch_keeps_of_a_gpu_is_free(monkeypatch):
    """Of an engine that is gone, say, and of the probe before."""
    kept = [3 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB - sum(kept), 10 * GIB))
    assert memory.available_memory(torch.device("cuda")) == (9 * GIB, 10 * GIB)


def test_activations_grow_with_the_tokens_of_a_step(tmp_path):
    """With an MLP so wide that its activations stand out among the pages a process takes and gives back anyway."""
    folder = tiny_checkpoint(tmp_path, "llama", intermediate_size=20_000)
    wide = load_model(EngineConfig(model=str(folder), dtype="float32")).model
    config = EngineConfig(max_batch_tokens=1 << 14, max_seqs=4)
    measured = memory.measure_activations(config, wide, choose_backend(CPU), 256)
    # Gate, up and their product, of 64 times the tokens that are probed.
    exact = (1 << 14) * 3 * 20_000 * 4
    assert 0.5 * exact <= measured <= 3 * exact


def test_the_torch_path_counts_the_context(model):
    from pagedgen_kernels import reference

    from pagedgen.execution.attention import AttentionBackend

    def measure(length):
        return memory._context_bytes(model, AttentionBackend("torch", reference), length)

    assert measure(100_000) - measure(1000) == 3 * 4 * 99_000 * 2 * (8 + 8)
    assert memory._context_bytes(model, choose_backend(CPU), 1000) in (0, measure(1000))
