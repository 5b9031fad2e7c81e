"""Rows of logits, and floats as integers that order as they do."""

import torch
import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
# What `ordered` gives for the infinities, and what stands for NaN: more than any number.
LOWEST_ORDER = tl.constexpr(-(2**31) + 0x7FFFFF)
HIGHEST_ORDER = tl.constexpr(0x7F800000)
NAN_ORDER = tl.constexpr(0x7FFFFFFF)

# How many of the low bits of `ordered` say nothing, for logits of each type.
SILENT_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def ordered(x):
    """float32 -> int32 with the same order; both zeros give 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order(order):
    """The float32 of each int32 of `ordered`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def from_code(code, SILENT: tl.constexpr):
    """The float32 of each `ordered(x) >> SILENT`, for x whose silent bits are zeros."""
    return from_order((code << SILENT) | tl.where(code < 0, (1 << SILENT) - 1, 0))


@triton.jit
def row_of(logits, stride, rows, draw):
    """A pointer to the row of a draw: rows[draw], or the draw's own number where there are no rows."""
    row = draw.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + draw).to(tl.int64)
    return logits + row * stride


@triton.jit
def load_logits(row, token, VOCAB: tl.constexpr):
    """float32 at these tokens, -inf past the vocabulary's end."""
    return tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
