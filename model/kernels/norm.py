"""RMSNorm, and the boundary between two sublayers: norm of the branch, depth-scaled residual, next sublayer's norm."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from beam_rl.model.kernels.launch import programs, summed


@triton.jit
def _forward(
    branch, residual, weight, next_weight, total, normed, scale, next_scale,
    width, eps, branch_factor, residual_factor,
    RESIDUAL: tl.constexpr, NEXT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    dtype = normed.dtype.element_ty
    x = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(scale + row, inverse)
    h = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) * (x * inverse)
    if RESIDUAL:
        old = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        ours = (h.to(dtype).to(tl.float32) * branch_factor).to(dtype).to(tl.float32)
        x = (ours + (old * residual_factor).to(dtype).to(tl.float32)).to(dtype)
        tl.store(total + at, x, mask=inside)
        if NEXT:
            x = x.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
            tl.store(next_scale + row, inverse)
            h = tl.load(next_weight + columns, mask=inside, other=0.0).to(tl.float32) * (x * inverse)
            tl.store(normed + at, h.to(dtype), mask=inside)
    else:
        tl.store(normed + at, h.to(dtype), mask=inside)


@triton.jit
def _backward(
    branch, total, weight, next_weight, scale, next_scale, total_grad, normed_grad,
    branch_grad, residual_grad, weight_partial, next_partial,
    rows, width, branch_factor, residual_factor,
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
    for row in range(program, rows, step):
        at = (tl.zeros([1], dtype=tl.int64) + row) * width + columns
        if RESIDUAL:
            grad = tl.load(total_grad + at, mask=inside, other=0.0).to(tl.float32)
            if NEXT:
                inverse = tl.load(next_scale + row)
                x = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * inverse
                g = tl.load(normed_grad + at, mask=inside, other=0.0).to(tl.float32)
                next_sum += g * x
                g *= next_w
                grad += inverse * (g - x * (tl.sum(g * x, 0) / width))
            tl.store(residual_grad + at, (grad * residual_factor).to(residual_grad.dtype.element_ty), mask=inside)
            grad *= branch_factor
        else:
            grad = tl.load(normed_grad + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row)
        x = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32) * inverse
        weight_sum += grad * x
        grad *= w
        grad = inverse * (grad - x * (tl.sum(grad * x, 0) / width))
        tl.store(branch_grad + at, grad.to(branch_grad.dtype.element_ty), mask=inside)
    tl.store(weight_partial + program * width + columns, weight_sum, mask=inside)
    if NEXT:
        tl.store(next_partial + program * width + columns, next_sum, mask=inside)


def _options(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        y = torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            _forward[(rows,)](
                x, x, weight, weight, x, y, scale, scale, width, eps, 1.0, 1.0,
                RESIDUAL=False, NEXT=False, **_options(width),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width, rows = x.shape[-1], len(scale)
        count = programs(x, rows)
        x_grad = torch.empty_like(x)
        partial = torch.zeros(count, width, dtype=torch.float32, device=x.device)
        _backward[(count,)](
            x, x, weight, weight, scale, scale, x, grads[0].contiguous(), x_grad, x_grad, partial, partial,
            rows, width, 1.0, 1.0, RESIDUAL=False, NEXT=False, **_options(width),
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
        scales = torch.empty(2, rows, dtype=torch.float32, device=branch.device)
        if rows:
            _forward[(rows,)](
                branch, residual, weight, weight if next_weight is None else next_weight,
                total, total if normed is None else normed, scales[0], scales[1],
                width, eps, *factors, RESIDUAL=True, NEXT=next_weight is not None, **_options(width),
            )  # fmt: skip
        ctx.save_for_backward(branch, weight, total, next_weight, scales)
        ctx.factors = factors
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        branch, weight, total, next_weight, scales = ctx.saved_tensors
        width, rows = branch.shape[-1], scales.shape[1]
        count = programs(branch, rows)
        branch_grad, residual_grad = torch.empty_like(branch), torch.empty_like(branch)
        partial = torch.zeros(2, count, width, dtype=torch.float32, device=branch.device)
        total_grad = grads[0].contiguous()
        follows = next_weight is not None
        _backward[(count,)](
            branch, total, weight, next_weight if follows else weight, scales[0], scales[1],
            total_grad, grads[1].contiguous() if follows else total_grad, branch_grad, residual_grad,
            partial[0], partial[1], rows, width, *ctx.factors, RESIDUAL=True, NEXT=follows, **_options(width),
        )  # fmt: skip
        next_grad = summed(partial[1], next_weight.dtype) if follows else None
        return branch_grad, summed(partial[0], weight.dtype), residual_grad, next_grad, None, None


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
