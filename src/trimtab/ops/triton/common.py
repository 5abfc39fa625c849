"""Products of tiles: exact in float32, or with bfloat16 operands where the data is stored so."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exact(a, b):
    """a b in full float32, not TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def product(a, b, NARROW: tl.constexpr):
    """a b, accumulated in float32; with NARROW the operands are bfloat16, as tensor cores want them."""
    if NARROW:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    return tl.dot(a, b, input_precision="ieee")
