"""Log-probabilities of tokens straight from hidden states: the output layer, softcap and softmax, part by part.

All logits of a batch are the largest tensor of training by far, and float32 copies of them several times that. Here
only the logits of some rows exist at a time; the backward pass computes them anew. The vocabulary may be split over
tensor-parallel ranks.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from beam_rl.model import numerics

if torch.cuda.is_available() or TYPE_CHECKING:
    from beam_rl.model.kernels import head as kernels

LOGITS = 2**28
"""Logits that exist at a time, on a rank."""


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None, group: Any
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * len(weight)
        found = []
        for part, wanted in _parts(hidden, targets, weight):
            logits = F.linear(part, weight)
            found.append(
                torch.cat((_statistics(logits, cap, temperature), _at(logits, wanted, first, cap)[:, None]), 1)
            )
        top, mass, moment, chosen = torch.cat(found).unbind(1) if found else hidden.new_zeros(4, 0).float().unbind(0)
        chosen = chosen / temperature
        if group.size() > 1:
            most = top.clone()
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            shrink = (top - most).exp()
            sums = torch.stack((mass * shrink, moment * shrink, chosen))
            dist.all_reduce(sums, group=group)
            top, (mass, moment, chosen) = most, sums.unbind(0)
        normaliser = top + mass.log()
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.temperature, ctx.cap, ctx.first = temperature, cap, first
        entropy = normaliser - moment / mass
        ctx.mark_non_differentiable(entropy)
        return chosen - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = None
        claims = hasattr(weight, "claim_main_grad")
        if ctx.needs_input_grad[1]:
            if not claims:
                weight_grad = torch.zeros_like(weight, dtype=torch.float32)
            elif len(hidden):  # summed up where it is wanted, in float32, and given to nobody
                weight_grad, first = weight.claim_main_grad()
                if first:
                    weight_grad.zero_()
        start = 0
        for part, wanted in _parts(hidden, targets, weight):
            here = slice(start, start + len(part))
            start += len(part)
            logits = F.linear(part, weight)
            grad = _gradient(logits, wanted, normaliser[here], grads[0][here], ctx.first, ctx.cap, ctx.temperature)
            if hidden_grad is not None:
                hidden_grad[here] = grad @ weight
            if weight_grad is not None:
                _add_product(weight_grad, grad.t(), part)
        returned = None if claims or weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, returned, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, for total in float32; on a GPU the matrix product itself adds, and rounds nothing before."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _parts(hidden: Tensor, targets: Tensor, weight: Tensor) -> Any:
    rows = max(1, LOGITS // len(weight))
    return zip(hidden.split(rows), targets.split(rows), strict=True) if len(hidden) else ()


def _at(logits: Tensor, targets: Tensor, first: int, cap: float | None) -> Tensor:
    """Softcapped logits of the targets, float32 [rows]; 0 where another rank has them."""
    local = targets - first
    mine = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return numerics.softcap(picked, cap).masked_fill(~mine, 0.0)


def _statistics(logits: Tensor, cap: float | None, temperature: float) -> Tensor:
    """See `kernels.head.statistics`."""
    if logits.is_cuda:
        return kernels.statistics(logits, cap, temperature)
    z = numerics.softcap(logits, cap) / temperature
    top = z.amax(-1, keepdim=True)
    weights = (z - top).exp()
    return torch.cat((top, weights.sum(-1, keepdim=True), (weights * z).sum(-1, keepdim=True)), 1)


def _gradient(
    logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, first: int, cap: float | None, temperature: float
) -> Tensor:
    """See `kernels.head.gradient_`."""
    if logits.is_cuda:
        return kernels.gradient_(logits, targets, normaliser, grad.contiguous(), first, cap, temperature)
    capped = numerics.softcap(logits, cap)
    z_grad = (capped / temperature - normaliser[:, None]).exp_().mul_(-grad[:, None])
    local = targets - first
    mine = ((local >= 0) & (local < logits.shape[1])).nonzero()[:, 0]
    z_grad[mine, local[mine]] += grad[mine]
    if cap is not None:
        z_grad *= 1 - (capped / cap).square()
    return (z_grad / temperature).to(logits.dtype)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets, with gradient, and entropies (nats), without: float32 [rows] each.

    Of softmax(softcap(hidden @ weight.T) / temperature).

    Args:
        hidden: [rows, hidden], the same on every rank of `group`; its gradient is this rank's share of a sum.
        weight: [vocabulary / ranks, hidden], this rank's part of the output layer.
        targets: int64 [rows].
        cap: of the softcap; None: there is none.
    """
    return _Logprobs.apply(hidden, weight, targets, temperature, cap, group)
