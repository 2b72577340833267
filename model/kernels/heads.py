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
def _slots(heads_in_group, groups, dim, SLOTS: tl.constexpr, DIM: tl.constexpr):
    """What every slot of a token's row is: masks [SLOTS, 1] of q, gate, k, v, its head or group, and the places."""
    slot = tl.arange(0, SLOTS)
    column = tl.arange(0, DIM)
    size = 2 * heads_in_group + 2
    group, inner = slot // size, slot % size
    inside = slot < groups * size
    is_q, is_k = inside & (inner < heads_in_group), inside & (inner == 2 * heads_in_group)
    is_gate = inside & (inner >= heads_in_group) & (inner < 2 * heads_in_group)
    is_v = inside & (inner == 2 * heads_in_group + 1)
    head = group * heads_in_group + tl.where(is_gate, inner - heads_in_group, inner)
    return slot, column, is_q, is_gate, is_k, is_v, head, group, (column < dim)[None, :]


@triton.jit
def _split_forward(
    mixed, q_weight, k_weight, cos, sin, stretch, q, gate, k, v, scales,
    heads_in_group, groups, dim, eps, ROPE: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot, column, is_q, is_gate, is_k, is_v, head, group, real = _slots(heads_in_group, groups, dim, SLOTS, DIM)
    used = (is_q | is_gate | is_k | is_v)[:, None] & real
    row = mixed + token * groups * (2 * heads_in_group + 2) * dim
    dtype = q.dtype.element_ty
    x = tl.load(row + slot[:, None] * dim + column[None, :], mask=used, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)
    normed = is_q | is_k
    tl.store(scales + token * SLOTS + slot, inverse, mask=normed)
    w = tl.where(
        is_q[:, None],
        tl.load(q_weight + column, mask=column < dim, other=0.0).to(tl.float32)[None, :],
        tl.load(k_weight + column, mask=column < dim, other=0.0).to(tl.float32)[None, :],
    )
    h = (w * (x * inverse[:, None])).to(dtype).to(tl.float32)
    if ROPE:
        half = dim // 2
        other = tl.where(column < half, column + half, column - half)
        y = tl.load(row + slot[:, None] * dim + other[None, :], mask=used, other=0.0).to(tl.float32)
        w_other = tl.where(
            is_q[:, None],
            tl.load(q_weight + other, mask=column < dim, other=0.0).to(tl.float32)[None, :],
            tl.load(k_weight + other, mask=column < dim, other=0.0).to(tl.float32)[None, :],
        )
        h_other = (w_other * (y * inverse[:, None])).to(dtype).to(tl.float32)
        angle = token * half + tl.where(column < half, column, column - half)
        c = tl.load(cos + angle, mask=column < dim, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=column < dim, other=0.0)[None, :]
        h = h * c + h_other * tl.where(column < half, -s, s)
    else:
        h = tl.where(is_q[:, None], h * tl.load(stretch + token), h)
    heads = groups * heads_in_group
    to_head = (token * heads + head)[:, None] * dim + column[None, :]
    to_group = (token * groups + group)[:, None] * dim + column[None, :]
    tl.store(q + to_head, h.to(dtype), mask=is_q[:, None] & real)
    tl.store(gate + to_head, x.to(dtype), mask=is_gate[:, None] & real)
    tl.store(k + to_group, h.to(dtype), mask=is_k[:, None] & real)
    tl.store(v + to_group, x.to(dtype), mask=is_v[:, None] & real)


@triton.jit
def _split_backward(
    mixed, q_weight, k_weight, cos, sin, stretch, scales, q_grad, gate_grad, k_grad, v_grad,
    mixed_grad, partial, tokens, heads_in_group, groups, dim,
    ROPE: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    slot, column, is_q, is_gate, is_k, is_v, head, group, real = _slots(heads_in_group, groups, dim, SLOTS, DIM)
    used = (is_q | is_gate | is_k | is_v)[:, None] & real
    normed = is_q | is_k
    w = tl.where(
        is_q[:, None],
        tl.load(q_weight + column, mask=column < dim, other=0.0).to(tl.float32)[None, :],
        tl.load(k_weight + column, mask=column < dim, other=0.0).to(tl.float32)[None, :],
    )
    half = dim // 2
    other = tl.where(column < half, column + half, column - half)
    q_sum = tl.zeros([DIM], dtype=tl.float32)
    k_sum = tl.zeros([DIM], dtype=tl.float32)
    for index in range(program, tokens, step):
        token = tl.zeros([1], dtype=tl.int64) + index
        at_head = (token * groups * heads_in_group + head)[:, None] * dim
        at_group = (token * groups + group)[:, None] * dim
        grad = tl.load(q_grad + at_head + column[None, :], mask=is_q[:, None] & real, other=0.0).to(tl.float32)
        grad += tl.load(k_grad + at_group + column[None, :], mask=is_k[:, None] & real, other=0.0).to(tl.float32)
        if ROPE:
            swapped = tl.load(q_grad + at_head + other[None, :], mask=is_q[:, None] & real, other=0.0).to(tl.float32)
            swapped += tl.load(k_grad + at_group + other[None, :], mask=is_k[:, None] & real, other=0.0).to(tl.float32)
            angle = token * half + tl.where(column < half, column, column - half)  # [DIM]
            c = tl.load(cos + angle, mask=column < dim, other=0.0)[None, :]
            s = tl.load(sin + angle, mask=column < dim, other=0.0)[None, :]
            grad = grad * c + swapped * tl.where(column < half, s, -s)
        else:
            grad = tl.where(is_q[:, None], grad * tl.load(stretch + token)[:, None], grad)
        at_row = (token * groups * (2 * heads_in_group + 2) + slot)[:, None] * dim + column[None, :]
        x = tl.load(mixed + at_row, mask=used, other=0.0).to(tl.float32)
        inverse = tl.load(scales + token * SLOTS + slot, mask=normed, other=0.0)[:, None]
        x *= inverse
        q_sum += tl.sum(tl.where(is_q[:, None], grad * x, 0.0), 0)
        k_sum += tl.sum(tl.where(is_k[:, None], grad * x, 0.0), 0)
        grad *= w
        grad = inverse * (grad - x * (tl.sum(grad * x, 1) / dim)[:, None])
        gates = tl.load(gate_grad + at_head + column[None, :], mask=is_gate[:, None] & real, other=0.0).to(tl.float32)
        values = tl.load(v_grad + at_group + column[None, :], mask=is_v[:, None] & real, other=0.0).to(tl.float32)
        grad = tl.where(normed[:, None], grad, gates + values)
        tl.store(mixed_grad + at_row, grad.to(mixed_grad.dtype.element_ty), mask=used)
    tl.store(partial + program * 2 * DIM + column, q_sum)
    tl.store(partial + program * 2 * DIM + DIM + column, k_sum)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, stretch: Tensor | None,
        groups: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        mixed = mixed.contiguous()
        tokens, dim = mixed.shape[0], q_weight.shape[0]
        heads_in_group = (mixed[0].numel() // (groups * dim) - 2) // 2
        q, gate = (mixed.new_empty(tokens, groups * heads_in_group, dim) for _ in range(2))
        k, v = (mixed.new_empty(tokens, groups, dim) for _ in range(2))
        blocks = {
            "SLOTS": triton.next_power_of_2(groups * (2 * heads_in_group + 2)),
            "DIM": triton.next_power_of_2(dim),
        }
        scales = torch.empty(tokens, blocks["SLOTS"], dtype=torch.float32, device=mixed.device)
        ctx.sizes, ctx.blocks = (heads_in_group, groups, dim), blocks
        ctx.rope = stretch is None
        positions = (cos, sin, cos if stretch is None else stretch)
        if tokens:
            _split_forward[(tokens,)](
                mixed, q_weight, k_weight, *positions, q, gate, k, v, scales, *ctx.sizes, eps,
                ROPE=ctx.rope, **blocks, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(mixed, q_weight, k_weight, *positions, scales)
        return q, gate, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None, None]:
        mixed, q_weight, k_weight, cos, sin, stretch, scales = ctx.saved_tensors
        tokens, dim = len(mixed), q_weight.shape[0]
        mixed_grad = torch.empty_like(mixed)
        count = programs(mixed, tokens)
        partial = torch.zeros(count, 2, ctx.blocks["DIM"], dtype=torch.float32, device=mixed.device)
        _split_backward[(count,)](
            mixed, q_weight, k_weight, cos, sin, stretch, scales, *(grad.contiguous() for grad in grads),
            mixed_grad, partial, tokens, *ctx.sizes, ROPE=ctx.rope, **ctx.blocks, num_warps=8,
        )  # fmt: skip
        both = summed(partial, torch.float32)[:, :dim]
        return mixed_grad, both[0].to(q_weight.dtype), both[1].to(k_weight.dtype), None, None, None, None, None


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
    total = tl.zeros([HEADS], dtype=tl.float32)
    for index in range(program, tokens, step):
        at = ((tl.zeros([1], dtype=tl.int64) + index) * heads + head)[:, None] * dim + column[None, :]
        a = tl.load(attention + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32) + b
        open_ = tl.sigmoid(g.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(attention_grad + at, (d * open_).to(dtype), mask=inside)
        d = d * a * open_ * (1 - open_)
        total += tl.sum(d, 1)
        tl.store(gate_grad + at, d.to(dtype), mask=inside)
    tl.store(partial + program * HEADS + head, total)


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
        partial = torch.zeros(count, ctx.blocks["HEADS"], dtype=torch.float32, device=bias.device)
        _gate_backward[(count,)](
            attention, gate, bias, grads[0].contiguous(), attention_grad, gate_grad, partial, tokens, heads, dim,
            **ctx.blocks,
        )  # fmt: skip
        return attention_grad, gate_grad, summed(partial[:, :heads], bias.dtype)


def output_gate(attention: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """`numerics.output_gate` of [tokens, heads, dim]."""
    return _Gate.apply(attention, gate, bias)
