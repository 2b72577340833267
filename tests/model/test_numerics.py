"""Beam's arithmetic: the routing rule, the rounding points, and derivatives written by hand."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from beam_rl.model import fused, numerics
from beam_rl.model.rows import spread_rows, take_rows


def route_one(scores: list[float], bias: list[float], topk: int, n_group: int, topk_group: int) -> set[int]:
    """The routing rule in plain Python."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // n_group
    groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
    best = sorted(groups, key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:2]))[:topk_group]
    allowed = [expert for group in best for expert in group]
    return set(sorted(allowed, key=lambda e: -choice[e])[:topk])


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 3), (4, 4), (8, 3)])
def test_routing_holds_for_every_ratio_of_topk_to_groups(n_group: int, topk_group: int) -> None:
    """Summing the best topk / topk_group of a group, as Megatron does, differs unless topk is twice topk_group."""
    experts = 16
    generator = torch.Generator().manual_seed(n_group * 10 + topk_group)
    logits = torch.randn(64, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.2
    for topk in range(1, topk_group * experts // n_group + 1):
        weights, ids = numerics.route(logits, bias, topk, n_group, topk_group)
        for row, chosen in zip(logits.sigmoid().tolist(), ids.tolist(), strict=True):
            assert set(chosen) == route_one(row, bias.tolist(), topk, n_group, topk_group)
        assert weights.sum(-1).allclose(torch.ones(64))


def test_correction_bias_moves_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    weights, ids = numerics.route(logits, bias, 2, 1, 1, normalise=False)
    assert ids.tolist() == [[3, 0]]
    assert weights.tolist() == [pytest.approx([1 / (1 + math.e), 1 / (1 + math.exp(-2))])]


def test_weights_of_replayed_experts_are_the_routers_own() -> None:
    logits = torch.randn(5, 8)
    weights, ids = numerics.route(logits, torch.zeros(8), 3, 4, 2)
    assert torch.equal(numerics.route_weights(logits, ids), weights)


def test_rope_keeps_float32_angles_at_large_positions() -> None:
    """In bfloat16, position 4097 would be 4096."""
    positions = torch.tensor([4096, 4097])
    q = torch.ones(2, 1, 8, dtype=torch.bfloat16)
    angles = numerics.rope_cos_sin(positions, numerics.rope_inverse_frequencies(8, 1e4))
    rotated = numerics.rotate(q, *angles)
    expected = [math.cos(p) - math.sin(p) for p in (4096, 4097)]
    assert rotated[:, 0, 0].tolist() == pytest.approx(expected, abs=1e-2)
    assert rotated.dtype == torch.bfloat16


def test_ssmax_counts_positions_from_one() -> None:
    scale = numerics.ssmax_scale(torch.tensor([0, 2047]))
    assert scale.tolist() == pytest.approx([(1 + 1 / 2048) ** 0.1, 2**0.1])


def test_depth_scales_keep_the_variance() -> None:
    for n in (2, 3, 105):
        branch, residual = numerics.depth_scales(n)
        assert branch**2 + residual**2 == pytest.approx(1)


def test_output_gate_rounds_where_the_reference_does() -> None:
    attention, gate = (torch.randn(6, 2, 8).bfloat16() for _ in range(2))
    bias = torch.randn(2).bfloat16()
    rounded = (gate.float() + bias.float()[:, None]).bfloat16()
    rounded = torch.sigmoid(rounded.float()).bfloat16()
    expected = (attention.float() * rounded.float()).bfloat16()
    assert torch.equal(numerics.output_gate(attention, gate, bias), expected)


def test_softcap_is_float32() -> None:
    logits = numerics.softcap(torch.tensor([100.0, 0.5]).bfloat16(), 30.0)
    assert logits.dtype == torch.float32
    assert logits.tolist() == pytest.approx([30 * math.tanh(100 / 30), 30 * math.tanh(0.5 / 30)])
    assert numerics.softcap(torch.tensor([100.0]), None).item() == 100


def test_temperature_divides_logits_and_not_logprobs() -> None:
    logits, targets = torch.randn(4, 9), torch.tensor([0, 3, 8, 1])
    expected = torch.log_softmax(logits / 0.6, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(numerics.token_logprobs(logits, targets, 0.6), expected)


def test_experts_round_after_swiglu_and_after_the_sum_only() -> None:
    x = torch.randn(6, 16).bfloat16()
    gate_up, down = torch.randn(2, 8, 16).bfloat16(), torch.randn(2, 16, 4).bfloat16()
    ends = torch.tensor([2, 6], dtype=torch.int32)
    outputs = numerics.experts_mlp(x, gate_up, down, ends)
    assert outputs.dtype == torch.float32  # on a CPU
    for rows, expert in ((slice(0, 2), 0), (slice(2, 6), 1)):
        gate, up = (x[rows].float() @ gate_up[expert].float().T).chunk(2, -1)
        hidden = (torch.nn.functional.silu(gate) * up).bfloat16()
        torch.testing.assert_close(outputs[rows], hidden.float() @ down[expert].float().T, atol=1e-5, rtol=1e-5)
    weights = torch.rand(3, 2)
    combined = numerics.combine_experts(outputs.view(3, 2, 16), weights, 2.5, torch.bfloat16)
    expected = ((outputs.view(3, 2, 16) * weights[..., None]).sum(1) * 2.5).bfloat16()
    assert (combined != expected).float().mean() < 0.05  # another order of summation may round one the other way


def test_expert_without_tokens_has_no_gradient_and_breaks_nothing() -> None:
    x = torch.randn(3, 16, requires_grad=True)
    gate_up, down = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 16, 4, requires_grad=True)
    fused.experts_mlp(x, gate_up, down, torch.tensor([0, 3, 3, 3], dtype=torch.int32)).square().sum().backward()
    assert gate_up.grad is not None
    assert [bool(g.any()) for g in gate_up.grad] == [False, True, False, False]


def both(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape).to(dtype)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


ANGLES = numerics.rope_cos_sin(torch.arange(5), numerics.rope_inverse_frequencies(16, 1e4))
PAIRS: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = [
    (lambda x, w: fused.rms_norm(x, w, 1e-6), lambda x, w: numerics.rms_norm(x, w, 1e-6), [(5, 3, 16), (16,)]),
    (fused.swiglu, lambda x: numerics.swiglu(*x.chunk(2, -1)), [(5, 3, 16)]),
    (lambda x: fused.rotate(x, *ANGLES), lambda x: numerics.rotate(x, *ANGLES), [(5, 3, 16)]),
]


@pytest.mark.parametrize(("dtype", "pair"), itertools.product([torch.float32, torch.bfloat16], PAIRS))
def test_written_derivatives_are_autograds(
    dtype: torch.dtype, pair: tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]
) -> None:
    fast, plain, shapes = pair
    ours, theirs = zip(*(both(dtype, shape) for shape in shapes), strict=True)
    a, b = fast(*ours), plain(*theirs)
    assert torch.equal(a, b)
    upstream = torch.randn(a.shape).to(dtype)
    a.backward(upstream)
    b.backward(upstream)
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (5e-2, 2e-2)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=atol, rtol=rtol)


def test_row_gathers_have_the_gradients_of_plain_indexing() -> None:
    index = torch.tensor([2, 0, 1, 1, 0, 2])  # every row twice
    places = torch.tensor([1, 4, 2, 3, 0, 5])
    upstream = torch.randn(6, 4)
    ours, theirs = both(torch.float32, (3, 4))
    spread_rows(ours, index, places, 2).backward(upstream)
    theirs[index].backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad)
    ours, theirs = both(torch.float32, (3, 4))
    take_rows(ours, torch.tensor([2, 0])).backward(upstream[:2])
    theirs[torch.tensor([2, 0])].backward(upstream[:2])
    torch.testing.assert_close(ours.grad, theirs.grad)
