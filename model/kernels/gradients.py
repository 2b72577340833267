"""Adding a gradient to its sum in another precision, at the speed of memory."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _accumulate(total, grad, size, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(grad + at, mask=inside).to(tl.float32)
    if not FIRST:
        value += tl.load(total + at, mask=inside).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


def accumulate_(total: Tensor, grad: Tensor, *, first: bool) -> None:
    """total += grad in float32, or total = grad if it is the first; both contiguous and of one shape."""
    size = total.numel()
    if size:
        _accumulate[(triton.cdiv(size, BLOCK),)](total, grad, size, FIRST=first, BLOCK=BLOCK, num_warps=8)
