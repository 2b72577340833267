"""Softmax statistics of logits and their gradient, in one pass over memory each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _capped(logit, cap, CAP: tl.constexpr):
    """cap * tanh(logit / cap), and its slope."""
    if CAP:
        small = tl.exp(-2 * tl.abs(logit) / cap)
        squashed = (1 - small) / (1 + small)
        return tl.where(logit < 0, -cap * squashed, cap * squashed), 1 - squashed * squashed
    return logit, logit * 0 + 1


@triton.jit
def _statistics(logits, out, vocabulary, cap, inverse_temperature, CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    mass = 0.0
    moment = 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(logits + row * vocabulary + columns, mask=inside, other=0.0).to(tl.float32)
        z, _ = _capped(x, cap, CAP)
        z = tl.where(inside, z * inverse_temperature, float("-inf"))
        best = tl.maximum(top, tl.max(z, 0))
        weights = tl.exp(z - best)
        shrink = tl.exp(top - best)
        mass = mass * shrink + tl.sum(weights, 0)
        moment = moment * shrink + tl.sum(tl.where(inside, weights * z, 0.0), 0)
        top = best
    tl.store(out + row * 3, top)
    tl.store(out + row * 3 + 1, mass)
    tl.store(out + row * 3 + 2, moment)


@triton.jit
def _gradient(
    logits, targets, normaliser, grad, vocabulary, first, cap, inverse_temperature,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(grad + row)
    total = tl.load(normaliser + row)
    target = tl.load(targets + row) - first
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    at = logits + row * vocabulary + columns
    z, slope = _capped(tl.load(at, mask=inside, other=0.0).to(tl.float32), cap, CAP)
    d = tl.where(columns == target, g, 0.0) - g * tl.exp(z * inverse_temperature - total)
    tl.store(at, (d * slope * inverse_temperature).to(logits.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, cap: float | None, temperature: float) -> Tensor:
    """Of z = softcap(logits) / temperature: largest z, sum of exp(z - largest), sum of z exp(z - largest).

    float32 [rows, 3] of logits [rows, vocabulary], contiguous.
    """
    out = torch.empty(len(logits), 3, dtype=torch.float32, device=logits.device)
    _statistics[(len(logits),)](
        logits, out, logits.shape[1], cap or 1.0, 1 / temperature, CAP=cap is not None, BLOCK=BLOCK, num_warps=8
    )
    return out


def gradient_(
    logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, first: int, cap: float | None, temperature: float
) -> Tensor:
    """Turn logits [rows, vocabulary] into the gradient of grad . (z of the target - normaliser), in place.

    Args:
        targets: int64 [rows], in the whole vocabulary; `first` is the id of the first logit here.
        normaliser: float32 [rows], log of the sum of exp(z) over the whole vocabulary.
        grad: float32 [rows].
    """
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    _gradient[grid](
        logits, targets, normaliser, grad, logits.shape[1], first, cap or 1.0, 1 / temperature,
        CAP=cap is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return logits
