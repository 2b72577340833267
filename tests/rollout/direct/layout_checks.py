"""Weights reach the parameters that vLLM's own Beam has, or the engine is left to vLLM's reload."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beam_rl.model.checkpoint import HFCheckpoint
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
from beam_rl.rollout.receive_gpu import proved_layout

from .beam import CONFIG, HIDDEN, VOCABULARY, WIDTH, blank, engine, fused, native, saved, weights


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
def checkpoint(tmp_path: Path) -> HFCheckpoint:
    return saved(tmp_path)


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
