"""What the trainer sends when the rollout takes a layer's experts in one tensor."""

from collections import deque

import pytest
import torch

from beam_rl.model import names, tensors
from beam_rl.model.lora import adapter_parameters
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout.direct import per_expert


def listed(weights):
    return [(name, tensor.shape, tensor.dtype) for name, tensor in weights]


SETTINGS = {
    "plain": {},
    "lora": {"lora": LoraConfig(r=8)},
    "lora, rank-stabilised": {"lora": LoraConfig(r=24, lora_alpha=7, use_rslora=True)},
    "lora of gates": {"lora": LoraConfig(r=8, lora_alpha=16, target_modules=("mlp.experts.gate_proj", "q_proj"))},
    "lora of downs": {"lora": LoraConfig(r=16, lora_alpha=64, target_modules=("mlp.experts.down_proj",))},
    "lora beside the experts": {"lora": LoraConfig(r=3, target_modules=("self_attn.o_proj",))},
    "mxfp8": {"mxfp8": Mxfp8Settings(activations=False)},
    "mxfp8 rounded down": {"mxfp8": Mxfp8Settings("floor", ("layers.3.mlp.experts",), activations=False)},
    "mxfp8 of gates and ups": {"mxfp8": Mxfp8Settings(exclude=("down_proj",), activations=False)},
}
every_setting = pytest.mark.parametrize("settings", [pytest.param(each, id=name) for name, each in SETTINGS.items()])


@pytest.fixture
def trained(engine_for):
    """Builds engines whose adapters change the weights."""

    def build(**settings):
        engine = engine_for(**{"dtype": "bfloat16", "optimizer": None, **settings})
        for parameter in adapter_parameters(engine.models):
            parameter.data.normal_(0, 0.2)
        return engine

    return build


@every_setting
@pytest.mark.parametrize("room", [1, 13_000], ids=["one at once", "some at once"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_in_one_tensor_are_the_experts_bit_for_bit(settings, room, dtype, trained, monkeypatch):
    monkeypatch.setattr(tensors, "CACHED", room)
    monkeypatch.setattr(tensors, "BUSY", room)
    engine = trained(**settings, dtype=dtype)
    sent, expected = dict(engine.rollout_weights(fused_experts=True)), dict(engine.rollout_weights())
    assert sum(".experts." in name for name in sent) == 2 * len(engine.hf.sparse_layers)
    apart = dict(per_expert(sent.items()))
    assert apart.keys() == expected.keys()
    for name, tensor in expected.items():
        assert apart[name].dtype == tensor.dtype, name
        assert torch.equal(apart[name], tensor), name


@every_setting
def test_fused_weights_are_described_as_they_are_sent(settings, trained):
    engine = trained(**settings)
    described = listed(engine.rollout_description(fused_experts=True))
    assert described == listed(engine.rollout_weights(fused_experts=True))


def test_an_export_leaves_the_frozen_experts_as_they_are(trained):
    engine = trained(**SETTINGS["lora"])
    before = engine.base
    deque(engine.rollout_weights(fused_experts=True), maxlen=0)
    assert names.fingerprint(engine.models) == before


def test_data_and_scales_which_no_engine_has_in_one_tensor_are_sent_one_by_one(engine_for):
    engine = engine_for(dtype="bfloat16", mxfp8=Mxfp8Settings())
    assert listed(engine.rollout_weights(fused_experts=True)) == listed(engine.rollout_weights())
    assert listed(engine.rollout_description(fused_experts=True)) == listed(engine.rollout_description())


def test_experts_that_no_buffer_holds_are_sent_one_by_one(engine_for, monkeypatch):
    engine = engine_for()
    monkeypatch.setattr(names, "FUSED_BYTES", 1024)
    assert listed(engine.rollout_weights(fused_experts=True)) == listed(engine.rollout_weights())
    assert listed(engine.rollout_description(fused_experts=True)) == listed(engine.rollout_description())
