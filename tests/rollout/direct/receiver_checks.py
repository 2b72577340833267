"""What vLLM's transports bring is written where the layout is trusted, and otherwise goes through vLLM's reload."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beam_rl.model.lora import adapter_parameters
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout import nccl, receive_gpu
from beam_rl.rollout.direct import Unmapped
from beam_rl.rollout.receive_gpu import TRUST_KEY, IPCReceiver, NCCLReceiver, proved_layout

from .beam import CONFIG, blank, engine, fused, native, saved, weights


class Model(nn.Module):
    """Parameters under vLLM's names, and a loader that only listens."""

    def __init__(self, parameters: dict[str, Tensor], method: Any) -> None:
        super().__init__()
        self.loaded: list[str] = []
        for name, tensor in parameters.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
            if last == "w13_weight":
                module.quant_method = method

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded += (names := [name for name, _ in weights])
        return set(names)


def settings(load_format: str = "auto", path: Any = None, **additional: Any) -> Any:
    """vLLM's configuration, as far as the receivers read it."""
    found, _ = engine()
    found.model_config = SimpleNamespace(hf_config=CONFIG, model=str(path), dtype=torch.bfloat16)
    found.load_config = SimpleNamespace(load_format=load_format)
    found.additional_config, found.lora_config = additional, None
    return found


def model(parameters: dict[str, Tensor]) -> Model:
    return Model(parameters, engine()[1].experts.quant_method)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the transports: an update brings what it describes."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    steps: list[Any] = []

    def receive(self: Any, info: Any) -> None:
        steps.append(info.names)
        self.model.load_weights(list(info.tensors))

    for transport in (IPCWeightTransferEngine, NCCLWeightTransferEngine):
        monkeypatch.setattr(transport, "receive_weights", receive)
        monkeypatch.setattr(transport, "start_weight_update", lambda self: steps.append("reload begins"))
        monkeypatch.setattr(transport, "finish_weight_update", lambda self: steps.append("reload ends"))
    return steps


def update(form: Callable[[dict[str, Tensor]], dict[str, Tensor]], *, described: bool = True) -> Any:
    tensors = form(weights(1))
    return SimpleNamespace(names=list(tensors) if described else [], tensors=tensors.items())


@pytest.mark.parametrize("receiver", [IPCReceiver, NCCLReceiver])
def test_updates_are_written_where_the_layout_is_trusted(receiver: Any, sent: list[Any]) -> None:
    parameters = blank(native(weights()))
    target = model(parameters)
    receiving = receiver(None, settings("dummy", **{TRUST_KEY: True}), torch.device("cpu"), target)
    receiving.start_weight_update()
    receiving.receive_weights(update(fused))
    receiving.finish_weight_update()
    assert "reload begins" not in sent
    assert "reload ends" not in sent
    assert target.loaded == []
    assert receiving.model is target
    assert all(torch.equal(parameters[name], tensor) for name, tensor in native(weights(1)).items())


@pytest.mark.parametrize(
    "precision",
    [{"lora": LoraConfig(r=8)}, {"mxfp8": Mxfp8Settings(activations=False)}],
    ids=["merged", "rounded"],
)
def test_experts_in_one_tensor_arrive_as_one_by_one(precision: dict[str, Any], tmp_path: Path, sent: list[Any]) -> None:
    from beam_rl.trainer.engine import EngineConfig, TrainerEngine

    trainer = TrainerEngine(EngineConfig(optimizer=None, **precision))
    trainer.build(CONFIG)
    trainer.load_hf(saved(tmp_path).path)
    for parameter in adapter_parameters(trainer.models):
        parameter.data.normal_()
    apart = {name: tensor.cpu().clone() for name, tensor in trainer.rollout_weights()}
    parameters = blank(native(weights()))
    receiving = IPCReceiver(None, settings("dummy", **{TRUST_KEY: True}), torch.device("cpu"), model(parameters))
    tensors = list(trainer.rollout_weights(fused_experts=True))
    receiving.start_weight_update()
    receiving.receive_weights(SimpleNamespace(names=[name for name, _ in tensors], tensors=tensors))
    receiving.finish_weight_update()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in native(apart).items())
    assert not apart.keys() & {name for name in sent[0] if ".experts." in name}


