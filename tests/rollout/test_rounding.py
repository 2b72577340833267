"""The trainer's attention on a CPU rounds as vLLM's kernel for this very CPU: its own operators are called."""

import pytest
import torch
from torch import Tensor

from beam_rl.model import cpu_attention

BLOCK = 64
"""Tokens of a KV block."""


def rollouts(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Attention of one sequence, bfloat16 q [tokens, heads, d], k and v [tokens, groups, d], as a prefill of vLLM's."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    tokens, heads, dim = q.shape
    groups, blocks = k.shape[1], -(-tokens // BLOCK)
    isa = _get_attn_isa(q.dtype, BLOCK, dim)
    keys, values = torch.zeros(blocks, groups, 2 * BLOCK, dim, dtype=q.dtype).chunk(2, dim=2)
    starts, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    left = -1 if window is None else window
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, heads, groups, dim, lengths, q.dtype, starts, True, left, isa, enable_kv_split=False
    )
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(tokens), isa)
    out, table = torch.empty_like(q), torch.arange(blocks, dtype=torch.int32)[None]
    ops.cpu_attention_with_kv_cache(
        q, keys, values, out, starts, lengths, scale, True, None, left, table, 0.0, plan, None
    )
    return out


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dim", [32, 128])
def test_probabilities_are_rounded_where_the_rollouts_kernel_rounds_them(
    dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer rounded them always, vLLM only with AMX: elsewhere a third of the outputs differed, and the gap was
    ten times as large."""
    generator = torch.Generator().manual_seed(0)
    shapes = (40, 4, dim), (40, 2, dim), (40, 2, dim)
    qkv = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    theirs = rollouts(*qkv, window, dim**-0.5)

    def alike() -> float:
        ours = cpu_attention.short_attention(*(x[None] for x in qkv), window, dim**-0.5)[0]
        return float((ours == theirs).float().mean())

    share, rule = alike(), cpu_attention.kernel_rounds
    monkeypatch.setattr(cpu_attention, "kernel_rounds", lambda *given: not rule(*given))
    assert share > alike() + 0.1
