"""A trainer in MXFP8: every projection is quantised, nothing else is, and it learns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from beam_rl.model import mxfp8
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import load_config
from beam_rl.model.errors import BadInput
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.trainer.engine import EngineConfig, Sequence, TrainerEngine

EngineFor = Callable[..., TrainerEngine]


def quantised_shapes(engine: TrainerEngine, samples: list[Sequence], monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Shapes of the weights that a forward pass takes through MXFP8."""
    shapes: list[tuple] = []

    def counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            shapes.append(tuple(weight.shape))
            return function(x, weight, *rest)

        return call

    with monkeypatch.context() as patch:
        for name in ("linear", "grouped_linear"):
            patch.setattr(mxfp8, name, counting(getattr(mxfp8, name)))
        engine.forward_logprobs(samples, replay=False)
    return shapes


def test_every_projection_is_quantised_and_nothing_else(engine_for: EngineFor, samples, monkeypatch) -> None:
    engine = engine_for(mxfp8=Mxfp8Settings())
    attention = [(384, 64), (64, 128)]  # fused q, gate, k, v: 2 groups of 2 + 2 + 1 + 1 heads of 32
    dense, sparse = [(256, 64), (64, 128)], [(16, 64, 64), (16, 64, 32)]
    assert quantised_shapes(engine, samples, monkeypatch) == 2 * (attention + dense) + 6 * (attention + sparse)


def test_what_is_excluded_stays_plain(engine_for: EngineFor, samples, monkeypatch) -> None:
    settings = Mxfp8Settings(exclude=("self_attn", "layers.0", "layers.3.mlp.experts", "down_proj"))
    engine = engine_for(mxfp8=settings)
    assert quantised_shapes(engine, samples, monkeypatch) == [(256, 64)] + 5 * [(16, 64, 64)]


def test_excluding_everything_is_the_plain_model(engine_for: EngineFor, samples) -> None:
    plain = engine_for().forward_logprobs(samples, replay=False)
    excluded = engine_for(mxfp8=Mxfp8Settings(exclude=("self_attn", "mlp"))).forward_logprobs(samples, replay=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, excluded, strict=True))
    quantised = engine_for(mxfp8=Mxfp8Settings()).forward_logprobs(samples, replay=False)
    assert not any(torch.equal(a, b) for a, b in zip(plain, quantised, strict=True))


def test_gradients_point_where_the_plain_ones_do(
    engine_for: EngineFor, samples, with_routes, weighted_loss, gradients
) -> None:
    plain, quantised = engine_for(), engine_for(mxfp8=Mxfp8Settings())
    samples = with_routes(plain, samples)
    plain.forward_backward(samples, weighted_loss)
    quantised.forward_backward(samples, weighted_loss)
    expected, found = gradients(plain), gradients(quantised)
    for name in expected:
        if expected[name].dim() == 2 and expected[name].any():
            cosine = torch.cosine_similarity(found[name].flatten().double(), expected[name].flatten().double(), dim=0)
            assert cosine > 0.8, name


def test_main_parameters_stay_float32(engine_for: EngineFor, samples, weighted_loss) -> None:
    """Steps too small for bfloat16 must add up in the optimizer, and what the rollout gets comes from there."""
    engine = engine_for(dtype="bfloat16", mxfp8=Mxfp8Settings())
    mains = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert {main.dtype for main in mains} == {torch.float32}
    before = [main.clone() for main in mains]
    engine.forward_backward(samples, weighted_loss, replay=False)
    assert engine.optimizer_step()["grad_norm"] > 0
    assert any(not torch.equal(old, new) for old, new in zip(before, mains, strict=True))


def test_recomputed_activations_give_the_same_gradients(
    engine_for: EngineFor, samples, weighted_loss, gradients
) -> None:
    kept, recomputed = engine_for(mxfp8=Mxfp8Settings()), engine_for(mxfp8=Mxfp8Settings(), recompute="full")
    for engine in (kept, recomputed):
        engine.forward_backward(samples, weighted_loss, replay=False)
    found = gradients(recomputed)
    for name, gradient in gradients(kept).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_micro_batch_split_does_not_change_the_loss(engine_for: EngineFor, samples) -> None:
    """Forward blocks lie inside a token. (Gradients of weights have blocks of 32 tokens, so theirs round elsewhere.)"""
    whole = engine_for(mxfp8=Mxfp8Settings()).forward_logprobs(samples, replay=False)
    split = engine_for(mxfp8=Mxfp8Settings(), micro_batch_tokens=45).forward_logprobs(samples, replay=False)
    gaps = torch.cat([(a - b).abs() for a, b in zip(whole, split, strict=True)])
    assert gaps.mean() < 2e-3, "more than float32 noise, now and then at a rounding boundary"


