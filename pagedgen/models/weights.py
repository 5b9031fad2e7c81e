"""Reading safetensors checkpoints, single or sharded, memory-mapped."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedgen.errors import PagedgenError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it holds, as its file's header says. dtype is None for one that is no float."""

    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Checkpoint:
    """The tensors of a folder's safetensors files. Opening it reads the headers only.

    Raises PagedgenError when the folder has no safetensors, a shard is missing, or a file is damaged or cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for file in _files(folder) for name, info in _read_header(file).items()
        }
        self._open: dict[tuple[Path, torch.device], Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One tensor, read onto the device and converted there. Raises PagedgenError when the checkpoint does not have
        it."""
        from safetensors import safe_open

        info = self.tensors.get(name)
        if info is None:
            raise PagedgenError(
                f"the checkpoint {self.folder} has no tensor {name!r}, which its config.json calls for; "
                "check that it was downloaded or saved completely"
            )
        file = self._open.get((info.file, device))
        if file is None:
            file = self._open[info.file, device] = safe_open(info.file, framework="pt", device=str(device))
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor.to(dtype)

    def main_dtype(self) -> torch.dtype:
        """The float type that most of the parameters have."""
        counts: dict[torch.dtype, int] = {}
        for info in self.tensors.values():
            if info.dtype is not None:
                counts[info.dtype] = counts.get(info.dtype, 0) + info.numel
        return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)

    def num_parameters(self) -> int:
        return sum(info.numel for info in self.tensors.values())


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise PagedgenError(f"{index} is damaged ({error}); download the model again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise PagedgenError(f"{folder} lacks {missing[0]}, which {_INDEX} names; download the model again")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise PagedgenError(
            f"{folder} has its weights only as pickled PyTorch files, which can run code when they are read; "
            "convert them first with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise PagedgenError(f"{folder} has no {_SINGLE}; give a model folder with safetensors weights")


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The header of a safetensors file: an 8-byte little-endian length, then JSON with dtype, shape and byte range."""
    damaged = PagedgenError(f"{file} is damaged or cut short; download the model again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8 or (length := struct.unpack("<Q", prefix)[0]) > size - 8:
            raise damaged
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise damaged from None
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end > size:
        raise damaged
    return {
        name: TensorInfo(file, _DTYPES.get(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()
    }
