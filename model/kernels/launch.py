"""How many programs a kernel that sums over rows gets, and what they leave behind."""

from functools import cache

import torch
from torch import Tensor


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(x: Tensor, rows: int) -> int:
    """Programs of a kernel in which each walks over many rows and keeps a sum: a few a multiprocessor."""
    most = 2 * _processors(x.device.index or 0) if x.is_cuda else 3  # under Triton's interpreter: few, but several
    return max(1, min(most, rows))


def summed(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of what each program kept, in a fixed order."""
    return partial.sum(0).to(dtype)
