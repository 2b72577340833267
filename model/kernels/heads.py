"""From the fused projection to attention and back: norms of q and k with their positions, and the output gate.

The projection's row holds, for every key-value group, its q heads, their gates, its k and its v, `dim` values each. One
kernel reads it once and writes what attention takes; its backward pass writes the projection's gradient in place of
the splits, transposes and concatenations that autograd would need.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from beam_rl.model.kernels.launch import programs, summed


@triton.jit
def _rotated(first, second, cos, sin):
    """Two halves of vectors, turned; by the negative sine, turned back."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _angles(cos, sin, token, column, real, DIM: tl.constexpr):
    at = token[:, None] * (DIM // 2) + column[None, :]
    return tl.load(cos + at, mask=real, other=0.0), tl.load(sin + at, mask=real, other=0.0)


@triton.jit
def _weights(weight, column, DIM: tl.constexpr):
    half: tl.constexpr = DIM // 2
    first = tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
    second = tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit
def _copy(source, target, real, DIM: tl.constexpr):
    half: tl.constexpr = DIM // 2
    first, second = tl.load(source, mask=real), tl.load(source + half, mask=real)
    tl.store(target, first, mask=real)
    tl.store(target + half, second, mask=real)


@triton.jit
def _head_forward(source, target, w1, w2, c, s, scale, real, eps, ROPE: tl.constexpr, DIM: tl.constexpr):
    """Norm and position one head of some tokens; the halves of a vector are blocks [TOKENS, BLOCK] of their own."""
    half: tl.constexpr = DIM // 2
    dtype = target.dtype.element_ty
    first = tl.load(source, mask=real, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=real, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(first * first + second * second, 1) / DIM + eps)[:, None]
    first = (w1 * (first * inverse)).to(dtype).to(tl.float32)
    second = (w2 * (second * inverse)).to(dtype).to(tl.float32)
    if ROPE:
        first, second = _rotated(first, second, c, s)
    else:
        first, second = first * scale, second * scale
    tl.store(target, first.to(dtype), mask=real)
    tl.store(target + half, second.to(dtype), mask=real)


@triton.jit
def _head_backward(source, grad, target, w1, w2, c, s, scale, real, eps, ROPE: tl.constexpr, DIM: tl.constexpr):
    """Write one head's gradient; returns the halves of its tokens' shares in the weight's."""
    half: tl.constexpr = DIM // 2
    x1 = tl.load(source, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(source + half, mask=real, other=0.0).to(tl.float32)
    g1 = tl.load(grad, mask=real, other=0.0).to(tl.float32)
    g2 = tl.load(grad + half, mask=real, other=0.0).to(tl.float32)
    if ROPE:
        g1, g2 = _rotated(g1, g2, c, -s)
    else:
        g1, g2 = g1 * scale, g2 * scale
    inverse = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / DIM + eps)[:, None]
    x1, x2 = x1 * inverse, x2 * inverse
    w1, w2 = w1 * g1, w2 * g2
    mean = (tl.sum(w1 * x1 + w2 * x2, 1) / DIM)[:, None]
    dtype = target.dtype.element_ty
    tl.store(target, (inverse * (w1 - x1 * mean)).to(dtype), mask=real)
    tl.store(target + half, (inverse * (w2 - x2 * mean)).to(dtype), mask=real)
    return g1 * x1, g2 * x2


@triton.jit
def _keep(kept, first, second, column, DIM: tl.constexpr):
    """Sum the halves of some tokens' shares in a weight's gradient."""
    tl.store(kept, tl.sum(first, 0), mask=column < DIM // 2)
    tl.store(kept + DIM // 2, tl.sum(second, 0), mask=column < DIM // 2)


@triton.jit
def _places(
    tokens, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's tokens, columns of half a vector and which of both are real; where its group's values lie in the
    projection, in q or its gate, and in k or v: [TOKENS, BLOCK] each."""
    program = tl.program_id(0).to(tl.int64)
    block, group = program // GROUPS, program % GROUPS
    token = block * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    real = (token < tokens)[:, None] & (column < DIM // 2)[None, :]
    row = (token * GROUPS + group)[:, None] * ((2 * HEADS + 2) * DIM) + column[None, :]
    to_heads = (token * GROUPS + group)[:, None] * (HEADS * DIM) + column[None, :]
    to_group = (token * GROUPS + group)[:, None] * DIM + column[None, :]
    return token, column, real, row, to_heads, to_group


@triton.jit
def _split_forward(
    mixed, q_weight, k_weight, cos, sin, stretch, q, gate, k, v, tokens, eps,
    ROPE: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, column, real, row, to_heads, to_group = _places(tokens, GROUPS, HEADS, DIM, TOKENS, BLOCK)
    w1, w2 = _weights(q_weight, column, DIM)
    c, s, scale = 1.0, 0.0, 1.0
    if ROPE:
        c, s = _angles(cos, sin, token, column, real, DIM)
    else:
        scale = tl.load(stretch + token, mask=token < tokens, other=0.0)[:, None]
    for head in range(HEADS):
        _head_forward(
            mixed + row + head * DIM, q + to_heads + head * DIM, w1, w2, c, s, scale, real, eps, ROPE, DIM
        )  # fmt: skip
        _copy(mixed + row + (HEADS + head) * DIM, gate + to_heads + head * DIM, real, DIM)
    w1, w2 = _weights(k_weight, column, DIM)
    _head_forward(mixed + row + 2 * HEADS * DIM, k + to_group, w1, w2, c, s, 1.0, real, eps, ROPE, DIM)
    _copy(mixed + row + (2 * HEADS + 1) * DIM, v + to_group, real, DIM)


@triton.jit
def _split_backward(
    mixed, q_weight, k_weight, cos, sin, stretch, q_grad, gate_grad, k_grad, v_grad,
    mixed_grad, partial, tokens, eps,
    ROPE: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, column, real, row, to_heads, to_group = _places(tokens, GROUPS, HEADS, DIM, TOKENS, BLOCK)
    kept = partial + tl.program_id(0).to(tl.int64) * (2 * DIM) + column
    c, s, scale = 1.0, 0.0, 1.0
    if ROPE:
        c, s = _angles(cos, sin, token, column, real, DIM)
    else:
        scale = tl.load(stretch + token, mask=token < tokens, other=0.0)[:, None]
    w1, w2 = _weights(q_weight, column, DIM)
    first_sum = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    second_sum = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for head in range(HEADS):
        at = row + head * DIM
        first, second = _head_backward(
            mixed + at, q_grad + to_heads + head * DIM, mixed_grad + at, w1, w2, c, s, scale, real, eps, ROPE, DIM
        )  # fmt: skip
        first_sum += first
        second_sum += second
        _copy(gate_grad + to_heads + head * DIM, mixed_grad + at + HEADS * DIM, real, DIM)
    _keep(kept, first_sum, second_sum, column, DIM)
    w1, w2 = _weights(k_weight, column, DIM)
    at = row + 2 * HEADS * DIM
    first, second = _head_backward(
        mixed + at, k_grad + to_group, mixed_grad + at, w1, w2, c, s, 1.0, real, eps, ROPE, DIM
    )  # fmt: skip
    _keep(kept + DIM, first, second, column, DIM)
    _copy(v_grad + to_group, mixed_grad + at + DIM, real, DIM)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, stretch: Tensor | None,
        groups: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        mixed = mixed.contiguous()
        tokens, dim = mixed.shape[0], q_weight.shape[0]
        heads_in_group = (mixed.shape[-1] // (groups * dim) - 2) // 2
        q, gate = (mixed.new_empty(tokens, groups * heads_in_group, dim) for _ in range(2))
        k, v = (mixed.new_empty(tokens, groups, dim) for _ in range(2))
        block = triton.next_power_of_2(dim // 2)
        ctx.eps = eps
        ctx.constants = {
            "ROPE": stretch is None, "GROUPS": groups, "HEADS": heads_in_group, "DIM": dim,
            "TOKENS": max(1, 1024 // block), "BLOCK": block,
        }  # fmt: skip
        positions = (cos, sin, cos if stretch is None else stretch)
        if tokens:
            _split_forward[(groups * triton.cdiv(tokens, ctx.constants["TOKENS"]),)](
                mixed, q_weight, k_weight, *positions, q, gate, k, v, tokens, eps, **ctx.constants
            )  # fmt: skip
        ctx.save_for_backward(mixed, q_weight, k_weight, *positions)
        return q, gate, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None, None]:
        mixed, q_weight, k_weight, *positions = ctx.saved_tensors
        tokens, dim, groups = len(mixed), q_weight.shape[0], ctx.constants["GROUPS"]
        mixed_grad = torch.empty_like(mixed)
        count = groups * triton.cdiv(tokens, ctx.constants["TOKENS"])
        partial = torch.empty(count, 2, dim, dtype=torch.float32, device=mixed.device)
        if tokens:
            _split_backward[(count,)](
                mixed, q_weight, k_weight, *positions, *(grad.contiguous() for grad in grads),
                mixed_grad, partial, tokens, ctx.eps, **ctx.constants,
            )  # fmt: skip
        q_weight_grad, k_weight_grad = summed(partial, q_weight.dtype)
        return mixed_grad, q_weight_grad, k_weight_grad, None, None, None, None, None


def split_heads(
    mixed: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    groups: int,
    eps: float,
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    stretch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normed and positioned q [tokens, heads, dim], its gate, normed and positioned k [tokens, groups, dim], v.

    Args:
        mixed: [tokens, …] with groups * (2 * heads / groups + 2) * dim values a token.
        q_weight, k_weight: [dim], of the norms.
        rotation: cosines and sines, float32 [tokens, 1, dim / 2] each (`numerics.rotate`), of a layer with RoPE.
        stretch: float32 [tokens], SSMax's factors of q (`numerics.ssmax_scale`), of a layer without.
    """
    cos, sin = rotation if rotation is not None else (q_weight, q_weight)
    return _Split.apply(mixed, q_weight, k_weight, cos.contiguous(), sin.contiguous(), stretch, groups, eps)


@triton.jit
def _gate_forward(attention, gate, bias, out, heads, dim, HEADS: tl.constexpr, DIM: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, DIM)
    inside = (head < heads)[:, None] & (column < dim)[None, :]
    at = (token * heads + head)[:, None] * dim + column[None, :]
    dtype = out.dtype.element_ty
    a = tl.load(attention + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    g += tl.load(bias + head, mask=head < heads, other=0.0).to(tl.float32)[:, None]
    open_ = tl.sigmoid(g.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out + at, (a * open_).to(dtype), mask=inside)


@triton.jit
def _gate_backward(
    attention, gate, bias, grad, attention_grad, gate_grad, partial, tokens, heads, dim,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    head, column = tl.arange(0, HEADS), tl.arange(0, DIM)
    inside = (head < heads)[:, None] & (column < dim)[None, :]
    dtype = attention_grad.dtype.element_ty
    b = tl.load(bias + head, mask=head < heads, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([HEADS, DIM], dtype=tl.float32)
    for index in tl.range(program, tokens, step, num_stages=2):
        at = ((tl.zeros([1], dtype=tl.int64) + index) * heads + head)[:, None] * dim + column[None, :]
        a = tl.load(attention + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32) + b
        open_ = tl.sigmoid(g.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(attention_grad + at, (d * open_).to(dtype), mask=inside)
        d = d * a * open_ * (1 - open_)
        total += d
        tl.store(gate_grad + at, d.to(dtype), mask=inside)
    tl.store(partial + program * heads + head, tl.sum(total, 1), mask=head < heads)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        attention, gate = attention.contiguous(), gate.contiguous()
        tokens, heads, dim = attention.shape
        out = torch.empty_like(attention)
        ctx.blocks = {"HEADS": triton.next_power_of_2(heads), "DIM": triton.next_power_of_2(dim)}
        if tokens:
            _gate_forward[(tokens,)](attention, gate, bias, out, heads, dim, **ctx.blocks)
        ctx.save_for_backward(attention, gate, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention, gate, bias = ctx.saved_tensors
        tokens, heads, dim = attention.shape
        attention_grad, gate_grad = torch.empty_like(attention), torch.empty_like(gate)
        count = programs(attention, tokens)
        partial = torch.empty(count, heads, dtype=torch.float32, device=bias.device)
        _gate_backward[(count,)](
            attention, gate, bias, grads[0].contiguous(), attention_grad, gate_grad, partial, tokens, heads, dim,
            **ctx.blocks,
        )  # fmt: skip
        return attention_grad, gate_grad, summed(partial, bias.dtype)


def output_gate(attention: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """`numerics.output_gate` of [tokens, heads, dim]."""
    return _Gate.apply(attention, gate, bias)
