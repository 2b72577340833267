"""Adding a gradient to its sum in another precision: one that is there, and one that is a product of two matrices."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
TILE = {"ROWS": 32, "HEIGHT": 128, "WIDTH": 256, "num_warps": 8, "num_stages": 4}
"""The quickest of nine on an H200 for 1,024 rows an expert in bfloat16 (three share its time, and need more memory)."""


@triton.jit
def _accumulate(total, grad, size, first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(grad + at, mask=inside).to(tl.float32)
    if tl.load(first) == 0:
        value += tl.load(total + at, mask=inside).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


@cache
def _no_and_yes(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)


def _flag(first: bool | Tensor, device: torch.device) -> Tensor:
    return first if isinstance(first, Tensor) else _no_and_yes(device)[first]


def accumulate_(total: Tensor, grad: Tensor, *, first: bool | Tensor) -> None:
    """total += grad in float32, or total = grad if it is the first; both contiguous and of one shape.

    Args:
        first: as a tensor, int32 [1], the kernel reads it when it runs: 1 if it is, 0 if not.
    """
    size = total.numel()
    if size:
        flag = _flag(first, total.device)
        _accumulate[(triton.cdiv(size, BLOCK),)](total, grad, size, flag, BLOCK=BLOCK, num_warps=8)


@triton.jit
def _products(total, a, b, ends, height, width, first, ROWS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    across = tl.cdiv(width, WIDTH)
    tiles = tl.cdiv(height, HEIGHT) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    i = tile // across * HEIGHT + tl.arange(0, HEIGHT)
    j = tile % across * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    a += start.to(tl.int64) * height + row[:, None] * height + i[None, :]
    b += start.to(tl.int64) * width + row[:, None] * width + j[None, :]
    kept = tl.zeros([HEIGHT, WIDTH], dtype=tl.float32)
    for done in range(0, end - start, ROWS):
        real = (row < end - start - done)[:, None]
        x = tl.load(a, mask=real & (i < height)[None, :], other=0.0)
        y = tl.load(b, mask=real & (j < width)[None, :], other=0.0)
        kept = tl.dot(tl.trans(x), y, kept)
        a += ROWS * height
        b += ROWS * width
    at = (expert.to(tl.int64) * height + i)[:, None] * width + j[None, :]
    inside = (i < height)[:, None] & (j < width)[None, :]
    if tl.load(first) == 0:
        kept += tl.load(total + at, mask=inside, other=0.0)
    tl.store(total + at, kept, mask=inside)


def add_products_(total: Tensor, a: Tensor, b: Tensor, ends: Tensor, *, first: bool | Tensor) -> None:
    """total[e] += a[rows of e].T @ b[rows of e] for every e, or total[e] = … if it is the first.

    Args:
        total: float32 [experts, height, width].
        a, b: [rows, height] and [rows, width], of one dtype, sorted by expert; products are summed in float32.
        ends: int32 [experts], the row after each expert's last.
        first: as in `accumulate_`.
    """
    experts, height, width = total.shape
    tiles = triton.cdiv(height, TILE["HEIGHT"]) * triton.cdiv(width, TILE["WIDTH"])
    if experts * tiles:
        _products[(experts * tiles,)](
            total, a.contiguous(), b.contiguous(), ends, height, width, _flag(first, total.device), **TILE
        )  # fmt: skip
