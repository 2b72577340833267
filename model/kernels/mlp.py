"""SwiGLU, and what surrounds the experts: copies of rows on their way out, their weighted sum on the way back."""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _swiglu_forward(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, grad, gate_up_grad, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first, second = row * 2 * width + columns, row * 2 * width + width + columns
    gate = tl.load(gate_up + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + second, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    dtype = gate_up_grad.dtype.element_ty
    tl.store(gate_up_grad + first, (g * up * slope).to(dtype), mask=inside)
    tl.store(gate_up_grad + second, (g * gate * sigmoid).to(dtype), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return activate(gate_up, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        width = gate_up.shape[-1] // 2
        gate_up_grad = torch.empty_like(gate_up)
        if rows := gate_up.numel() // (2 * width):
            grid = (rows, triton.cdiv(width, BLOCK))
            _swiglu_backward[grid](gate_up, grads[0].contiguous(), gate_up_grad, width, BLOCK=BLOCK)
        return gate_up_grad, None


def activate(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """`swiglu` of a contiguous tensor, without its gradient."""
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=dtype, device=gate_up.device)
    if rows := out.numel() // width:
        _swiglu_forward[(rows, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


def swiglu(gate_up: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`numerics.swiglu` of the halves of gate_up [..., 2 * width], rounded to dtype (default: gate_up's)."""
    return _SwiGLU.apply(gate_up, dtype or gate_up.dtype)


@triton.jit
def _sum_copies(rows, places, weights, out, width, scaling, TOPK: tl.constexpr, WEIGHTED: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(TOPK):
        place = tl.load(places + token * TOPK + k)
        x = tl.load(rows + place * width + columns, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(weights + token * TOPK + k)
        total += x
    tl.store(out + token * width + columns, (total * scaling).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_backward(rows, places, weights, grad, rows_grad, weights_grad, width, scaling, TOPK: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    token, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + token * TOPK + k)
    weight = tl.load(weights + token * TOPK + k)
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        g = tl.load(grad + token * width + columns, mask=inside, other=0.0).to(tl.float32) * scaling
        x = tl.load(rows + place * width + columns, mask=inside, other=0.0).to(tl.float32)
        product += g * x
        tl.store(rows_grad + place * width + columns, (g * weight).to(rows_grad.dtype.element_ty), mask=inside)
    tl.store(weights_grad + token * TOPK + k, tl.sum(product, 0))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.save_for_backward(rows, places, weights)
        ctx.scaling = scaling
        return weighted_sum(rows, places, weights, scaling, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        rows, places, weights = ctx.saved_tensors
        tokens, topk = weights.shape
        width = rows.shape[1]
        # Rows at no token's place are padding, whose gradient is nothing.
        rows_grad = torch.empty_like(rows) if len(rows) == len(places) else torch.zeros_like(rows)
        weights_grad = torch.empty_like(weights)
        if tokens:
            _combine_backward[(tokens, topk)](
                rows, places, weights, grads[0].contiguous(), rows_grad, weights_grad, width, ctx.scaling,
                TOPK=topk, BLOCK=BLOCK,
            )  # fmt: skip
        return rows_grad, None, weights_grad, None, None


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """`combine` of contiguous tensors, without its gradients."""
    (tokens, topk), width = weights.shape, rows.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=rows.device)
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        _sum_copies[grid](rows, places, weights, out, width, scaling, TOPK=topk, WEIGHTED=True, BLOCK=BLOCK)
    return out


def combine(rows: Tensor, places: Tensor, weights: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """`numerics.combine_experts` of the rows [rows, hidden] at places [tokens * topk], without gathering them first.

    Args:
        weights: float32 [tokens, topk].

    Returns:
        [tokens, hidden] in dtype.
    """
    return _Combine.apply(rows, places, weights, scaling, dtype)


@triton.jit
def _take(x, index, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    tl.store(out + row * width + columns, tl.load(x + tl.load(index + row) * width + columns, mask=inside), mask=inside)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] of contiguous rows, without its gradient: `index_select` reaches little more than half of this speed."""
    width = prod(x.shape[1:])
    out = x.new_empty(len(index), *x.shape[1:])
    if len(index):
        block = min(4096, triton.next_power_of_2(width))
        _take[(len(index), triton.cdiv(width, block))](x, index, out, width, BLOCK=block)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return take_rows(x.contiguous(), index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return sum_copies(grads[0], places, ctx.copies), None, None, None


def spread_rows(x: Tensor, index: Tensor, places: Tensor, copies: int) -> Tensor:
    """`rows.spread_rows`: the gradients of a row's copies are summed in float32 where they lie."""
    return _Spread.apply(x, index, places, copies)


def sum_copies(rows: Tensor, places: Tensor, copies: int) -> Tensor:
    """[tokens, …]: the float32 sums of each token's rows, which are at the places places[token * copies : …]."""
    rows = rows.contiguous()
    tokens, width = len(places) // copies, prod(rows.shape[1:])
    out = rows.new_empty(tokens, *rows.shape[1:])
    if tokens:
        _sum_copies[(tokens, triton.cdiv(width, BLOCK))](
            rows, places, rows, out, width, 1.0, TOPK=copies, WEIGHTED=False, BLOCK=BLOCK
        )
    return out
