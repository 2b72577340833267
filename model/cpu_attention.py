"""Attention of short sequences on a CPU, with the rounding of the kernel that vLLM has for that CPU.

Where that multiplies with AMX, probabilities are rounded to bfloat16 before they meet the values; they are divided by
their exact sum after. For sequences of some dozens of tokens it is also faster than PyTorch's flash kernel, which takes
eight times as long in bfloat16 as in float32.
"""

from typing import Any

import torch
from torch import Tensor

LONGEST = 256
"""Tokens up to which all scores are kept: 4 bytes a head and pair of tokens."""


def kernel_rounds(dtype: torch.dtype, dim: int) -> bool:
    """Whether vLLM's kernel for heads of so many values rounds probabilities (`_get_attn_isa` of its `cpu_attn`)."""
    return dtype == torch.bfloat16 and dim % 32 == 0 and torch.cpu._is_amx_tile_supported()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        dtype = q.dtype
        q, k, v = q.float(), k.float(), v.float()
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1, keepdim=True)
        if kernel_rounds(dtype, q.shape[-1]):
            weights = weights.to(dtype).float()
        output = torch.bmm(weights, v).div_(total)
        ctx.save_for_backward(q, k, v, weights.div_(total), output)
        ctx.scale, ctx.dtype = scale, dtype
        return output.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, weights, output = ctx.saved_tensors
        grad = grads[0].float()
        v_grad = torch.bmm(weights.transpose(1, 2), grad)
        scores_grad = torch.bmm(grad, v.transpose(1, 2))
        scores_grad.sub_((grad * output).sum(-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
        q_grad = torch.bmm(scores_grad, k)
        k_grad = torch.bmm(scores_grad.transpose(1, 2), q)
        return q_grad.to(ctx.dtype), k_grad.to(ctx.dtype), v_grad.to(ctx.dtype), None, None


def short_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Causal attention, in a window if there is one, of sequences of one length.

    Args:
        q: [sequences, tokens, heads, d].
        k, v: [sequences, tokens, groups, d].
        window: tokens that a query sees, itself included.

    Returns:
        [sequences, tokens, heads, d].
    """
    count, width, heads, dim = q.shape
    groups = k.shape[2]
    position = torch.arange(width)
    distance = (position[:, None] - position).repeat(heads // groups, 1)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    # The query heads of a group share its keys, so they are more rows of the same product.
    rows = q.view(count, width, groups, -1, dim).permute(0, 2, 3, 1, 4).reshape(count * groups, -1, dim)
    k, v = (x.transpose(1, 2).reshape(count * groups, width, dim) for x in (k, v))
    output = _Attention.apply(rows, k, v, bias, scale)
    return output.view(count, groups, -1, width, dim).permute(0, 3, 1, 2, 4).reshape(q.shape)