def test_a_model_that_mxfp8_does_not_suit_is_refused_before_it_is_built(golden) -> None:
    config = load_config(golden("tiny"))
    config.moe_intermediate_size = 48
    with pytest.raises(BadInput, match="moe_intermediate_size is 48"):
        TrainerEngine(EngineConfig(mxfp8=Mxfp8Settings())).build(config)


def test_the_rollouts_weights_are_half_the_bytes_of_bfloat16(engine_for: EngineFor) -> None:
    engine = engine_for(dtype="bfloat16", mxfp8=Mxfp8Settings())
    exported, sent = dict(engine.export()), dict(engine.rollout_weights())
    settings = engine.config.mxfp8
    assert settings is not None
    quantised = [name for name in exported if settings.covers(name)]
    assert sent.keys() == exported.keys() | {name + mxfp8.SCALE_SUFFIX for name in quantised}
    wire = sum(sent[n].nbytes + sent[n + mxfp8.SCALE_SUFFIX].nbytes for n in quantised)
    assert wire / sum(exported[n].nbytes for n in quantised) == pytest.approx(33 / 64)
    for name, tensor in exported.items():
        if name in quantised:
            values = mxfp8.dequantize(sent[name], sent[name + mxfp8.SCALE_SUFFIX], torch.bfloat16)
            assert torch.equal(values, mxfp8.round_trip(tensor, "rceil")), name
        else:
            assert torch.equal(sent[name], tensor), name


WEIGHTS = Mxfp8Settings(activations=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_weights_only_the_plain_model_with_the_rollouts_weights_is_the_same_bit_for_bit(
    dtype: str, engine_for: EngineFor, samples, tmp_path
) -> None:
    """The rollout is such a model: it gets a checkpoint's tensors, in a checkpoint's types."""
    engine = engine_for(dtype=dtype, mxfp8=WEIGHTS)
    found = engine.forward_logprobs(samples, replay=False)
    exported = {name: tensor.dtype for name, tensor in engine.export()}
    assert {name: tensor.dtype for name, tensor in engine.rollout_weights()} == exported
    save_hf(tmp_path / "served", engine.hf, engine.rollout_weights())
    plain = engine_for(dtype=dtype)
    unrounded = plain.forward_logprobs(samples, replay=False)
    plain.load_hf(tmp_path / "served")
    for ours, theirs, other in zip(found, plain.forward_logprobs(samples, replay=False), unrounded, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, other)


def test_with_weights_only_gradients_are_those_of_the_rounded_model(
    engine_for: EngineFor, samples, with_routes, weighted_loss, gradients, tmp_path
) -> None:
    """They pass through the rounding to the weights as they are, which the optimizer changes."""
    engine, plain = engine_for(mxfp8=WEIGHTS), engine_for()
    before = {name: tensor.clone() for name, tensor in engine.export()}
    save_hf(tmp_path / "served", engine.hf, engine.rollout_weights())
    plain.load_hf(tmp_path / "served")
    samples = with_routes(plain, samples)
    for each in (engine, plain):
        each.forward_backward(samples, weighted_loss)
    found = gradients(engine)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.export())
    assert engine.optimizer_step()["grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.export())


@pytest.mark.parametrize("activations", [True, False])
def test_a_checkpoint_holds_the_policy(activations: bool, engine_for: Any) -> None:
    """With weights only the policy is a plain model of rounded weights; else it is none without the arithmetic."""
    engine = engine_for(mxfp8=Mxfp8Settings(activations=activations))
    whole, saved = dict(engine.export()), dict(engine.policy_weights())
    assert whole.keys() == saved.keys()
    covered = {name for name in whole if Mxfp8Settings().covers(name)}
    assert covered
    for name, tensor in saved.items():
        assert torch.equal(tensor, whole[name]) == (activations or name not in covered), name
    if not activations:
        assert all(torch.equal(saved[name], tensor) for name, tensor in engine.rollout_weights())
