"""The compiled kernels as a ctypes library, or the reason why there is none."""

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from .build import BuildError, build

Function = Callable[..., None]


class AttentionArgs(ctypes.Structure):
    """PgAttention of kernels.h, field for field."""

    _fields_ = (
        ("query", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("key_block_stride", c_int64),
        ("value_block_stride", c_int64),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("context_lens", c_void_p),
        ("query_start", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("type", c_int32),
        ("sequences", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("threads", c_int32),
    )


class RotaryArgs(ctypes.Structure):
    """PgRotary of kernels.h, field for field."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("key_token_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("out", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("key_block_stride", c_int64),
        ("value_block_stride", c_int64),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("type", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("dim", c_int32),
        ("value_dim", c_int32),
        ("rotary_dim", c_int32),
        ("threads", c_int32),
    )


class GemmArgs(ctypes.Structure):
    """PgGemm of kernels.h, field for field."""

    _fields_ = (
        ("x", c_void_p),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("columns_scale", c_void_p),
        ("rows_scale", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("rows", c_int64),
        ("columns", c_int32),
        ("inner", c_int32),
        ("bits", c_int32),
        ("gated", c_int32),
        ("threads", c_int32),
    )


class Library:
    """The functions of the compiled kernels, with their argument types. Calls release the GIL."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        pointer, size = c_void_p, c_int64
        self._function("pg_set_runtime", pointer)(_openmp_entry())
        self.paged_attention = self._function("pg_paged_attention", ctypes.POINTER(AttentionArgs))
        self.write_kv = self._function(
            "pg_write_kv",
            *(pointer, size, size, pointer, size, size, pointer, pointer, size, size, pointer),
            *(size, c_int, c_int, size, size, c_int),
        )
        self.copy_blocks = self._function("pg_copy_blocks", pointer, size, size, size, pointer, size, c_int)
        self.rms_norm = self._function(
            "pg_rms_norm",
            *(c_int, pointer, size, pointer, size, pointer, pointer, pointer),
            *(size, c_int, c_float, c_int),
        )
        self.quantize_rows = self._function(
            "pg_quantize_rows", c_int, pointer, size, pointer, pointer, size, c_int, c_int
        )
        self.gate_mul = self._function("pg_gate_mul", c_int, c_int, pointer, size, pointer, size, c_int, c_int)
        self.rotary_write_kv = self._function("pg_rotary_write_kv", ctypes.POINTER(RotaryArgs))
        self.gemm = self._function("pg_gemm", ctypes.POINTER(GemmArgs))
        self.gemm_argmax = self._function("pg_gemm_argmax", ctypes.POINTER(GemmArgs))
        self.pack_panels = self._function("pg_pack_panels", pointer, size, size, c_int, pointer, c_int)
        self.decoder = self._function("pg_decoder", pointer)
        self.decoder_workspace = self._library.pg_decoder_workspace
        self.decoder_workspace.argtypes, self.decoder_workspace.restype = (pointer,), c_int64
        self.has_gemm = bool(self._library.pg_gemm_available())
        matrix = c_int, pointer, size, c_int, pointer
        self.greedy_argmax = self._function("pg_greedy_argmax", *matrix, size, pointer, c_int)
        self.gumbel_argmax = self._function("pg_gumbel_argmax", *matrix, size, *(pointer,) * 4, c_int)
        self.top_tokens = self._function(
            "pg_top_tokens", *matrix, size, pointer, c_int, pointer, pointer, pointer, c_int
        )
        self.lowest_kept = self._function("pg_lowest_kept", *matrix, size, *(pointer,) * 5, c_int)
        self.gumbel_noise = self._function("pg_gumbel_noise", pointer, pointer, pointer, size, size, c_int)

    def _function(self, name: str, *argtypes: type) -> Function:
        function = self._library[name]
        function.argtypes, function.restype = argtypes, None
        return function


def _openmp_entry() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch itself is linked to, whichever that is.

    A lookup through libtorch_cpu searches its dependencies, so a second runtime in the process is never picked.
    """
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(folder.glob("*torch_cpu.*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def load() -> Library | str:
    """The library, built at the first call; or one sentence on why it cannot be used."""
    if os.environ.get("PAGEDGEN_DISABLE_CPP", "") not in ("", "0"):
        return "PAGEDGEN_DISABLE_CPP is set"
    try:
        return Library(build())
    except BuildError as error:
        return str(error)
    except (OSError, AttributeError) as error:  # built, but not loadable here
        return f"the compiled kernels cannot be loaded: {error}"
