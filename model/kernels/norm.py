"""RMSNorm, and the boundary between two sublayers: norm of the branch, depth-scaled residual, next sublayer's norm."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from beam_rl.model.kernels.launch import programs, summed


@triton.jit
def _forward(
    branch, residual, weight, next_weight, total, normed, width, eps, branch_factor, residual_factor,
    RESIDUAL: tl.constexpr, NEXT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    dtype = normed.dtype.element_ty
    x = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    h = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) * (x * inverse)
    if RESIDUAL:
        old = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        ours = (h.to(dtype).to(tl.float32) * branch_factor).to(dtype).to(tl.float32)
        x = (ours + (old * residual_factor).to(dtype).to(tl.float32)).to(dtype)
        tl.store(total + at, x, mask=inside)
        if NEXT:
            x = x.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
            h = tl.load(next_weight + columns, mask=inside, other=0.0).to(tl.float32) * (x * inverse)
            tl.store(normed + at, h.to(dtype), mask=inside)
    else:
        tl.store(normed + at, h.to(dtype), mask=inside)


@triton.jit
def _norm_backward(x, grad, weight, width, eps):
    """Of one row, float32: the gradient of x, and the row's share in the weight's."""
    weighted = grad * weight
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    mean = tl.sum(weighted * x, 0) * inverse / width  # of the product with the normed x
    x *= inverse
    return inverse * (weighted - x * mean), grad * x


@triton.jit
def _backward(
    branch, total, weight, next_weight, total_grad, normed_grad, branch_grad, residual_grad, partial,
    rows, width, eps, branch_factor, residual_factor,
    RESIDUAL: tl.constexpr, NEXT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], dtype=tl.float32)
    next_sum = tl.zeros([BLOCK], dtype=tl.float32)
    if NEXT:
        next_w = tl.load(next_weight + columns, mask=inside, other=0.0).to(tl.float32)
    for row in tl.range(program, rows, step, num_stages=2):
        at = (tl.zeros([1], dtype=tl.int64) + row) * width + columns
        x = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            grad = tl.load(total_grad + at, mask=inside, other=0.0).to(tl.float32)
            if NEXT:
                y = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
                g = tl.load(normed_grad + at, mask=inside, other=0.0).to(tl.float32)
                g, share = _norm_backward(y, g, next_w, width, eps)
                next_sum += share
                grad += g
            tl.store(residual_grad + at, (grad * residual_factor).to(residual_grad.dtype.element_ty), mask=inside)
            grad *= branch_factor
        else:
            grad = tl.load(normed_grad + at, mask=inside, other=0.0).to(tl.float32)
        grad, share = _norm_backward(x, grad, w, width, eps)
        weight_sum += share
        tl.store(branch_grad + at, grad.to(branch_grad.dtype.element_ty), mask=inside)
    kept = partial + program * width + columns
    if NEXT:
        kept += program * width
        tl.store(kept + width, next_sum, mask=inside)
    tl.store(kept, weight_sum, mask=inside)


@cache
def _options(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        rms_norm_into(y, x, weight, eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        width = x.shape[-1]
        rows = x.numel() // width
        count = programs(x, rows)
        x_grad = torch.empty_like(x)
        partial = torch.empty(count, width, dtype=torch.float32, device=x.device)
        _backward[(count,)](
            x, x, weight, weight, x, grads[0].contiguous(), x_grad, x_grad, partial,
            rows, width, ctx.eps, 1.0, 1.0, RESIDUAL=False, NEXT=False, **_options(width),
        )  # fmt: skip
        return x_grad, summed(partial, weight.dtype), None


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        weight: Tensor,
        residual: Tensor,
        next_weight: Tensor | None,
        eps: float,
        factors: tuple[float, float],
    ) -> tuple[Tensor, Tensor | None]:
        branch, residual = branch.contiguous(), residual.contiguous()
        width = branch.shape[-1]
        rows = branch.numel() // width
        total = torch.empty_like(branch)
        normed = None if next_weight is None else torch.empty_like(branch)
        if rows:
            _forward[(rows,)](
                branch, residual, weight, weight if next_weight is None else next_weight,
                total, total if normed is None else normed, width, eps, *factors,
                RESIDUAL=True, NEXT=next_weight is not None, **_options(width),
            )  # fmt: skip
        ctx.save_for_backward(branch, weight, None if normed is None else total, next_weight)
        ctx.eps, ctx.factors = eps, factors
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        branch, weight, total, next_weight = ctx.saved_tensors
        width = branch.shape[-1]
        rows = branch.numel() // width
        count = programs(branch, rows)
        branch_grad, residual_grad = torch.empty_like(branch), torch.empty_like(branch)
        follows = next_weight is not None
        partial = torch.empty(count, 1 + follows, width, dtype=torch.float32, device=branch.device)
        total_grad = grads[0].contiguous()
        _backward[(count,)](
            branch, total if follows else branch, weight, next_weight if follows else weight,
            total_grad, grads[1].contiguous() if follows else total_grad, branch_grad, residual_grad, partial,
            rows, width, ctx.eps, *ctx.factors, RESIDUAL=True, NEXT=follows, **_options(width),
        )  # fmt: skip
        weight_grads = summed(partial, weight.dtype)
        return branch_grad, weight_grads[0], residual_grad, weight_grads[1] if follows else None, None, None


def rms_norm_into(y: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Write `numerics.rms_norm` to y, of x's shape; both contiguous. Autograd knows nothing of it."""
    width = x.shape[-1]
    if rows := x.numel() // width:
        _forward[(rows,)](
            x, x, weight, weight, x, y, width, eps, 1.0, 1.0, RESIDUAL=False, NEXT=False, **_options(width)
        )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`numerics.rms_norm`."""
    return _Norm.apply(x, weight, eps)


def residual_addition(
    branch: Tensor, weight: Tensor, residual: Tensor, eps: float, factors: tuple[float, float]
) -> Tensor:
    """`numerics.depth_residual` of the normed branch; factors from `numerics.depth_scales`."""
    return _Boundary.apply(branch, weight, residual, None, eps, factors)[0]


def boundary(
    branch: Tensor, weight: Tensor, residual: Tensor, next_weight: Tensor, eps: float, factors: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """`residual_addition`, and the next sublayer's norm of its result."""
    return _Boundary.apply(branch, weight, residual, next_weight, eps, factors)
