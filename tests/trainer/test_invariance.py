"""Token-mean invariance: loss and gradients depend on the samples, not on how they are split, packed or padded.

The kind of fault: verl#5625, verl#5641, prime-rl#583, areal#1546.
"""

from functools import partial

import pytest
import torch

from beam_rl.trainer import distributed
from beam_rl.trainer import engine as engine_module
from beam_rl.trainer.engine import Sequence


@pytest.fixture
def whole(engine_for, samples, weighted_loss, gradients):
    """Metrics and gradients of all samples in one micro batch."""
    engine = engine_for()
    return engine.forward_backward(samples, weighted_loss, replay=False), gradients(engine)


def assert_same(engine, metrics, gradients, whole):
    assert metrics == pytest.approx(whole[0], rel=1e-5)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, whole[1][name], rtol=2e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("budget", [1, 45, 80])
def test_micro_batch_split_changes_nothing(budget, engine_for, samples, weighted_loss, gradients, whole):
    engine = engine_for(micro_batch_tokens=budget)
    assert_same(engine, engine.forward_backward(samples, weighted_loss, replay=False), gradients, whole)


def test_order_of_samples_changes_nothing(engine_for, samples, weighted_loss, gradients, whole):
    engine = engine_for(micro_batch_tokens=60)
    assert_same(engine, engine.forward_backward(samples[::-1], weighted_loss, replay=False), gradients, whole)


@pytest.mark.parametrize("replay", [False, True])
def test_padding_and_empty_micro_batches_change_nothing(
    replay, engine_for, samples, with_routes, weighted_loss, gradients, whole, monkeypatch
):
    """Tensor parallelism pads the tokens, and ranks that share experts run empty micro batches to keep in step."""
    engine = engine_for(micro_batch_tokens=80)
    samples = with_routes(engine, samples) if replay else samples
    monkeypatch.setattr(engine_module, "pack", partial(_padded, engine_module.pack))
    monkeypatch.setattr(distributed, "shared_count", lambda count: count + 2)
    assert_same(engine, engine.forward_backward(samples, weighted_loss, replay=replay), gradients, whole)


def _padded(pack, *args, tp, **kwargs):
    batch = pack(*args, tp=32, **kwargs)
    assert batch.total % 32 == 0
    return batch


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [1, 45, 80])
def test_the_workers_dual_clip_loss_is_a_mean_over_the_whole_batch(
    budget, padded, ranks, engine_for, samples, monkeypatch
):
    """Over two replicas, too: see `test_layouts.py`."""
    generator = torch.Generator().manual_seed(1)
    engine = engine_for()
    for sample, logprobs in zip(samples, engine.forward_logprobs(samples, replay=False), strict=True):
        noise = [torch.randn(len(logprobs), generator=generator) for _ in range(3)]
        sample.fields = {
            "old_logprobs": logprobs + noise[0],
            "base_logprobs": logprobs + 0.1 * noise[1],
            "rollout_logprobs": logprobs + noise[0],
            "advantages": noise[2],
        }
    metrics, gradients = ranks.dual_clip(engine, samples, replay=False)
    assert 0 < metrics["clipped"] < sum(int((s.loss_mask > 0).sum()) for s in samples)
    if padded:
        monkeypatch.setattr(engine_module, "pack", partial(_padded, engine_module.pack))
        monkeypatch.setattr(distributed, "shared_count", lambda count: count + 2)
    found = ranks.dual_clip(engine_for(micro_batch_tokens=budget), samples, replay=False)
    assert found[0] == pytest.approx(metrics, rel=1e-5)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, gradients[name], rtol=2e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_sample_scores_the_same_alone_and_in_company(engine_for, samples):
    together = engine_for().forward_logprobs(samples, replay=False)
    alone = engine_for(micro_batch_tokens=1).forward_logprobs(samples, replay=False)
    for sample, one, other in zip(samples, together, alone, strict=True):
        assert one.shape == (len(sample.tokens) - 1,)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_masked_scores_are_the_wanted_ones_and_zero(engine_for, samples):
    engine = engine_for()
    everything = engine.forward_logprobs(samples, replay=False)
    wanted = engine.forward_logprobs(samples, replay=False, masked=True)
    for sample, every, some in zip(samples, everything, wanted, strict=True):
        torch.testing.assert_close(some, every * sample.loss_mask, atol=1e-6, rtol=0)


def test_a_batch_without_anything_to_learn_has_gradient_zero(engine_for, samples, weighted_loss, gradients):
    engine = engine_for()
    for sample in samples:
        sample.loss_mask.zero_()
    metrics = engine.forward_backward(samples, weighted_loss, replay=False)
    assert metrics == {"loss": 0.0, "tokens": 0.0, "logprobs": 0.0}
    trained = [gradient for name, gradient in gradients(engine).items() if "correction_bias" not in name]
    assert all(not gradient.any() for gradient in trained)


def test_temperature_divides_the_logits(engine_for, samples, reference):
    """Rollouts at temperature T sample from softmax(logits / T); dividing log-probabilities is another thing."""
    hot = engine_for(temperature=2.0).score(samples, replay=False, entropy=True)
    logits = reference["logits"][0]
    cold = engine_for().score(samples, replay=False, entropy=True)
    assert hot.entropies is not None
    assert cold.entropies is not None
    assert float(hot.entropies[1].mean()) > float(cold.entropies[1].mean())
    expected = torch.distributions.Categorical(logits=logits / 2)
    row = reference["input_ids"][0]
    whole = samples[0].__class__(
        tokens=row, loss_mask=torch.ones(len(row) - 1), fields=dict(weight=torch.ones(len(row) - 1))
    )
    found = engine_for(temperature=2.0).score([whole], replay=False, entropy=True)
    torch.testing.assert_close(found.logprobs[0], expected.log_prob(row.roll(-1))[:-1], atol=2e-5, rtol=0)
    torch.testing.assert_close(found.entropies[0], expected.entropy()[:-1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("field", ["loss_mask", "weight", "names", "short"])
def test_a_sample_whose_tensors_do_not_fit_is_refused_by_number(field, engine_for, samples, weighted_loss):
    sample = samples[3]
    if field == "loss_mask":
        sample.loss_mask = sample.loss_mask[1:]
    elif field == "weight":
        sample.fields["weight"] = torch.ones(len(sample.tokens))
    elif field == "names":
        sample.fields = {}
    else:
        sample.tokens = sample.tokens[:1]
    with pytest.raises(ValueError, match="sample 3"):
        engine_for().forward_backward(samples, weighted_loss, replay=False)


def test_an_engine_builds_after_somebody_ended_the_world(engine_for):
    """A vLLM engine in the same process destroys torch.distributed's groups; Megatron would go on with dead ones."""
    engine_for()
    torch.distributed.destroy_process_group()
    assert engine_for().forward_logprobs([Sequence(torch.arange(3, 8), torch.ones(4))], replay=False)[0].shape == (4,)
