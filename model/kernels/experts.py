"""A whole mixture of experts on one GPU, from tokens to tokens, that keeps one tensor of rows for the backward pass.

Autograd of the steps keeps four: the copies of the tokens, gate and up projections, SwiGLU's output and the experts'
outputs. Here only the projections are kept. The copies and SwiGLU are cheap to compute again, and the outputs are not
needed: a row's weight multiplies the row of the down projection's input as well as that of its output.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from beam_rl.model.kernels import gradients, mlp
from beam_rl.model.rows import ExpertOrder


@triton.jit
def _backward(
    gate_up, down_grad, choices, weights, gate_up_grad, hidden, weights_grad, width, scaling, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(choices + row)
    weight = tl.load(weights + at) * scaling
    dtype = hidden.dtype.element_ty
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        first, second = row * 2 * width + columns, row * 2 * width + width + columns
        gate = tl.load(gate_up + first, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + second, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(down_grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        h = (gate * sigmoid * up).to(dtype).to(tl.float32)
        product += g * h
        tl.store(hidden + row * width + columns, (h * weight).to(dtype), mask=inside)
        g *= weight
        tl.store(gate_up_grad + first, (g * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype), mask=inside)
        tl.store(gate_up_grad + second, (g * gate * sigmoid).to(dtype), mask=inside)
    tl.store(weights_grad + at, tl.sum(product, 0) * scaling)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, order: ExpertOrder, scaling: float
    ) -> Tensor:
        x, weights = x.contiguous(), weights.contiguous()
        projected = F.grouped_mm(mlp.take_rows(x, order.tokens), gate_up.transpose(1, 2), offs=order.ends)
        ctx.save_for_backward(x, gate_up, down, weights, projected, *order)
        ctx.scaling = scaling
        outputs = F.grouped_mm(mlp.activate(projected, x.dtype), down.transpose(1, 2), offs=order.ends)
        return mlp.weighted_sum(outputs, order.places, weights, scaling, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, weights, projected, choices, tokens, places, ends = ctx.saved_tensors
        needs_gate_up, needs_down = ctx.needs_input_grad[1:3]
        width = down.shape[2]
        out_grad = mlp.take_rows(grads[0].contiguous(), tokens)
        down_grad = F.grouped_mm(out_grad, down, offs=ends)  # of SwiGLU's output, but for the row's weight
        projected_grad, hidden, weights_grad = (
            torch.empty_like(projected), torch.empty_like(down_grad), torch.empty_like(weights)
        )  # fmt: skip
        if len(choices):
            _backward[(len(choices),)](
                projected, down_grad, choices, weights, projected_grad, hidden, weights_grad, width, ctx.scaling,
                BLOCK=min(1024, triton.next_power_of_2(width)),
            )  # fmt: skip
        del down_grad
        down_weight_grad = weight_gradient(down, out_grad, hidden, ends) if needs_down else None
        del out_grad, hidden
        gate_up_weight_grad = None
        if needs_gate_up:
            gate_up_weight_grad = weight_gradient(gate_up, projected_grad, mlp.take_rows(x, tokens), ends)
        x_grad = mlp.sum_copies(F.grouped_mm(projected_grad, gate_up, offs=ends), places, weights.shape[1])
        return x_grad, gate_up_weight_grad, down_weight_grad, weights_grad, None, None


def weight_gradient(weight: Tensor, out_grad: Tensor, x: Tensor, ends: Tensor) -> Tensor | None:
    """Gradient of weight [experts, out, in] from out_grad [rows, out] and x [rows, in], sorted by expert.

    Where there is a float32 sum to add it to (`claim_main_grad`) it is computed in place there, unrounded, and this is
    None: a tensor of its own, and the passes over it, would take as long as half of the product.
    """
    if hasattr(weight, "claim_main_grad") and x.dtype != torch.float32:
        total, first = weight.claim_main_grad()
        gradients.add_products_(total, out_grad, x, ends, first=first)
        return None
    return F.grouped_mm(out_grad.t(), x, offs=ends)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, order: ExpertOrder, scaling: float) -> Tensor:
    """`numerics.combine_experts` of `numerics.experts_mlp` of each token's copies, in x's dtype.

    Args:
        x: [tokens, hidden].
        gate_up: [experts, 2 * intermediate, hidden]; down: [experts, hidden, intermediate].
        weights: float32 [tokens, topk].
        order: of the tokens' copies.
        scaling: of the weighted sum.
    """
    return _Experts.apply(x, gate_up, down, weights, order, scaling)
