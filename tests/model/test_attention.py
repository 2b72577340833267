"""Attention on a CPU: one definition for short and long sequences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from beam_rl.model.attention import context_index, windowed_attention
from beam_rl.model.batch import PackedBatch
from beam_rl.model.cpu_attention import short_attention

SCALE = 0.25


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 40, 4, 16), (3, 40, 2, 16), (3, 40, 2, 16))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def kernel(qkv: list[Tensor], window: int | None) -> Tensor:
    """PyTorch's."""
    q, k, v = qkv
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    mask = (distance >= 0) & (distance < (window or q.shape[1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 7])
def test_short_and_long_sequences_attend_alike(window: int | None) -> None:
    """Which of the two a sequence gets depends on its length: neither values nor gradients may show it."""
    ours, theirs = inputs(torch.float32), inputs(torch.float32)
    a, b = short_attention(*ours, window, SCALE), kernel(theirs, window)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(a.shape)
    a.backward(upstream)
    b.backward(upstream)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [8, 7])  # 40 tokens: whole blocks, and a last one that is padded
def test_attention_in_blocks_sees_the_window_and_nothing_else(window: int) -> None:
    """The rows that pad a sequence, and the sequence before it, lie beside it in memory."""
    ours, theirs = inputs(torch.float32), inputs(torch.float32)
    mask = PackedBatch.from_lengths([40] * 3).window_mask(3, 40, window, torch.float32)
    a, b = windowed_attention(*ours, window, mask, SCALE), kernel(theirs, window)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(a.shape)
    a.backward(upstream)
    b.backward(upstream)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-5)


def test_context_parallel_ranks_share_every_sequence_fairly() -> None:
    parts = [context_index((8, 4), ranks=2, rank=rank).tolist() for rank in range(2)]
    assert parts == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    with pytest.raises(ValueError, match="6 tokens does not split into 2 x 2 equal chunks"):
        context_index((6,), ranks=2, rank=0)
