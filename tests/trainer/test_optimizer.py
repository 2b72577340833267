"""Steps of the optimizer: AdamW as torch defines it, float32 main parameters, schedules, clipping, bad gradients."""

import math

import pytest
import torch

from beam_rl.model.errors import BadInput
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Parallel, TrainerEngine


def supervised(logprobs, *_):
    return -logprobs.sum() / 100, {}


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.export()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_reduces_the_loss(dtype, engine_for, samples):
    engine = engine_for(dtype=dtype)
    losses = []
    for _ in range(12):
        losses.append(engine.forward_backward(samples, supervised, replay=False)["loss"])
        engine.optimizer_step()
    assert losses[-1] < 0.4 * losses[0]


def test_steps_are_torchs_adamw_with_decay_of_matrices_only(engine_for, samples, gradients):
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, clip_grad=0.0)
    engine = engine_for(optimizer=settings)
    model = engine.models[0]
    twins = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in twins.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in twins.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
    for _ in range(3):
        engine.forward_backward(samples, supervised, replay=False)
        for name, parameter in model.named_parameters():
            twins[name].grad = parameter.main_grad.clone()
        adamw.step()
        engine.optimizer_step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), twins[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_bfloat16_keeps_updates_too_small_to_see(engine_for, samples):
    """An RL step is far below bfloat16's resolution: without float32 main parameters nothing would be learned."""
    engine = engine_for(dtype="bfloat16", optimizer=OptimizerSettings(lr=1e-6))
    before = weights(engine)
    groups = [group for part in engine.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    mains = [p for group in groups for p in group["params"]]
    kept = [p.detach().clone() for p in mains]
    for _ in range(3):
        engine.forward_backward(samples, supervised, replay=False)
        engine.optimizer_step()
    moved = [float((p.detach() - old).abs().max()) for p, old in zip(mains, kept, strict=True)]
    assert all(p.dtype == torch.float32 for p in mains)
    assert min(moved) > 1e-6
    pairs = [(tensor, before[name]) for name, tensor in engine.export() if tensor.dtype == torch.bfloat16]
    still = sum(int((new == old).sum()) for new, old in pairs) / sum(new.numel() for new, _ in pairs)
    assert still > 0.9


def test_main_parameters_belong_to_their_own_model_parameters(engine_for):
    """A group of mixed dtypes would index them wrongly: each bfloat16 weight must be its main parameter, rounded."""
    engine = engine_for(dtype="bfloat16")
    for part in engine.optimizer.chained_optimizers:
        for parameter, (group, place) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][place]
            assert torch.equal(main.to(parameter.dtype), parameter.detach().flatten())


def test_the_gradient_is_clipped_by_its_whole_norm(engine_for, samples):
    engine = engine_for(optimizer=OptimizerSettings(lr=1e-3, betas=(0.5, 0.9), clip_grad=0.25))
    engine.forward_backward(samples, supervised, replay=False)
    step = engine.optimizer_step()
    assert step["grad_norm"] > 0.25
    states = [state for part in engine.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    clipped = math.sqrt(sum(float((state["exp_avg"] / 0.5).square().sum()) for state in states))
    assert clipped == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, dtype, engine_for, samples):
    engine = engine_for(dtype=dtype)
    before = weights(engine)
    engine.forward_backward(samples, lambda logprobs, *_: (logprobs.sum() * bad, {}), replay=False)
    assert engine.optimizer_step()["skipped"] == 1.0
    after = weights(engine)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    engine.forward_backward(samples, supervised, replay=False)
    step = engine.optimizer_step()
    assert step["skipped"] == 0.0
    assert math.isfinite(step["grad_norm"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 6),
        ({"warmup_steps": 3}, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ({"schedule": "linear", "total_steps": 5, "min_lr": 0.5}, [0.9, 0.8, 0.7, 0.6, 0.5, 0.5]),
        ({"schedule": "cosine", "total_steps": 4}, [0.5 + 0.5 * math.cos(math.pi * k / 4) for k in (1, 2, 3, 4)]),
    ],
)
def test_learning_rates_of_the_first_steps(settings, expected, engine_for, samples):
    """Step k of a warm-up has k / warmup_steps: the first step must not be wasted on a rate of 0."""
    engine = engine_for(optimizer=OptimizerSettings(lr=1.0, **settings))
    rates = []
    for _ in expected:
        engine.zero_grad()
        rates.append(engine.optimizer_step()["lr"])
    assert rates == pytest.approx(expected)


def test_gradients_cannot_be_reduced_twice(engine_for, samples):
    """A second call before the step would reduce the first one's gradients over the data-parallel ranks again."""
    engine = engine_for()
    engine.forward_backward(samples, supervised, replay=False)
    with pytest.raises(RuntimeError, match="optimizer_step or zero_grad"):
        engine.forward_backward(samples, supervised, replay=False)
    engine.zero_grad()
    engine.forward_backward(samples, supervised, replay=False)


def test_a_reference_model_has_no_gradients(engine_for, samples):
    engine = engine_for(optimizer=None)
    assert not any(p.requires_grad for p in engine.models[0].parameters())
    with pytest.raises(RuntimeError, match="without an optimizer"):
        engine.forward_backward(samples, supervised, replay=False)
    trained = engine_for()
    for one, other in zip(
        engine.forward_logprobs(samples, replay=False), trained.forward_logprobs(samples, replay=False), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: OptimizerSettings(lr=0.0), "lr is 0.0"),
        (lambda: OptimizerSettings(lr=1e-3, min_lr=1e-2), "min_lr"),
        (lambda: OptimizerSettings(weight_decay=-1), "weight_decay"),
        (lambda: OptimizerSettings(betas=(0.9, 1.0)), "betas"),
        (lambda: OptimizerSettings(eps=0.0), "eps"),
        (lambda: OptimizerSettings(clip_grad=-1.0), "clip_grad"),
        (lambda: OptimizerSettings(warmup_steps=-1), "warmup_steps"),
        (lambda: OptimizerSettings(schedule="step"), "schedule"),  # type: ignore[arg-type]
        (lambda: OptimizerSettings(schedule="cosine"), "total_steps"),
        (lambda: OptimizerSettings(schedule="linear", warmup_steps=5, total_steps=5), "total_steps"),
        (lambda: EngineConfig(dtype="float16"), "dtype"),  # type: ignore[arg-type]
        (lambda: EngineConfig(micro_batch_tokens=0), "micro_batch_tokens"),
        (lambda: EngineConfig(recompute="some"), "recompute"),  # type: ignore[arg-type]
        (lambda: EngineConfig(temperature=0.0), "temperature"),
        (lambda: Parallel(tp=0), "tp"),
    ],
)
def test_an_illegal_setting_is_named_when_it_is_set(make, named):
    with pytest.raises(BadInput, match=named):
        make()


def test_a_layout_that_the_world_cannot_hold_is_refused(golden):
    from beam_rl.model.config import load_config

    engine = TrainerEngine(EngineConfig(parallel=Parallel(tp=2)))
    with pytest.raises(BadInput, match="tp"):
        engine.build(load_config(golden("tiny")))
