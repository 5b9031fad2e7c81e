"""Linear layers with weights and activations of eight bits, scaled by output channel and by token (W8A8, dynamic)."""

import torch

from .. import reference
from .launchers import TYPES, silu_mul
from .library import Library, load
from .linear import gated_order, gemm, pack_panels, tiles_fit

Tensor = torch.Tensor

# oneDNN's fast products take activations without a sign, around this zero.
_ZERO_POINT = 128


class QuantizedLinear:
    """y = x @ weight.T + bias for x [..., in_features] of bfloat16, about: `reference.int8_linear` says exactly how.

    weight: [out_features, in_features] of any float type; bias: [out_features] or None. gated: as for `PackedLinear`.
    kind: "tiles" with the AMX instructions, where a row's result depends on that row alone, bit for bit; "onednn"
    elsewhere.
    """

    __slots__ = ("_bias", "_gated", "_in_features", "_out_features", "_scales", "_weight", "_zeros", "kind")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> None:
        self._out_features, self._in_features = weight.shape
        self._gated = gated
        values, scales = reference.quantize_rows(weight.detach())
        self._scales = scales.reshape(-1).contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._zeros = torch.zeros(self._out_features, dtype=torch.int32)
        self.kind = "tiles" if tiles_fit(values, gated) else "onednn"
        if self.kind == "tiles":
            if gated:
                order = gated_order(self._out_features)
                values, self._scales = values[order], self._scales[order]
                self._bias = None if self._bias is None else self._bias[order]
            self._weight = pack_panels(values)
        else:
            self._weight = torch.ops.onednn.qlinear_prepack(values, None)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._in_features)
        if not rows.shape[0]:
            return x.new_empty(*x.shape[:-1], self._out_features // (2 if self._gated else 1))
        values, scales = quantize_rows(rows)
        if self.kind == "tiles":
            out = gemm(values, self._weight, self._out_features, self._bias, self._gated, (self._scales, scales))
        else:
            out = self._onednn(values, scales)
            out = silu_mul(out) if self._gated else out
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    @property
    def tiles(self) -> tuple[int, int | None, int, int, int, int, bool]:
        """As of `PackedLinear`, with where the scales of the columns lie."""
        bias = None if self._bias is None else self._bias.data_ptr()
        sizes = self._out_features, self._in_features
        return self._weight.data_ptr(), bias, self._scales.data_ptr(), *sizes, 8, self._gated

    def _onednn(self, values: Tensor, scales: Tensor) -> Tensor:
        shifted = (values.to(torch.int16) + _ZERO_POINT).to(torch.uint8)
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(shifted, 1.0, _ZERO_POINT, self._weight, self._scales, self._zeros, None, 1.0, 0),
            *(torch.float32, "none", [], ""),
        )
        out = sums * scales
        return (out if self._bias is None else out + self._bias).to(torch.bfloat16)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.quantize_rows` for x [T, N], in C++ where it can be."""
    library = load()
    strided = x.shape[1] > 1 and x.stride(1) != 1
    if not isinstance(library, Library) or x.dtype not in TYPES or strided:
        return reference.quantize_rows(x)
    values = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(x.shape[0], 1)
    library.quantize_rows(
        *(TYPES[x.dtype], x.data_ptr(), x.stride(0), values.data_ptr(), scales.data_ptr()),
        *(x.shape[0], x.shape[1], torch.get_num_threads()),
    )
    return values, scales
