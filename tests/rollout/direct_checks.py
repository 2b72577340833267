"""Weights reach the parameters that vLLM's own Beam has, or the engine is left to vLLM's reload."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beam_rl.model.checkpoint import HFCheckpoint, save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.lora import adapter_parameters
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.model.tensors import hf_tensors
from beam_rl.rollout import nccl, receive_gpu
from beam_rl.rollout.direct import (
    Layout,
    Unmapped,
    Writer,
    check_engine,
    difference,
    layout,
    per_expert,
    sampled,
)
from beam_rl.rollout.receive_gpu import TRUST_KEY, IPCReceiver, NCCLReceiver, proved_layout

VOCABULARY, HIDDEN, EXPERTS, WIDTH, PADDED = 20, 64, 4, 32, 64
CONFIG = BeamConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=8,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"],
    moe_intermediate_size=WIDTH,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    architectures=["BeamForCausalLM"],
    dtype="bfloat16",
)


def weights(seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors, all different."""
    generator = torch.Generator().manual_seed(seed)
    router = (".mlp.gate.weight", ".e_score_correction_bias")
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name.endswith(router) else torch.bfloat16)
        for name, shape in hf_tensors(CONFIG).items()
    }


def native(tensors: dict[str, Tensor], *, merged: bool = True) -> dict[str, Tensor]:
    """Parameters as vLLM's loaders fill them, put together here by what its model's forward pass reads."""
    parameters = dict(tensors)

    def join(name: str, *parts: str) -> None:
        parameters[name] = torch.cat([parameters.pop(part) for part in parts])

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        parameters[name] = torch.cat([parameters[name], parameters[name].new_zeros(PADDED - VOCABULARY, HIDDEN)])
    for index, kind in enumerate(CONFIG.mlp_layer_types or ()):
        block, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        qkv = [f"{block}{part}_proj.weight" for part in ("q", "k", "v")]
        if merged:
            join(f"{block}qkv_gate_proj.weight", *qkv, f"{block}gate_proj.weight")
        else:
            join(f"{block}qkv_proj.weight", *qkv)
            join(f"{block}output_gate_proj.weight", f"{block}gate_proj.weight")
        if kind == "dense":
            join(f"{mlp}gate_up_proj.weight", f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
            continue
        names = [[f"{mlp}experts.{e}.{part}_proj.weight" for part in ("gate", "up", "down")] for e in range(EXPERTS)]
        apart = [[parameters.pop(name) for name in expert] for expert in names]
        routed = f"{mlp}experts.routed_experts."
        parameters[f"{routed}w13_weight"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in apart])
        parameters[f"{routed}w2_weight"] = torch.stack([down for *_, down in apart])
    return parameters


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint with every layer's experts in two tensors."""
    joined = native(tensors)
    experts = {name: tensor for name, tensor in joined.items() if ".routed_experts." in name}
    names = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, tensor in experts.items():
        prefix, parameter = name.split("routed_experts.")
        others[prefix + names[parameter]] = tensor
    return others


