"""Gradient buffers: first gradients are copied over the last step's, and what got none must not keep it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from beam_rl.trainer import gradients
from beam_rl.trainer.engine import Sequence, TrainerEngine


def main_grads(engine: TrainerEngine) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for model in engine.models for name, p in model.named_parameters()}


def test_a_step_keeps_nothing_of_the_last_ones_gradient(
    engine_for: Callable[..., TrainerEngine], samples: list[Sequence], weighted_loss: Callable[..., Any]
) -> None:
    engine = engine_for(micro_batch_tokens=48)  # several micro batches
    engine.forward_backward(samples, weighted_loss, replay=False)
    expected = main_grads(engine)
    for buffer in (*engine.chunks[0].buffers, *engine.chunks[0].expert_parallel_buffers):
        assert buffer.grad_data.any()
    engine.zero_grad()
    engine.forward_backward(samples[:1], weighted_loss, replay=False)
    engine.zero_grad()
    engine.forward_backward(samples, weighted_loss, replay=False)
    again = main_grads(engine)
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.parametrize("small", [gradients.SMALL, 500], ids=["all small", "some small"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_small_gradients_of_many_micro_batches_wait_and_are_all_added(
    small: int,
    dtype: str,
    tolerance: float,
    engine_for: Callable[..., TrainerEngine],
    samples: list[Sequence],
    weighted_loss: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "SMALL", small)
    engine = engine_for(micro_batch_tokens=48, dtype=dtype)
    summed: dict[str, Tensor] = {}
    for sample in samples:
        engine.forward_backward([sample], weighted_loss, replay=False)
        for name, grad in main_grads(engine).items():
            summed[name] = summed.get(name, 0) + grad
        engine.zero_grad()
    engine.forward_backward(samples, weighted_loss, replay=False)
    for name, grad in main_grads(engine).items():
        error = float((grad - summed[name]).abs().max()) / float(summed[name].abs().max())
        assert error < tolerance, f"{name} is off by {error:.1e}"


def test_a_parameter_without_a_gradient_in_a_step_ends_with_zero(
    engine_for: Callable[..., TrainerEngine], samples: list[Sequence], weighted_loss: Callable[..., Any]
) -> None:
    engine = engine_for()
    engine.forward_backward(samples, weighted_loss, replay=False)
    engine.zero_grad()
    left_out = engine.models[0].decoder.layers[1].input_layernorm.weight
    held = left_out.requires_grad_(False).main_grad
    assert held.any()
    engine.forward_backward(samples, weighted_loss, replay=False)
    assert not held.any()


def test_a_step_without_a_backward_pass_has_no_gradient(
    engine_for: Callable[..., TrainerEngine], samples: list[Sequence], weighted_loss: Callable[..., Any]
) -> None:
    engine = engine_for()
    engine.forward_backward(samples, weighted_loss, replay=False)
    engine.zero_grad()
    assert engine.optimizer_step()["grad_norm"] == 0


def test_a_graphs_gradients_are_a_steps_first_ones_once(
    engine_for: Callable[..., TrainerEngine], samples: list[Sequence], weighted_loss: Callable[..., Any]
) -> None:
    """What a parameter holds of an earlier step must be overwritten or cleared, whoever computes its gradient first."""
    engine = engine_for()
    (buffers,) = engine.chunks
    one, *others = buffers.params_with_grad
    assert buffers.claim_all([one, *others])
    assert not buffers.claim_all([one, *others])
    engine.forward_backward(samples, weighted_loss, replay=False)
    engine.zero_grad()
    assert others[0].main_grad.any()
    buffers.add(one, torch.ones_like(one))
    assert not buffers.claim_all([one, *others])
    assert torch.equal(one.main_grad, torch.ones_like(one))
    assert not any(other.main_grad.any() for other in others)


def test_a_gradient_that_waits_is_added_before_a_graph_adds_to_it(
    engine_for: Callable[..., TrainerEngine], samples: list[Sequence], weighted_loss: Callable[..., Any]
) -> None:
    engine = engine_for()
    (buffers,) = engine.chunks
    engine.forward_backward(samples, weighted_loss, replay=False)
    expected = {param: param.main_grad.clone() for param in buffers.params_with_grad}
    engine.zero_grad()
    for param, grad in expected.items():
        param.grad = grad.clone()
        buffers._make_backward_post_hook(param)()
    assert buffers._waiting
    assert not buffers.claim_all(buffers.params_with_grad)
    assert all(torch.equal(param.main_grad, grad) for param, grad in expected.items())


def test_a_captured_graph_leaves_it_open_whether_its_gradients_are_the_first(
    engine_for: Callable[..., TrainerEngine],
) -> None:
    (buffers,) = engine_for().chunks
    flag = torch.zeros(1, dtype=torch.int32)
    (param, *_) = buffers.params_with_grad
    with buffers.captured(flag):
        assert param.claim_main_grad()[1] is flag
    assert param.claim_main_grad()[1] is True
