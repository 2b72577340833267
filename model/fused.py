"""Functions of `numerics` with their derivatives written out: the same values, less time and memory in training.

Autograd of the plain definitions keeps every float32 intermediate and passes over memory two to three times as often,
which on a CPU is most of a training step.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beam_rl.model import numerics


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = numerics.inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return numerics.rescale(x, weight, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, h = grads[0].float(), x.float() * scale
        product = grad * h
        weight_grad = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (product @ weight.float())[..., None] / h.shape[-1]
        x_grad = torch.addcmul(grad * weight, h, mean, value=-1).mul_(scale)
        return x_grad.to(x.dtype), weight_grad, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gate_up)
        return numerics.swiglu(*gate_up.chunk(2, dim=-1)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad = grads[0].float()
        gate, up = (x.float() for x in gate_up.chunk(2, dim=-1))
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=up_grad)
        gate_grad.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return gate_up_grad, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return numerics.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return numerics.rotate(grads[0], cos, -sin), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`numerics.rms_norm`."""
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate_up: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`numerics.swiglu` of the halves of gate_up [..., 2 * width], rounded to dtype (default: gate_up's)."""
    return _SwiGLU.apply(gate_up, dtype or gate_up.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`numerics.rotate`."""
    return _Rotate.apply(x, cos, sin)


def experts_mlp(x: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """`numerics.experts_mlp`."""
    hidden = swiglu(numerics.expert_linear(x, gate_up, ends), x.dtype)
    return numerics.expert_linear(hidden, down, ends)
