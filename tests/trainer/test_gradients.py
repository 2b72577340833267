"""Gradient buffers: first gradients are copied over the last step's, and what got none must not keep it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


def test_small_gradients_of_many_micro_batches_wait_and_are_all_added(
    engine_for: Callable[..., TrainerEngine], samples: list[Sequence], weighted_loss: Callable[..., Any]
) -> None:
    engine = engine_for(micro_batch_tokens=48)
    summed: dict[str, Tensor] = {}
    for sample in samples:
        engine.forward_backward([sample], weighted_loss, replay=False)
        for name, grad in main_grads(engine).items():
            summed[name] = summed.get(name, 0) + grad
        engine.zero_grad()
    engine.forward_backward(samples, weighted_loss, replay=False)
    for name, grad in main_grads(engine).items():
        torch.testing.assert_close(grad, summed[name], rtol=0.05, atol=0.05 * float(summed[name].abs().max()))


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
