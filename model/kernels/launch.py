"""How many programs a kernel that sums over rows gets, and what they leave behind."""

from functools import cache
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(x: Tensor, rows: int) -> int:
    """Programs of a kernel in which each walks over many rows and keeps a sum: as many as run at a time, or so."""
    most = 4 * _processors(x.device.index or 0) if x.is_cuda else 3  # under Triton's interpreter: few, but several
    return max(1, min(most, rows))


@triton.jit
def _sum(partial, total, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    kept = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        kept += tl.load(partial + at, mask=(row < count)[:, None] & (column < width)[None, :], other=0.0)
    tl.store(total + column, tl.sum(kept, 0).to(total.dtype.element_ty), mask=column < width)


def summed(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of what each program kept, float32, in a fixed order; rounded once, to dtype."""
    total = partial.new_empty(partial.shape[1:], dtype=dtype)
    width = prod(total.shape)
    _sum[(triton.cdiv(width, 16),)](partial, total, len(partial), width, ROWS=256, COLUMNS=16, num_warps=8)
    return total
