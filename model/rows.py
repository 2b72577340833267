"""Rows sorted by expert, and row gathers whose backward pass is a plain copy.

PyTorch's own backward of `index_select` is a scatter-add: slow on a CPU, unordered on a GPU, and rounding at every
addition in bfloat16. Where the caller knows both directions of a rearrangement, none of that is needed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ExpertOrder(NamedTuple):
    """Copies of tokens, one for each expert a token chose, sorted by expert and then by token."""

    choices: Tensor
    """int64 [tokens * topk]: which choice, token * topk + its place among the token's, each row is for."""
    tokens: Tensor
    """int64 [tokens * topk]: which token each row copies."""
    places: Tensor
    """int64 [tokens * topk]: the row of each choice; the inverse of `choices`."""
    ends: Tensor
    """int32 [experts]: the row after each expert's last."""


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        grad = grads[0].index_select(0, places)
        if ctx.copies > 1:
            copies = grad.view(-1, ctx.copies, *grad.shape[1:])
            grad = copies.sum(1, dtype=torch.float32).to(grad.dtype)
        return grad, None, None, None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], for an index without repetitions."""
    return _Take.apply(x, index)


def spread_rows(x: Tensor, index: Tensor, places: Tensor, copies: int = 1) -> Tensor:
    """x[index], where row i of x stands at the places places[i * copies : (i + 1) * copies] of the result.

    Rows of the result at no such place are padding: their gradient is dropped. The gradients of a row's copies are
    summed in float32.
    """
    return _Spread.apply(x, index, places, copies)


def sort_by_expert(ids: Tensor, counts: Tensor) -> ExpertOrder:
    """Sort the choices ids [tokens, topk] by expert; counts [any, experts] sum to how often each was chosen."""
    choices = ids.flatten().argsort(stable=True)
    places = torch.empty_like(choices)
    places[choices] = torch.arange(len(choices), device=ids.device)
    return ExpertOrder(choices, choices // ids.shape[1], places, counts.sum(0).cumsum(0, dtype=torch.int32))
