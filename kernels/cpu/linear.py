"""Linear layers with weights laid out once: for the tiles of AMX, or for oneDNN."""

import torch

from .launchers import silu_mul
from .library import GemmArgs, Library, load

Tensor = torch.Tensor

# The columns of a panel, and the bytes of the inner dimension that one step of a product takes.
_PANEL, _STEP_BYTES = 32, 64


class PackedLinear:
    """y = x @ weight.T + bias for x [..., in_features], for inference on a CPU.

    weight: [out_features, in_features]; bias: [out_features] or None. The layout is chosen at construction and only
    that copy is kept, so the caller frees the weight by dropping it. gated: the outputs are gates and then as many
    values, and y is silu(gate) * value. kind: what computes it:

    - "tiles": bfloat16 with the AMX instructions, by a kernel of our own. A row's result depends on that row alone, bit
      for bit, however many there are.
    - "onednn": bfloat16 and float16 where oneDNN has fast kernels for them, and float32. It is at least as fast as the
      plain layer from 4 rows on and has no slow row counts; a row count seen for the first time costs about a
      millisecond for each shape of layer, while oneDNN generates code for it.
    - "plain": everything else.
    """

    __slots__ = ("_bias", "_gated", "_in_features", "_out_features", "_weight", "kind")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> None:
        self._out_features, self._in_features = weight.shape
        self._gated = gated
        self._bias = None if bias is None else bias.detach()
        self.kind = _kind(weight, gated)
        self._weight = weight.detach()
        if self.kind == "tiles":
            self._bias = None if bias is None else bias.detach().float().contiguous()
            if gated:
                order = gated_order(self._out_features)
                self._weight, self._bias = self._weight[order], None if self._bias is None else self._bias[order]
            self._weight = pack_panels(self._weight)
        elif self.kind == "onednn":
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self._out_features // (2 if self._gated else 1))
        if self.kind == "tiles":
            rows = x.reshape(-1, self._in_features)
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            return gemm(rows, self._weight, self._out_features, self._bias, self._gated).view(*x.shape[:-1], -1)
        if self.kind == "plain":
            out = torch.nn.functional.linear(x, self._weight, self._bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return silu_mul(out.flatten(0, -2)).view(*x.shape[:-1], -1) if self._gated else out

    @property
    def has_argmax(self) -> bool:
        """Whether `argmax` can be called: of a layer of kind "tiles" that is not gated."""
        return self.kind == "tiles" and not self._gated

    def argmax(self, x: Tensor) -> Tensor:
        """int64 [T]: `reference.greedy_argmax` of what this layer gives for x [T, in], none of which is kept."""
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(x.shape[0], dtype=torch.int64)
        if len(out):
            library = load()
            assert isinstance(library, Library)
            library.gemm_argmax(_arguments(x, self._weight, out, self._out_features, self._bias))
        return out

    @property
    def tiles(self) -> tuple[int, int | None, None, int, int, int, bool]:
        """Of a layer of kind "tiles": where its panels and its bias lie, then no scales, columns, inner dimension, bits
        of a weight, and whether it is gated."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return self._weight.data_ptr(), bias, None, self._out_features, self._in_features, 16, self._gated


def gemm(
    x: Tensor,
    panels: Tensor,
    columns: int,
    bias: Tensor | None,
    gated: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, in] by the panels of a weight [columns, in] of the same dtype, unit stride in its last dimension ->
    bfloat16 [T, columns]. bias: float32 [columns]. gated: the columns are in `gated_order`, and half as many come out.
    scales: of int8, float32, for each column and each row."""
    library = load()
    assert isinstance(library, Library)
    out = torch.empty(x.shape[0], columns // 2 if gated else columns, dtype=torch.bfloat16)
    library.gemm(_arguments(x, panels, out, columns, bias, gated, scales))
    return out


def _arguments(
    x: Tensor,
    panels: Tensor,
    out: Tensor,
    columns: int,
    bias: Tensor | None,
    gated: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
) -> GemmArgs:
    if x.dtype is not panels.dtype:
        raise RuntimeError(f"the input of a layer of {panels.dtype} is {x.dtype}")
    return GemmArgs(
        x.data_ptr(),
        panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if scales is None else scales[0].data_ptr(),
        None if scales is None else scales[1].data_ptr(),
        out.data_ptr(),
        x.stride(0),
        out.stride(0),
        x.shape[0],
        columns,
        x.shape[1],
        8 * x.element_size(),
        gated,
        torch.get_num_threads(),
    )


def pack_panels(weight: Tensor) -> Tensor:
    """[out_features, in_features] of bfloat16 or int8 -> the panels that `pg_gemm` takes, as one row of numbers."""
    library = load()
    assert isinstance(library, Library)
    weight = weight.contiguous()
    columns, inner = weight.shape
    panels = weight.new_empty(-(-columns // _PANEL) * _PANEL * inner)
    library.pack_panels(
        weight.data_ptr(), columns, inner, weight.element_size(), panels.data_ptr(), torch.get_num_threads()
    )
    return panels


def gated_order(columns: int) -> Tensor:
    """int64 [columns], where gates come before values: 16 gates and the 16 values they are for in each panel."""
    return torch.arange(columns).view(2, -1, _PANEL // 2).transpose(0, 1).flatten()


def tiles_fit(weight: Tensor, gated: bool = False) -> bool:
    """Whether this CPU has the tiles, and the weight's inner dimension and its gates fill them."""
    library = load()
    return (
        weight.device.type == "cpu"
        and isinstance(library, Library)
        and library.has_gemm
        and weight.shape[1] > 0
        and weight.shape[1] * weight.element_size() % _STEP_BYTES == 0
        and not (gated and weight.shape[0] % _PANEL)
    )


def _kind(weight: Tensor, gated: bool) -> str:
    if weight.device.type != "cpu":
        return "plain"
    if weight.dtype is torch.bfloat16 and tiles_fit(weight, gated):
        return "tiles"
    return "onednn" if _onednn_can(weight.dtype) else "plain"


def _onednn_can(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32
