"""Triton's interpreter, made right for bfloat16: import this where kernels are tested.

The tests of the kernels in kernels/triton run in triton's interpreter, on the CPU, because tests/conftest.py sets
TRITON_INTERPRET before anything imports triton. `TRITON_INTERPRET=0 python -m pytest tests/test_triton_*.py` runs the
same tests on a GPU. A test module begins with

    from triton_interpreter import DEVICE

and makes its tensors on DEVICE. The launchers take tensors there as they take those of a GPU; cut the fallback to
`reference` off (as tests/test_kernels_cpu.py does) to be sure that the kernel is what ran.

`last_program_first` shows what the interpreter's one order of programs would hide.

Importing this module replaces some of the interpreter's functions, for the whole process. numpy has no bfloat16, so
the interpreter keeps its bits in uint16; found wrong in triton 3.6 and 3.9, by reading and by tests/
test_triton_interpreter.py, and right with this module:

* float32 to bfloat16 is truncated, not rounded to nearest even; a NaN whose payload is in the low bits becomes
  infinity; with explicit rounding, halves are rounded up, and a carry out of the mantissa is lost;
* arithmetic, comparisons, min, max and negation work on the bits as integers;
* `tl.dot` multiplies the bits as integers;
* conversions to and from anything but float32 convert the bits as integers; constants are truncated or unsupported;
* float32 `tl.dot` is exact even when the kernel leaves the default of tf32 (ten bits of mantissa), so that a forgotten
  `input_precision="ieee"` stays unnoticed.

Reductions and scans of bfloat16 stay unsupported: they raise here, as kernels reduce in float32.

Besides, a kernel that calls functions of its own runs a third faster, as the language is not patched again for each
call, and loops over ranges work in triton 3.6 with numpy 2.4.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    ReduceScanOpInterface,
    TensorHandle,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET is off and there is no GPU", allow_module_level=True)

Array = np.ndarray[Any, Any]


def widened(bits: Array) -> Array:
    """The bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrowed(values: Array) -> Array:
    """The bits of float32 rounded to bfloat16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.where(np.isnan(bits.view(np.float32)), bits | np.uint32(0x400000), rounded)
    return (rounded >> np.uint32(16)).astype(np.uint16).reshape(np.shape(values))


def _is_bf16(value: object) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _wide(value: Any) -> Any:
    return TensorHandle(widened(value.data), tl.float32) if _is_bf16(value) else value


def _in_float32(function: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Elementwise on bfloat16 by way of float32, which for one operation gives the correctly rounded result."""

    def run(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        result = function(self, *map(_wide, args))
        if not any(map(_is_bf16, args)):
            return result
        if result.data.dtype == np.bool_:
            return TensorHandle(result.data, tl.int1)
        return TensorHandle(narrowed(result.data), tl.bfloat16)

    return run


def _cast(function: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def run(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if dst_type.scalar != tl.bfloat16:
            return function(self, _wide(src), dst_type)
        wide = _wide(src)
        if wide.dtype.scalar != tl.float32:
            wide = function(self, wide, tl.float32)
        return TensorHandle(narrowed(wide.data), tl.bfloat16)

    return run


def _rounding_cast(function: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def run(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype, rounding: Any) -> TensorHandle:
        if not _is_bf16(src) and dst_type.scalar != tl.bfloat16:
            return function(self, src, dst_type, rounding)
        if rounding != ir.ROUNDING_MODE.RTNE:
            raise NotImplementedError("rounding of bfloat16 other than to nearest even")
        return self.cast_impl(src, dst_type)

    return run


def _tf32(handle: TensorHandle) -> TensorHandle:
    if handle.data.dtype != np.float32:
        return handle
    bits = np.ascontiguousarray(handle.data).view(np.uint32) & np.uint32(0xFFFFE000)
    return TensorHandle(bits.view(np.float32), handle.dtype)


def _dot(function: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def run(self: InterpreterBuilder, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> TensorHandle:
        both = [_wide(x) for x in (a, b)]
        if precision == ir.INPUT_PRECISION.TF32 and not _is_bf16(a):
            both = [_tf32(x) for x in both]
        return function(self, *both, d, precision, imprecise)

    return run


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: ReduceScanOpInterface, values: Any) -> Any:
        for value in values if isinstance(values, tuple) else (values,):
            if value.dtype.scalar == tl.bfloat16:
                raise NotImplementedError("a reduction of bfloat16: convert to float32 first")
        return function(self, values)

    return run


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__globals__.get("tl") is not tl:  # triton's own functions, whose modules go by other names
            return function(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    return run


def _lang_tensor(function: Callable[..., None]) -> Callable[..., None]:
    def run(tensor: Any, scope: Any) -> None:
        function(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return run


def _bf16_constant(self: InterpreterBuilder, value: float) -> TensorHandle:
    return TensorHandle(narrowed(np.array([value], np.float32)), tl.bfloat16)


@contextmanager
def last_program_first() -> Iterator[None]:
    """Programs of a launch run in reverse order inside: two that write to one place give another result then."""
    forward = InterpreterBuilder.set_grid_idx

    def backward(self: InterpreterBuilder, *index: int) -> None:
        forward(self, *(size - 1 - i for size, i in zip(self.grid_dim, index, strict=True)))

    InterpreterBuilder.set_grid_idx = backward
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_idx = forward


def _patch() -> None:
    for name in ("binary_op", "unary_op", "create_fma", "create_clampf"):
        setattr(InterpreterBuilder, name, _in_float32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.get_bf16 = _bf16_constant
    InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_fp_to_fp = _rounding_cast(InterpreterBuilder.create_fp_to_fp)
    InterpreterBuilder.create_dot = _dot(InterpreterBuilder.create_dot)
    ReduceScanOpInterface.apply = _reduction(ReduceScanOpInterface.apply)
    InterpretedFunction.__call__ = _call(InterpretedFunction.__call__)
    interpreter._patch_lang_tensor = _lang_tensor(interpreter._patch_lang_tensor)
    interpreter.PAGEDGEN_PATCHED = True


if INTERPRETED and not hasattr(interpreter, "PAGEDGEN_PATCHED"):
    _patch()
