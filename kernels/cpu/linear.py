"""Linear layers with weights laid out once for oneDNN."""

import torch

Tensor = torch.Tensor


class PackedLinear:
    """y = x @ weight.T + bias for x [..., in_features], for inference on a CPU.

    weight: [out_features, in_features]; bias: [out_features] or None. oneDNN's own layout is chosen at construction and
    only that copy is kept, so the caller frees the weight by dropping it. It is at least as fast as the plain layer
    from 4 rows on and has no slow row counts; a row count seen for the first time costs about a millisecond for each
    shape of layer, while oneDNN generates code for it. Dtypes that oneDNN does not handle on this CPU keep the plain
    weight.
    """

    __slots__ = ("_bias", "_out_features", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._out_features = weight.shape[0]
        self._bias = None if bias is None else bias.detach()
        self._packed = _can_pack(weight)
        self._weight = weight.detach()
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), None)

    @property
    def packed(self) -> bool:
        """Whether oneDNN's layout is used; else the layer is a plain one."""
        return self._packed

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return torch.nn.functional.linear(x, self._weight, self._bias)
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self._out_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype is torch.float32