def blank(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Memory that was taken away and given back: it holds anything."""
    return {name: torch.full_like(tensor, 7) for name, tensor in parameters.items()}


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("form", [dict, fused], ids=["per expert", "fused"])
def test_every_parameter_is_what_vllms_loaders_make_of_the_checkpoint(form: Any, merged: bool) -> None:
    expected = native(weights(), merged=merged)
    parameters = blank(expected)
    writer = Writer(layout(parameters, CONFIG))
    writer.begin()
    tensors = list(form(weights()).items())
    for part in (tensors[::2], tensors[1::2]):  # in chunks, in any order
        writer.load_weights(part)
    writer.finish()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())


def test_values_are_converted_to_the_parameters_type() -> None:
    parameters = blank(native(weights()))
    writer = Writer(layout(parameters, CONFIG))
    writer.load_weights((name, tensor.double()) for name, tensor in weights().items())
    assert torch.equal(parameters["model.norm.weight"], weights()["model.norm.weight"])


@pytest.mark.parametrize("form", [dict, fused], ids=["per expert", "fused"])
def test_tensors_that_did_not_come_are_named(form: Any) -> None:
    writer = Writer(layout(blank(native(weights())), CONFIG))
    writer.begin()
    writer.load_weights(form(weights()).items())
    writer.finish()
    writer.begin()
    some = [item for item in form(weights()).items() if not item[0].startswith("model.layers.3.mlp.experts.")]
    writer.load_weights(some)
    with pytest.raises(RuntimeError, match=r"old values of model\.layers\.3\.mlp\.experts\.0\.down.* and 7 more"):
        writer.finish()


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.9.self_attn.q_proj.weight", (4,)), ("model.norm.weight", (HIDDEN, HIDDEN))]
)
def test_unknown_and_wrongly_shaped_tensors_change_nothing(name: str, shape: tuple[int, ...]) -> None:
    parameters = blank(native(weights()))
    writer = Writer(layout(parameters, CONFIG))
    writer.begin()
    with pytest.raises(ValueError, match=name):
        writer.load_weights([("lm_head.weight", weights()["lm_head.weight"]), (name, torch.zeros(shape))])
    assert (parameters["lm_head.weight"][:VOCABULARY] == 7).all()


def test_experts_apart_are_the_checkpoints() -> None:
    apart = dict(per_expert(fused(weights()).items()))
    assert apart.keys() == weights().keys()
    assert all(torch.equal(tensor, apart[name]) for name, tensor in weights().items())


# Proof


@pytest.fixture
def checkpoint(tmp_path: Any) -> HFCheckpoint:
    save_hf(tmp_path / "model", CONFIG, weights().items())
    return HFCheckpoint(tmp_path / "model")


def test_the_proof_compares_every_kind_of_layer() -> None:
    names = list(sampled(CONFIG))
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    assert layers == {0, 1, 2, 4}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(names)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert "model.layers.1.mlp.experts.1.up_proj.weight" not in names


@pytest.mark.parametrize("merged", [True, False])
def test_the_checkpoints_own_engine_passes(checkpoint: HFCheckpoint, merged: bool) -> None:
    assert difference(layout(native(weights(), merged=merged), CONFIG), CONFIG, checkpoint) is None


def exchanged(name: str, parameters: dict[str, Tensor]) -> Layout:
    parameters[name] = parameters[name].roll(parameters[name].shape[-2] // 2, -2)
    return layout(parameters, CONFIG)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.mlp.experts.routed_experts.w13_weight",  # up above gate, as FlashInfer's kernels want it
        "model.layers.0.self_attn.qkv_gate_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "lm_head.weight",
    ],
)
def test_rows_in_another_order_are_found(name: str, checkpoint: HFCheckpoint) -> None:
    assert difference(exchanged(name, native(weights())), CONFIG, checkpoint) is not None


# vLLM's own Beam


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[Path], tuple[Any, nn.Module]]]:
    """Loads a checkpoint as an engine of one process does; gives vLLM's configuration and its model."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        pytest.skip("vLLM's own Beam is for NVIDIA GPUs")
    pytest.importorskip("vllm.models.beam", reason="this vLLM has no Beam of its own")
    from vllm import EngineArgs, distributed
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model

    def run(folder: Path) -> tuple[Any, nn.Module]:
        small: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64}
        config = EngineArgs(str(folder), dtype="bfloat16", moe_backend="triton", **small).create_engine_config()
        with set_current_vllm_config(config):
            distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
            distributed.initialize_model_parallel()
            return config, get_model(vllm_config=config)

    yield run
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("form", [dict, fused], ids=["per expert", "fused"])
def test_vllms_loaders_and_the_writer_fill_its_parameters_alike(
    load: Any, checkpoint: HFCheckpoint, form: Any, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("attention", "model"):  # one GPU alone would always merge them
        monkeypatch.setattr(f"vllm.models.beam.nvidia.{module}.use_merged_qkv_gate", lambda *_: merged)
    vllm_config, target = load(checkpoint.path)

    def parameters() -> dict[str, Tensor]:
        return {name: parameter.detach().cpu() for name, parameter in target.named_parameters()}

    torch.testing.assert_close(parameters(), native(weights(), merged=merged), rtol=0, atol=0)
    writer = Writer(proved_layout(vllm_config, target))
    for parameter in target.parameters():
        parameter.data.fill_(7)
    writer.begin()
    writer.load_weights((name, tensor.to(target.lm_head.weight.device)) for name, tensor in form(weights(1)).items())
    writer.finish()
    torch.testing.assert_close(parameters(), native(weights(1), merged=merged), rtol=0, atol=0)


# Engines that are left to vLLM's reload


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.norm.weight": None}, r"no model\.norm\.weight"),
        ({"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(96, HIDDEN)}, "no room"),
        ({"model.layers.1.mlp.experts.routed_experts.w2_weight": torch.zeros(2, HIDDEN, WIDTH)}, "has 2 experts"),
        ({"model.layers.1.mlp.experts.routed_experts.w13_weight": torch.zeros(4, 80, HIDDEN)}, "16,384 of its 20,480"),
        ({"model.layers.1.extra": torch.zeros(3)}, "0 of its 3 elements"),
    ],
)
def test_parameters_that_are_no_whole_beam_are_refused(change: dict[str, Tensor | None], reason: str) -> None:
    parameters = {name: t for name, t in (native(weights()) | change).items() if t is not None}
    with pytest.raises(Unmapped, match=reason):
        layout(parameters, CONFIG)


def engine(backend: str = "TRITON", quant_config: Any = None, **parallel: Any) -> tuple[Any, nn.Module]:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    settings = SimpleNamespace(**(sizes | {"enable_expert_parallel": False} | parallel))
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.w13_weight = nn.Parameter(torch.zeros(1))
    model.experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))  # type: ignore[assignment]
    return SimpleNamespace(parallel_config=settings, quant_config=quant_config), model


def test_a_whole_plain_engine_is_accepted() -> None:
    check_engine(*engine())
    check_engine(*engine(enable_expert_parallel=True))
    check_engine(*engine(data_parallel_size=2))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "spread"),
        ({"quant_config": object()}, "quantised"),
        ({"backend": "FLASHINFER_TRTLLM"}, "MoE backend FLASHINFER_TRTLLM"),
    ],
)
def test_other_engines_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unmapped, match=reason):
        check_engine(*engine(**change))


# Receivers


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
def test_experts_in_one_tensor_arrive_as_one_by_one(
    precision: dict[str, Any], checkpoint: HFCheckpoint, sent: list[Any]
) -> None:
    from beam_rl.trainer.engine import EngineConfig, TrainerEngine

    trainer = TrainerEngine(EngineConfig(optimizer=None, **precision))
    trainer.build(CONFIG)
    trainer.load_hf(checkpoint.path)
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


def test_the_checkpoint_that_the_engine_has_loaded_is_the_proof(tmp_path: Any) -> None:
    save_hf(tmp_path / "model", CONFIG, weights().items())
    target = model(native(weights()))
    assert proved_layout(settings(path=tmp_path / "model"), target).views.keys() == weights().keys()
    with pytest.raises(Unmapped, match="not where it is thought to be"):
        proved_layout(settings(path=tmp_path / "model"), model(native(weights(1))))
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
