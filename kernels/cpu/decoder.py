"""All layers of a decoder of the Llama family in one call of C++, which saves the time that each kernel's own takes."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from .library import Library, load
from .linear import PackedLinear
from .quantized import QuantizedLinear

Tensor = torch.Tensor


class _Product(ctypes.Structure):
    """PgProduct of decoder.cpp, field for field, as the classes below."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("columns", c_int32),
        ("inner", c_int32),
        ("bits", c_int32),
        ("gated", c_int32),
    )


class _LayerArgs(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", _Product),
        ("output", _Product),
        ("gate_up", _Product),
        ("down", _Product),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("window", c_int32),
        ("rotary", c_int32),
    )


class _DecoderArgs(ctypes.Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("final_norm", c_void_p),
        ("key_block_stride", c_int64),
        ("value_block_stride", c_int64),
        ("count", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("block_size", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("tokens", c_int64),
        ("residual", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("context_lens", c_void_p),
        ("query_start", c_void_p),
        ("rows", c_void_p),
        ("row_count", c_int64),
        ("out", c_void_p),
        ("workspace", c_void_p),
        ("seconds", c_void_p),
        ("sequences", c_int32),
        ("rotary_dim", c_int32),
        ("threads", c_int32),
    )


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of a layer and its cache: norms bfloat16 [hidden]; linear layers, gate_up gated; key and value cache
    bfloat16 [num_blocks, Hkv, block_size, D]. window: or None. rotary: whether queries and keys are rotated."""

    input_norm: Tensor
    qkv: object
    output: object
    post_norm: Tensor
    gate_up: object
    down: object
    key_cache: Tensor
    value_cache: Tensor
    window: int | None
    rotary: bool


class Decoder:
    """What the kernels give one by one, bit for bit: norm, projections, rotation and cache, attention, norm, MLP.

    final_norm: bfloat16 [hidden], after the last layer. seconds: float64 [len(parts)], to which each call adds what the
    parts took, once it is set.
    """

    parts = ("norm", "qkv", "rotary_write_kv", "paged_attention", "output", "gate_up", "down")

    def __init__(self, layers: Sequence[DecoderLayer], final_norm: Tensor, heads: int, eps: float) -> None:
        library = load()
        assert isinstance(library, Library)
        self._library = library
        # Their memory is pointed at; the cache is its owner's to keep.
        self._kept = [(x.input_norm, x.qkv, x.output, x.post_norm, x.gate_up, x.down) for x in layers], final_norm
        key, value = layers[0].key_cache, layers[0].value_cache
        self._layers = (_LayerArgs * len(layers))(*map(_layer_args, layers))
        self._args = _DecoderArgs(
            ctypes.addressof(self._layers),
            final_norm.data_ptr(),
            key.stride(0),
            value.stride(0),
            len(layers),
            final_norm.shape[0],
            heads,
            *(key.shape[1], key.shape[3], key.shape[2]),
            eps,
            key.shape[3] ** -0.5,
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self.seconds: ctypes.Array[c_double] | None = None

    @staticmethod
    def covers(layers: Sequence[DecoderLayer], final_norm: Tensor) -> bool:
        """Whether the layers can be computed so: in bfloat16, products in tiles, keys and values of one shape."""
        first = layers[0].key_cache
        return all(
            tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu"
            for layer in layers
            for tensor in (layer.input_norm, layer.post_norm, layer.key_cache, layer.value_cache, final_norm)
        ) and all(
            layer.key_cache.shape == layer.value_cache.shape == first.shape
            and layer.key_cache.stride() == layer.value_cache.stride() == first.stride()
            and first[0].is_contiguous()
            and all(
                isinstance(linear, PackedLinear | QuantizedLinear) and linear.kind == "tiles"
                for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
            )
            for layer in layers
        )

    def __call__(
        self,
        embedded: Tensor,
        rotation: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_start: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """embedded: bfloat16 [T, hidden], which is overwritten; rotation: float32 [T, rotary_dim] each; slot_mapping
        int64 [T]; tables, lens and starts as for `paged_attention`, int32; rows: int64 [R] -> [R, hidden], normed."""
        cosine, sine = (x.contiguous() for x in rotation)
        out = embedded.new_empty(len(rows), embedded.shape[1])
        args = self._args
        args.tokens, args.residual = len(embedded), embedded.data_ptr()
        args.cosine, args.sine, args.rotary_dim = cosine.data_ptr(), sine.data_ptr(), cosine.shape[1]
        args.slots, args.block_tables, args.table_stride = (
            slot_mapping.data_ptr(),
            block_tables.data_ptr(),
            block_tables.stride(0),
        )
        args.context_lens, args.query_start = context_lens.data_ptr(), query_start.data_ptr()
        args.rows, args.row_count, args.out = rows.data_ptr(), len(rows), out.data_ptr()
        args.sequences, args.threads = len(context_lens), torch.get_num_threads()
        args.seconds = None if self.seconds is None else ctypes.addressof(self.seconds)
        if len(embedded):
            needed = self._library.decoder_workspace(ctypes.addressof(args))
            if self._workspace.numel() < needed:
                self._workspace = torch.empty(needed, dtype=torch.uint8)
            args.workspace = self._workspace.data_ptr()
            self._library.decoder(ctypes.addressof(args))
        return out


def _layer_args(layer: DecoderLayer) -> _LayerArgs:
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return _LayerArgs(
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        *(_Product(*linear.tiles) for linear in linears if isinstance(linear, PackedLinear | QuantizedLinear)),
        layer.key_cache.data_ptr(),
        layer.value_cache.data_ptr(),
        layer.window or 0,
        layer.rotary,
    )
