"""Memory lent to the rollout and taken back: training goes on bit for bit, and memory really was free meanwhile."""

import itertools

import pytest
import torch

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.trainer import offload
from beam_rl.trainer.offload import Parking
from beam_rl.trainer.optimizer import tensors


def supervised(logprobs, *_):
    return -logprobs.sum() / 100, {}


def trained(engine, samples, lend):
    for _ in range(3):
        engine.forward_backward(samples, supervised, replay=False)
        engine.optimizer_step()
        lend(engine)
    return {name: tensor.clone() for name, tensor in engine.export()}


def lend_everything(engine):
    engine.offload()
    assert held(engine) == 0
    engine.backload()


def held(engine):
    """Bytes of weights, gradients and optimizer state."""
    buffers = (
        buffer.grad_data for chunk in engine.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )
    everything = itertools.chain((p for m in engine.models for p in m.parameters()), tensors(engine.optimizer), buffers)
    return sum(tensor.untyped_storage().nbytes() for tensor in everything)


def lend_in_turns(engine):
    """As a weight transfer does: the optimizer leaves first, and the model must still be able to send."""
    engine.offload(model=False)
    kept = {name: tensor.clone() for name, tensor in engine.export()}
    engine.offload(optimizer=False)
    engine.backload(optimizer=False)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in engine.export())
    engine.backload(model=False)


@pytest.mark.parametrize("lend", [lend_everything, lend_in_turns])
@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "lora": LoraConfig(r=8)}],
    ids=["bfloat16", "float32", "lora"],
)
def test_training_goes_on_as_if_nothing_had_been_lent(lend, settings, engine_for, samples):
    """With Megatron's own offload the router, whose parameter is its own main parameter, stops learning."""
    undisturbed = trained(engine_for(**settings), samples, lambda engine: None)
    disturbed = trained(engine_for(**settings), samples, lend)
    start = {name: tensor.clone() for name, tensor in engine_for(**settings).export()}
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in disturbed.items())
    routers = [name for name in start if name.endswith("mlp.gate.weight")]
    if "lora" not in settings:
        assert routers
        assert not any(torch.equal(disturbed[name], start[name]) for name in routers)


def test_gradients_that_nobody_applied_are_forgotten(engine_for, samples):
    engine = engine_for()
    once = engine.forward_backward(samples, supervised, replay=False)
    engine.offload()
    engine.backload()
    gradients = {}
    assert engine.forward_backward(samples, supervised, replay=False) == once  # refused where one is left
    for name, parameter in engine.models[0].named_parameters():
        gradients[name] = parameter.main_grad.clone()
    fresh = engine_for()
    fresh.forward_backward(samples, supervised, replay=False)
    for name, parameter in fresh.models[0].named_parameters():
        assert torch.equal(gradients[name], parameter.main_grad), name


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"mxfp8": Mxfp8Settings()}, {"mxfp8": Mxfp8Settings(activations=False)}],
    ids=["bfloat16", "mxfp8", "mxfp8 weights"],
)
def test_weights_are_described_as_they_are_sent_while_they_are_lent(settings, engine_for):
    """The rollout asks for the description when the trainer has just made room for it."""
    engine = engine_for(**settings | {"dtype": "bfloat16"})
    engine.offload()
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in engine.rollout_description()]
    engine.backload()
    assert described == [(name, tensor.shape, tensor.dtype) for name, tensor in engine.rollout_weights()]


def test_views_stay_views_and_empty_memory_is_left_alone():
    whole = torch.arange(8.0)
    part, nothing = whole[2:4], torch.empty(0)
    parking = Parking()
    for _ in range(2):
        parking.park([whole, part, nothing])
        assert whole.untyped_storage().nbytes() == 0
        parking.park([part])  # parked already
        parking.unpark()
    part += 1
    assert whole.tolist() == [0, 1, 3, 4, 4, 5, 6, 7]


def test_frozen_memory_is_copied_to_the_host_once(monkeypatch):
    """LoRA's base is nearly all of a model: it must not be copied in every step."""
    copied = []
    contents = offload._bytes
    monkeypatch.setattr(offload, "_bytes", lambda storage: copied.append(storage) or contents(storage))
    weight = torch.arange(8.0)
    parking = Parking(frozen=True)
    for _ in range(3):
        parking.park([weight])
        assert weight.untyped_storage().nbytes() == 0
        parking.unpark()
        assert weight.tolist() == list(range(8))
    assert len(copied) == 1 + 3  # out once, back every time


def doubled(engine_for, folder):
    engine = engine_for()
    save_hf(folder, engine.hf, ((name, tensor * 2) for name, tensor in engine.export()))
    return {"lora": LoraConfig(r=8)}, lambda engine: engine.load_hf(folder)


def checkpoint(engine_for, folder):
    engine = engine_for(optimizer=None)
    for parameter in engine.models[0].parameters():
        parameter.data *= 2
    engine.save(folder, {})
    return {"optimizer": None}, lambda engine: engine.load(folder)


def adapters(engine_for, folder):
    engine = engine_for(lora=LoraConfig(r=8))
    for parameter in engine.models[0].parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    engine.save_adapter(folder)
    return {"lora": LoraConfig(r=8), "optimizer": None}, lambda engine: engine.load_adapter(folder)


@pytest.mark.parametrize("made", [doubled, checkpoint, adapters])
def test_frozen_weights_that_were_replaced_stay_replaced(made, engine_for, tmp_path):
    """What needs no gradient is copied to the host once, unless somebody says that it has changed."""
    settings, replace = made(engine_for, tmp_path / "other")
    engine = engine_for(**settings)
    before = {name: tensor.clone() for name, tensor in engine.export()}
    engine.offload()
    engine.backload()
    replace(engine)
    after = {name: tensor.clone() for name, tensor in engine.export()}
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    engine.offload()
    engine.backload()
    assert all(torch.equal(tensor, after[name]) for name, tensor in engine.export())
