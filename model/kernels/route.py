"""The router's choice of experts with its weights and their gradient, and the choices sorted by expert.

Tokens are taken in parts, one a program. The kernel that chooses also counts how often its part chose each expert, so
that sorting needs no pass of its own to count: a choice's place is where its expert's rows start, plus how often
earlier parts and earlier tokens of its own part chose that expert.

The weight's gradient is float32 times bfloat16. Three bfloat16 pieces that sum to the float32 factor make it a product
for tensor cores which is as exact, and spares a float32 copy of the router's input.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from beam_rl.model import numerics
from beam_rl.model.rows import ExpertOrder

LOWEST = tl.constexpr(-(2**63))
"""Below the key of every value."""


@triton.jit
def _key(value, index):
    """int64 that orders by value, the lower index first among equals; NaN stands above all, as in `torch.topk`."""
    bits = tl.where(value != value, float("inf"), value).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index)


@triton.jit
def _value(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _forward(
    logits, bias, given, captured, weights, ids, counts, tokens, given_stride,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr, OWN: tl.constexpr, GIVEN: tl.constexpr,
    PART: tl.constexpr, G: tl.constexpr, S: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    token = part * PART + tl.arange(0, PART)
    real = token < tokens
    slot = tl.arange(0, K)
    used = real[:, None] & (slot < TOPK)[None, :]
    chosen = tl.zeros([PART, K], dtype=tl.int64)
    if OWN:
        group, member = tl.arange(0, G)[None, :], tl.arange(0, S)[None, None, :]
        expert = group[:, :, None] * (EXPERTS // GROUPS) + member
        exists = (group < GROUPS)[:, :, None] & (member < EXPERTS // GROUPS)
        at = (token * EXPERTS)[:, None, None] + expert
        x = tl.load(logits + at, mask=real[:, None, None] & exists, other=0.0)
        key = _key(tl.sigmoid(x) + tl.load(bias + expert, mask=exists, other=0.0), expert)
        key = tl.where(exists, key, LOWEST)  # [PART, G, S]
        if BEST_GROUPS < GROUPS:
            first = tl.max(key, 2)
            second = tl.max(tl.where(key == first[:, :, None], LOWEST, key), 2)
            left = tl.where(group < GROUPS, _key(_value(first) + _value(second), group), LOWEST)  # [PART, G]
            for _ in range(BEST_GROUPS):
                left = tl.where(left == tl.max(left, 1)[:, None], LOWEST, left)
            key = tl.where((left == LOWEST)[:, :, None], key, LOWEST)
        key = tl.reshape(key, [PART, G * S])
        for k in range(TOPK):
            best = tl.max(key, 1)[:, None]
            key = tl.where(key == best, LOWEST, key)
            chosen = tl.where((slot == k)[None, :], 0x7FFFFFFF - (best & 0x7FFFFFFF), chosen)
    if GIVEN:
        theirs = tl.load(given + (token * given_stride)[:, None] + slot[None, :], mask=used, other=0).to(tl.int64)
        if OWN:
            held = tl.load(captured + token, mask=real, other=0) != 0
            chosen = tl.where(held[:, None], theirs, chosen)
        else:
            chosen = theirs
    known = used & (chosen >= 0) & (chosen < EXPERTS)
    score = tl.sigmoid(tl.load(logits + (token * EXPERTS)[:, None] + chosen, mask=known, other=float("nan")))
    if NORMALISE:
        score /= tl.sum(tl.where(used, score, 0.0), 1)[:, None] + 1e-20
    chosen = tl.where(known, chosen, 0)
    to = (token * TOPK)[:, None] + slot[None, :]
    tl.store(weights + to, score, mask=used)
    tl.store(ids + to, chosen, mask=used)
    every = tl.arange(0, E)
    hits = tl.zeros([PART, E], dtype=tl.int32)
    for k in range(TOPK):
        one = tl.sum(tl.where((slot == k)[None, :], chosen, 0), 1)
        hits += ((one[:, None] == every[None, :]) & real[:, None]).to(tl.int32)
    tl.store(counts + part * EXPERTS + every, tl.sum(hits, 0), mask=every < EXPERTS)


@triton.jit
def _backward(
    logits, ids, grad, logits_grad, pieces, tokens,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, NORMALISE: tl.constexpr, PIECES: tl.constexpr,
    PART: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    real = token < tokens
    slot = tl.arange(0, K)
    used = real[:, None] & (slot < TOPK)[None, :]
    at = (token * TOPK)[:, None] + slot[None, :]
    chosen = tl.load(ids + at, mask=used, other=0)
    g = tl.load(grad + at, mask=used, other=0.0)
    score = tl.sigmoid(tl.load(logits + (token * EXPERTS)[:, None] + chosen, mask=used, other=0.0))
    if NORMALISE:
        total = tl.sum(tl.where(used, score, 0.0), 1) + 1e-20
        g = (g - (tl.sum(g * score, 1) / total)[:, None]) / total[:, None]
    g = g * score * (1 - score)
    every = tl.arange(0, E)[None, :]
    out = tl.zeros([PART, E], dtype=tl.float32)
    for k in range(TOPK):
        this = (slot == k)[None, :]
        one = tl.sum(tl.where(this, chosen, 0), 1)[:, None]
        out += tl.where(one == every, tl.sum(tl.where(this, g, 0.0), 1)[:, None], 0.0)
    mask = real[:, None] & (every < EXPERTS)
    tl.store(logits_grad + (token * EXPERTS)[:, None] + every, out, mask=mask)
    if PIECES:
        for i in range(3):
            piece = out.to(pieces.dtype.element_ty)
            tl.store(pieces + (token * 3 * EXPERTS)[:, None] + i * EXPERTS + every, piece, mask=mask)
            out -= piece.to(tl.float32)


@triton.jit
def _x_backward(
    grad, weight, other, x_grad, tokens, width,
    EXPERTS: tl.constexpr, OTHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, inside = (row < tokens)[:, None], (column < width)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, EXPERTS, INNER):
        expert = start + tl.arange(0, INNER)
        exists = expert < EXPERTS
        g = tl.load(grad + (row * EXPERTS)[:, None] + expert[None, :], mask=real & exists[None, :], other=0.0)
        w = tl.load(weight + (expert * width)[:, None] + column[None, :], mask=exists[:, None] & inside, other=0.0)
        total = tl.dot(g, w, total, input_precision="tf32x3")
    at = (row * width)[:, None] + column[None, :]
    if OTHER:
        total += tl.load(other + at, mask=real & inside, other=0.0).to(tl.float32)
    tl.store(x_grad + at, total.to(x_grad.dtype.element_ty), mask=real & inside)


@triton.jit
def _sort(
    ids, counts, choices, sources, places, ends, tokens, parts,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, PART: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    every = tl.arange(0, E)
    exists = every < EXPERTS
    total = tl.zeros([E], dtype=tl.int32)
    before = tl.zeros([E], dtype=tl.int32)
    for start in range(0, parts, PART):
        other = start + tl.arange(0, PART)
        at = other[:, None] * EXPERTS + every[None, :]
        count = tl.load(counts + at, mask=(other < parts)[:, None] & exists[None, :], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((other < part)[:, None], count, 0), 0)
    end = tl.cumsum(total, 0)
    if part == 0:
        tl.store(ends + every, end, mask=exists)
    token = part.to(tl.int64) * PART + tl.arange(0, PART)
    real = token < tokens
    hits = tl.zeros([PART, E], dtype=tl.int32)
    for k in range(TOPK):
        one = tl.load(ids + token * TOPK + k, mask=real, other=-1)
        hits += (one[:, None] == every[None, :]).to(tl.int32)
    place = (end - total + before)[None, :] + tl.cumsum(hits, 0) - hits  # [PART, E], of the token's next choice
    for k in range(TOPK):
        choice = token * TOPK + k
        hit = tl.load(ids + choice, mask=real, other=-1)[:, None] == every[None, :]
        row = tl.sum(tl.where(hit, place, 0), 1).to(tl.int64)
        place += hit.to(tl.int32)
        tl.store(choices + row, choice, mask=real)
        tl.store(sources + row, token, mask=real)
        tl.store(places + choice, row, mask=real)


def _tile(experts: int) -> dict[str, int]:
    """Tokens of a part, and experts with the padding to a power of two."""
    padded = triton.next_power_of_2(experts)
    return {"PART": max(8, min(64, 8192 // padded)), "E": padded, "num_warps": 8}


def _parts(tokens: int, tile: dict[str, int]) -> int:
    return max(1, triton.cdiv(tokens, tile["PART"]))  # one even for no tokens: it writes that there are none


def _of_x(grad: Tensor, weight: Tensor, x: Tensor, other: Tensor | None) -> Tensor:
    """grad @ weight + other in float32, rounded once, to x's dtype."""
    (tokens, experts), width = grad.shape, x.shape[1]
    x_grad = x.new_empty(x.shape)
    if tokens:
        other = None if other is None else other.contiguous()
        _x_backward[(triton.cdiv(tokens, 64), triton.cdiv(width, 64))](
            grad, weight, grad if other is None else other, x_grad, tokens, width,
            EXPERTS=experts, OTHER=other is not None, ROWS=64, COLUMNS=64,
            INNER=max(16, min(64, triton.next_power_of_2(experts))),
        )  # fmt: skip
    return x_grad


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 of bfloat16 tensors."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        given: Tensor | None,
        captured: Tensor | None,
        topk: int,
        n_group: int,
        topk_group: int,
        normalise: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = numerics.router_logits(x, weight)
        tokens, experts = logits.shape
        tile = _tile(experts)
        parts = _parts(tokens, tile)
        weights = logits.new_empty(tokens, topk)
        ids = torch.empty(tokens, topk, dtype=torch.int64, device=x.device)
        counts = torch.empty(parts, experts, dtype=torch.int32, device=x.device)
        if given is not None and given.stride(1) != 1:
            given = given.contiguous()
        _forward[(parts,)](
            logits, bias, ids if given is None else given, ids if captured is None else captured,
            weights, ids, counts, tokens, topk if given is None else given.stride(0),
            EXPERTS=experts, TOPK=topk, GROUPS=n_group, BEST_GROUPS=topk_group,
            NORMALISE=normalise, OWN=given is None or captured is not None, GIVEN=given is not None,
            G=triton.next_power_of_2(n_group), S=triton.next_power_of_2(experts // n_group),
            K=triton.next_power_of_2(topk), **tile,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, logits, ids)  # not the float32 copy of x that autograd would keep
        ctx.normalise = normalise
        ctx.mark_non_differentiable(ids, counts)
        ctx.set_materialize_grads(False)
        return x, weights, ids, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, logits, ids = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        (tokens, experts), topk = logits.shape, ids.shape[1]
        tile = _tile(experts)
        grad = torch.empty_like(logits)
        weights_grad = logits.new_zeros(ids.shape) if grads[1] is None else grads[1]
        in_pieces = needs_weight and x.dtype == torch.bfloat16
        pieces = x.new_empty(tokens, 3 * experts) if in_pieces else grad
        _backward[(_parts(tokens, tile),)](
            logits, ids, weights_grad.contiguous(), grad, pieces, tokens,
            EXPERTS=experts, TOPK=topk, NORMALISE=ctx.normalise, PIECES=in_pieces,
            K=triton.next_power_of_2(topk), **tile,
        )  # fmt: skip
        x_grad = _of_x(grad, weight, x, grads[0]) if needs_x else None
        weight_grad = None
        if in_pieces:
            weight_grad = _product(pieces.t(), x).view(3, *weight.shape).sum(0)
        elif needs_weight:
            weight_grad = grad.t() @ x.float()
        return x_grad, weight_grad, None, None, None, None, None, None, None


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    topk: int,
    n_group: int,
    topk_group: int,
    normalise: bool,
    replay: tuple[Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fused.route`: `numerics.route` of `numerics.router_logits`, or `numerics.route_weights` of given ids.

    A token's experts stand in descending order of score plus bias, as `torch.topk` has them; of equals, which it
    leaves open, the lower id is first. NaN counts as the greatest. Given ids that no expert has become 0, and make the
    token's weights NaN.

    Returns:
        x; weights float32 and ids int64 [tokens, topk]; and counts int32 [parts, experts] for `sort`.
    """
    given, captured = (None, None) if replay is None else replay
    return _Route.apply(x, weight, bias, given, captured, topk, n_group, topk_group, normalise)


def sort(ids: Tensor, counts: Tensor) -> ExpertOrder:
    """`rows.sort_by_expert` of the ids and counts that `route` returned."""
    tokens, topk = ids.shape
    parts, experts = counts.shape
    choices, sources, places = torch.empty(3, ids.numel(), dtype=torch.int64, device=ids.device)
    ends = torch.empty(experts, dtype=torch.int32, device=ids.device)
    _sort[(parts,)](
        ids, counts, choices, sources, places, ends, tokens, parts, EXPERTS=experts, TOPK=topk, **_tile(experts)
    )
    return ExpertOrder(choices, sources, places, ends)
