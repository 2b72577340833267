"""The Triton kernels against `numerics`, on the GPU itself: in bfloat16, too, which their interpreter cannot round."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CHECKS = Path(__file__).parents[1] / "model" / "kernel_checks.py"


def run(report: Callable[[str, Any], None]) -> None:
    checks = runpy.run_path(str(CHECKS))
    for name in sorted(name for name in checks if name.startswith("check_")):
        checks[name]()
        report(name.removeprefix("check_"), "equal")
    report("packed attention: largest error, of the definition's", packed_attention())


def packed_attention() -> float:
    """FlashAttention of packed sequences, forward and gradients, against float64; it must round like the definition."""
    from beam_rl.model.attention import flash_attention

    lengths, heads, groups, dim = (5, 300, 1, 130, 64), 4, 2, 128
    ends = torch.tensor([0, *lengths]).cumsum(0)
    place = torch.arange(int(ends[-1]))
    sequence = torch.bucketize(place, ends[1:], right=True)
    distance = place[:, None] - place
    worst = 0.0
    for window in (None, 16, 64):
        seen = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or 1000))
        packed: Any = SimpleNamespace(cu_seqlens_q=ends.int().cuda(), max_seqlen_q=max(lengths))

        def ours(*qkv: Tensor, window: int | None = window, packed: Any = packed) -> Tensor:
            return flash_attention(*qkv, packed, window, dim**-0.5)

        def definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
            weights = scores.masked_fill(~seen.cuda(), float("-inf")).softmax(
                -1, dtype=torch.promote_types(q.dtype, torch.float)
            )
            return torch.einsum("hqk,khd->qhd", weights.to(q.dtype), v)

        shapes = [(len(place), count, dim) for count in (heads, groups, groups)]
        inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
        exact = _with_gradients(definition, [x.double() for x in inputs])
        plain, found = _with_gradients(definition, inputs), _with_gradients(ours, inputs)
        for one, other, true in zip(found, plain, exact, strict=True):
            error, reference = (float((x.double() - true).abs().max()) for x in (one, other))
            assert error < 2 * reference, f"window {window}: off by {error:.1e}, the definition by {reference:.1e}"
            worst = max(worst, error / reference)
    return worst


def _with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]
