"""What the trainer sends when the rollout takes a layer's experts in one tensor."""

import pytest
import torch

from beam_rl.model import names
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout.direct import per_expert


def listed(tensors):
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]


def test_fused_experts_are_the_experts(engine_for):
    engine = engine_for(dtype="bfloat16")
    sent = dict(engine.rollout_weights(fused_experts=True))
    assert len(sent) < len(dict(engine.rollout_weights()))
    apart, expected = dict(per_expert(sent.items())), dict(engine.rollout_weights())
    assert apart.keys() == expected.keys()
    assert all(torch.equal(tensor, apart[name]) for name, tensor in expected.items())


def test_fused_weights_are_described_as_they_are_sent(engine_for):
    engine = engine_for()
    described = listed(engine.rollout_description(fused_experts=True))
    assert described == listed(engine.rollout_weights(fused_experts=True))


@pytest.mark.parametrize(
    "settings",
    [{"lora": LoraConfig(r=8)}, {"mxfp8": Mxfp8Settings(activations=False)}],
    ids=["lora", "mxfp8 weights"],
)
def test_experts_that_must_be_merged_or_rounded_are_sent_one_by_one(settings, engine_for):
    engine = engine_for(**settings | {"dtype": "bfloat16"})
    assert listed(engine.rollout_weights(fused_experts=True)) == listed(engine.rollout_weights())
    assert listed(engine.rollout_description(fused_experts=True)) == listed(engine.rollout_description())


def test_experts_that_no_buffer_holds_are_sent_one_by_one(engine_for, monkeypatch):
    engine = engine_for()
    monkeypatch.setattr(names, "FUSED_BYTES", 1024)
    assert listed(engine.rollout_weights(fused_experts=True)) == listed(engine.rollout_weights())
    assert listed(engine.rollout_description(fused_experts=True)) == listed(engine.rollout_description())