@pytest.mark.parametrize("receiver", [IPCReceiver, NCCLReceiver])
def test_without_proof_vllms_reload_gets_a_checkpoints_names(receiver: Any, sent: list[Any]) -> None:
    target = model(native(weights()))
    receiving = receiver(None, settings("dummy"), torch.device("cpu"), target)
    receiving.start_weight_update()
    receiving.receive_weights(update(fused))
    receiving.finish_weight_update()
    assert (sent[0], sent[-1]) == ("reload begins", "reload ends")
    assert set(target.loaded) == weights().keys()


def test_an_update_that_lacks_tensors_is_an_error(sent: list[Any]) -> None:
    receiving = IPCReceiver(None, settings("dummy", **{TRUST_KEY: True}), torch.device("cpu"), model(native(weights())))
    receiving.start_weight_update()
    with pytest.raises(RuntimeError, match="old values"):
        receiving.finish_weight_update()


def test_a_second_update_over_nccl_is_described_by_the_first(sent: list[Any]) -> None:
    """Under SkyRL's receiver vLLM 0.33 has forgotten it, and waits for nothing while the trainer sends."""
    receiving = NCCLReceiver(None, settings("dummy"), torch.device("cpu"), model(native(weights())))
    first = update(dict)
    receiving.receive_weights(first)
    receiving.receive_weights(update(dict, described=False))
    assert sent == [first.names, first.names]


def test_the_checkpoint_that_the_engine_has_loaded_is_the_proof(tmp_path: Path) -> None:
    path = saved(tmp_path).path
    target = model(native(weights()))
    assert proved_layout(settings(path=path), target).views.keys() == weights().keys()
    with pytest.raises(Unmapped, match="not where it is thought to be"):
        proved_layout(settings(path=path), model(native(weights(1))))
    with pytest.raises(Unmapped, match="no checkpoint to compare"):
        proved_layout(settings(path=tmp_path / "elsewhere"), target)


def test_a_drafters_weights_are_vllms_business(sent: list[Any]) -> None:
    receiving = IPCReceiver(None, settings("dummy", **{TRUST_KEY: True}), torch.device("cpu"), model(native(weights())))
    drafter = model({"model.norm.weight": torch.zeros(4)})
    receiving.set_weight_update_target(drafter, None)
    receiving.start_weight_update()
    receiving.receive_weights(SimpleNamespace(names=["x"], tensors=[("x", torch.zeros(4))]))
    receiving.finish_weight_update()
    assert sent == ["reload begins", ["x"], "reload ends"]
    assert drafter.loaded == ["x"]
    assert receive_gpu.logger.name.startswith("vllm.")


def test_an_nccl_that_vllm_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    """vLLM 0.33 then broadcasts nothing: beside NCCL 2.28 engines ran on what was in their receive buffers."""
    from vllm.distributed.device_communicators.pynccl_wrapper import Function, NCCLLibrary

    nccl.check()
    functions = [*NCCLLibrary.exported_functions, Function("ncclOfTheFuture", None, [])]
    monkeypatch.setattr(NCCLLibrary, "exported_functions", functions)
    monkeypatch.setattr(NCCLLibrary, "path_to_dict_mapping", {})
    receiving = NCCLReceiver(None, settings("dummy"), torch.device("cpu"), model(native(weights())))
    with pytest.raises(RuntimeError, match=r"ncclOfTheFuture.*no weights would arrive"):
        receiving.init_transfer_engine(SimpleNamespace())
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    with pytest.raises(RuntimeError, match="Unset it"):
        nccl.check()
