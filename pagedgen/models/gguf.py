"""GGUF files of the Llama family, converted once into a folder of safetensors that loads like any other model."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedgen.config import Dtype
from pagedgen.errors import PagedgenError
from pagedgen.models.gguf_format import PERMUTED, GgufFile, hf_tensor_name, unpermute
from pagedgen.models.support import resolve_dtype
from pagedgen.units import format_bytes

# Raise it when the conversion changes, so that folders of an older one are not used
_VERSION = 2
_SHARD_BYTES = 2 << 30
# Pre-tokenizers that the reader in `transformers` gets right without an entry in its table
_PLAIN_PRE_TOKENIZERS = frozenset({"default", "gpt-2", "gpt2"})


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is remembered of a GGUF file, so that a later start neither reads nor hashes it."""

    sha256: str
    dtype: str


def check_gguf(path: Path) -> None:
    """Raise PagedgenError when the file is damaged or no model of the Llama family."""
    _describe(path)


def checkpoint_dtype(path: Path) -> torch.dtype:
    """The dtype the file's weights count as; quantized ones as bfloat16."""
    dtype: torch.dtype = getattr(torch, _describe(path).dtype)
    return dtype


def convert_gguf(path: Path, dtype: torch.dtype) -> Path:
    """The folder with config.json, weights in `dtype`, tokenizer and generation_config.json; converted on first use.

    The folder is keyed by the file's content and appears whole or not at all; of two processes that convert one file at
    once the second waits and uses the first one's. Raises PagedgenError when the cache cannot be written.
    """
    from filelock import FileLock

    folder = _folder_of(_describe(path), dtype)
    name = folder.name
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{name}.unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{name}.lock")):
            if not folder.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                _write_model(GgufFile(path), dtype, unfinished)
                unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise PagedgenError(
            f"{path} cannot be converted into the cache folder {folder.parent} ({error.strerror or error}); "
            f"{'free space there, or ' if is_full else ''}set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def find_converted(path: Path, dtype: Dtype, device: torch.device) -> Path | None:
    """The folder that `convert_gguf` would return for a run in `dtype` on `device`, if it is there already; the file is
    neither read nor hashed for it."""
    entry = _known_entry(path)
    if entry is None:
        return None
    folder = _folder_of(entry, resolve_dtype(dtype, getattr(torch, entry.dtype), device))
    return folder if folder.is_dir() else None


def write_without_weights(file: GgufFile, dtype: torch.dtype, folder: Path) -> None:
    """Write what `convert_gguf` does, but no weights: tokenizer, config.json and generation_config.json."""
    from transformers import AutoConfig

    _write_tokenizer(file, folder)
    # With every default spelled out, so that `read_converted_config` needs no class to fill them in.
    full = AutoConfig.for_model(**file.config(), dtype=dtype).to_dict()
    (folder / "config.json").write_text(json.dumps(full, indent=2))
    ids = {f"{name}_token_id": token for name, token in file.token_ids().items() if token is not None}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))


def read_converted_config(folder: Path) -> Any:
    """The `transformers` config of a folder that `convert_gguf` made.

    The base class holds it: importing the architecture's own costs over a second, in every run's start.
    """
    from transformers.configuration_utils import PreTrainedConfig

    return PreTrainedConfig.from_dict(json.loads((folder / "config.json").read_text()))


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagedgen" / "models"


def _folder_of(entry: _Entry, dtype: torch.dtype) -> Path:
    return _cache_root() / f"{entry.sha256}-{str(dtype).removeprefix('torch.')}-v{_VERSION}"


def _index_of(path: Path) -> Path:
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{_VERSION}".encode()).hexdigest()
    return _cache_root() / "index" / f"{key}.json"


def _known_entry(path: Path) -> _Entry | None:
    """None where there is none yet, or none that is whole."""
    try:
        return _Entry(**json.loads(_index_of(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _describe(path: Path) -> _Entry:
    """The file's entry: from the index when path, size and time of change are known, else read and put there."""
    if (known := _known_entry(path)) is not None:
        return known
    index = _index_of(path)
    file = GgufFile(path)
    file.config()
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    entry = _Entry(digest, str(file.checkpoint_dtype()).removeprefix("torch."))
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        temporary = index.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"sha256": entry.sha256, "dtype": entry.dtype}))
        temporary.replace(index)
    except OSError:
        pass  # the index only saves time
    return entry


def _write_model(file: GgufFile, dtype: torch.dtype, folder: Path) -> None:
    config = file.config()
    _check_disk(file, dtype, folder)
    write_without_weights(file, dtype, folder)
    _write_weights(_tensors(file, config, dtype), folder)


def _check_disk(file: GgufFile, dtype: torch.dtype, folder: Path) -> None:
    need = sum(int(tensor.n_elements) for tensor in file.tensors.values()) * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if need > free:
        raise PagedgenError(
            f"{file.path} needs {format_bytes(need)} for its converted weights and {folder.parent} has "
            f"{format_bytes(free)} free; free space there, or set XDG_CACHE_HOME to another folder"
        )


def _tensors(file: GgufFile, config: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights under the names of `transformers`, dequantized, one at a time."""
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, stored in file.tensors.items():
        target = hf_tensor_name(name)
        if target is None:
            continue  # the rope factors, which are in the config
        try:
            values = np.require(dequantize(stored.data, stored.tensor_type), np.float32, ("C", "W"))
        except NotImplementedError:
            raise file.refuse(f"its tensors are quantized as {stored.tensor_type.name}") from None
        tensor = torch.from_numpy(values)
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if part in heads and file.architecture in PERMUTED:
            tensor = unpermute(tensor, heads[part])
        yield target, tensor.to(dtype)
    if config["attention_bias"] and not file.has_bias("attn_output"):
        for layer in range(config["num_hidden_layers"]):
            yield f"model.layers.{layer}.self_attn.o_proj.bias", torch.zeros(config["hidden_size"], dtype=dtype)


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write the shards as they fill, so that memory holds one of them and never the model."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    shards = 0
    size = 0

    def flush() -> None:
        nonlocal shard, shards, size
        shards += 1
        file_name = f"model-{shards:05}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
        shard, size = {}, 0

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        if size > _SHARD_BYTES:
            flush()
    if shard:
        flush()
    if shards == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    """The tokenizer the file describes, with its chat template, as `transformers` rebuilds it."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, split = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split != "smollm" and split not in _PLAIN_PRE_TOKENIZERS | _known_splits():
        raise file.refuse(f"its tokenizer splits text in a way ({split}) that cannot be rebuilt")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        file.path.parent, gguf_file=file.path.name, trust_remote_code=False
    )
    if split == "smollm":
        # SmolLM's merges were learned with every digit on its own, which transformers leaves out
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(folder)


def _known_splits() -> frozenset[str]:
    """The pre-tokenizers that this version of `transformers` rebuilds."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # before its table of splits, by architecture
        return frozenset({"llama-bpe", "qwen2"})
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)
