"""Functions of `numerics` as training calls them: the same values with their derivatives written out.

Autograd of the plain definitions keeps every float32 intermediate and passes over memory several times as often, which
is most of a training step. On a GPU the Triton kernels of `kernels` compute them; what is here is for the CPU.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beam_rl.model import mxfp8, numerics, rows
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.model.rows import ExpertOrder

if torch.cuda.is_available() or TYPE_CHECKING:  # elsewhere Triton has nothing to run on, and takes a second to import
    from beam_rl.model.kernels import heads, mlp, norm
    from beam_rl.model.kernels import route as router
    from beam_rl.model.kernels.experts import experts as mixture  # noqa: F401 (only here: there is no plain form)
    from beam_rl.model.kernels.experts import weight_gradient


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


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return numerics.expert_linear(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = F.grouped_mm(grad, weight.to(grad.dtype), offs=ends).to(x.dtype)
        if ctx.needs_input_grad[1]:  # in the weight's own layout: autograd's would be transposed, and slow to add up
            x = x.to(grad.dtype)
            if grad.is_cuda:
                weight_grad = weight_gradient(weight, grad, x, ends)
            else:
                weight_grad = F.grouped_mm(grad.t(), x, offs=ends).to(weight.dtype)
        return x_grad, weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`numerics.rms_norm`."""
    if x.is_cuda:
        return norm.rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


def rms_norm_into(y: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Write `numerics.rms_norm` to y, behind autograd's back."""
    if x.is_cuda:
        norm.rms_norm_into(y, x.contiguous(), weight, eps)
    else:
        y.copy_(numerics.rms_norm(x, weight, eps))


def swiglu(gate_up: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`numerics.swiglu` of the halves of gate_up [..., 2 * width], rounded to dtype (default: gate_up's)."""
    if gate_up.is_cuda:
        return mlp.swiglu(gate_up, dtype)
    return _SwiGLU.apply(gate_up, dtype or gate_up.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`numerics.rotate`."""
    return _Rotate.apply(x, cos, sin)


def residual_addition(branch: Tensor, weight: Tensor, residual: Tensor, eps: float, n: int) -> Tensor:
    """`numerics.depth_residual`, the n-th, of `numerics.rms_norm` of the branch."""
    if branch.is_cuda:
        return norm.residual_addition(branch, weight, residual, eps, numerics.depth_scales(n))
    return numerics.depth_residual(rms_norm(branch, weight, eps), residual, n)


def boundary(
    branch: Tensor, weight: Tensor, residual: Tensor, next_weight: Tensor, eps: float, n: int
) -> tuple[Tensor, Tensor]:
    """`residual_addition`, and the next sublayer's norm of its result."""
    if branch.is_cuda:
        return norm.boundary(branch, weight, residual, next_weight, eps, numerics.depth_scales(n))
    total = residual_addition(branch, weight, residual, eps, n)
    return total, rms_norm(total, next_weight, eps)


def output_gate(attention: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """`numerics.output_gate` of [tokens, heads, dim]."""
    return (heads if attention.is_cuda else numerics).output_gate(attention, gate, bias)


def split_heads(
    mixed: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    groups: int,
    eps: float,
    *,
    rotation: tuple[Tensor, Tensor] | None,
    stretch: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and its gate [tokens, heads, dim], k and v [tokens, groups, dim] of a fused projection, q and k with positions.

    Args:
        mixed: [tokens, 1, …]: for every key-value group its q heads, their gates, its k, its v, dim values each.
        q_weight, k_weight: [dim], of the norms.
        rotation: cosines and sines of a layer with RoPE (`numerics.rotate`).
        stretch: float32 [tokens], SSMax's factors of q, of a layer without.
    """
    if mixed.is_cuda:
        return heads.split_heads(mixed, q_weight, k_weight, groups, eps, rotation=rotation, stretch=stretch)
    dim = len(q_weight)
    parts = mixed.view(len(mixed), groups, -1, dim)
    inner = parts.shape[2] // 2 - 1
    q, gate, k, v = (x.flatten(1, 2) for x in parts.split([inner, inner, 1, 1], dim=2))
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    if rotation is not None:
        return rotate(q, *rotation), gate, rotate(k, *rotation), v
    assert stretch is not None
    return numerics.stretch(q, stretch), gate, k, v


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    topk: int,
    n_group: int,
    topk_group: int,
    normalise: bool = True,
    replay: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`numerics.route` of `numerics.router_logits`, and `numerics.route_weights` of replayed experts.

    Args:
        x: [tokens, hidden].
        weight: float32 [experts, hidden]; bias: float32 [experts].
        topk, n_group, topk_group, normalise: see `numerics.route`.
        replay: ids, of any integer type, [tokens, topk], to use instead of the router's choice; and bool [tokens],
            where they hold (elsewhere the router chooses; None: everywhere).

    Returns:
        x, for the experts: used in its place, it brings their gradient here, to be added before it is rounded;
        weights float32 and ids int64 [tokens, topk]; and counts for `sort_by_expert`, [parts, experts]: how often each
        part of the tokens chose each expert.
    """
    if x.is_cuda:
        return router.route(x, weight, bias, topk, n_group, topk_group, normalise, replay)
    logits = numerics.router_logits(x, weight)
    given, captured = (None, None) if replay is None else replay
    if given is not None and captured is None:
        ids = given.long()
    else:
        chooser = logits if given is None else logits.detach()
        weights, ids = numerics.route(chooser, bias, topk, n_group, topk_group, normalise)
        if given is not None and captured is not None:
            ids = torch.where(captured[:, None], given.long(), ids)
    if given is not None:
        weights = numerics.route_weights(logits, ids, normalise)
    return x, weights, ids, torch.bincount(ids.flatten(), minlength=len(weight))[None]


def sort_by_expert(ids: Tensor, counts: Tensor) -> ExpertOrder:
    """`rows.sort_by_expert` of the ids and counts that `route` returned."""
    return router.sort(ids, counts) if ids.is_cuda else rows.sort_by_expert(ids, counts)


def spread_rows(x: Tensor, index: Tensor, places: Tensor, copies: int = 1) -> Tensor:
    """`rows.spread_rows`."""
    return (mlp if x.is_cuda else rows).spread_rows(x, index, places, copies)


def combine(
    outputs: Tensor, places: Tensor, order: Tensor, weights: Tensor, scaling: float, dtype: torch.dtype
) -> Tensor:
    """`numerics.combine_experts`, [tokens, hidden], of expert outputs [rows, hidden] that lie sorted by expert.

    Args:
        places: int64 [tokens * topk]: where the outputs of each token's experts are.
        order: its inverse.
        weights: float32 [tokens, topk].
    """
    if outputs.is_cuda:
        return mlp.combine(outputs, places, weights, scaling, dtype)
    gathered = rows.spread_rows(outputs, places, order).view(*weights.shape, -1)
    return numerics.combine_experts(gathered, weights, scaling, dtype)


def experts_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ends: Tensor,
    settings: tuple[Mxfp8Settings | None, Mxfp8Settings | None] = (None, None),
) -> Tensor:
    """`numerics.experts_mlp`, whose two products are in MXFP8 where they have settings."""
    hidden = swiglu(_expert_linear(x, gate_up, ends, settings[0]), x.dtype)
    return _expert_linear(hidden, down, ends, settings[1])


def _expert_linear(x: Tensor, weight: Tensor, ends: Tensor, settings: Mxfp8Settings | None) -> Tensor:
    if settings is None:
        return _ExpertLinear.apply(x, weight, ends)
    return mxfp8.grouped_linear(x, weight, ends, settings)
