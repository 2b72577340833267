"""A LoRA engine: what trains, what stays, what is written, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import load_config
from beam_rl.model.errors import BadInput
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.names import pieces
from beam_rl.model.tensors import initial_tensors
from beam_rl.trainer.engine import OptimizerSettings, TrainerEngine

LORA = LoraConfig(r=32, lora_alpha=64)
SETTINGS = OptimizerSettings(lr=1e-2)


def supervised(logprobs, fields, loss_mask, entropy):
    return -logprobs.sum() / 100, {}


def steps(engine: TrainerEngine, samples: list[Any], count: int) -> list[list[str]]:
    taken = []
    for _ in range(count):
        loss = engine.forward_backward(samples, supervised, replay=False)["loss"]
        taken.append([loss.hex(), engine.optimizer_step()["grad_norm"].hex()])
    return taken


def exported(engine: TrainerEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export()}


def randomise(engine: TrainerEngine, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in engine.models[0].named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_train_and_every_step_shows_in_the_export(
    dtype: str, engine_for: Callable, samples: list
) -> None:
    """Rollouts get the export: an adapter that trains beside weights that they never see learns nothing."""
    engine = engine_for(dtype=dtype, optimizer=SETTINGS, lora=LORA)
    base = {piece.name: piece.view.clone() for piece in pieces(engine.models[0])}
    before = exported(engine)
    losses = [float.fromhex(loss) for loss, _ in steps(engine, samples, 1)]
    after = exported(engine)
    targets = [name for name in before if name.endswith("_proj.weight")]
    assert [name for name in before if not torch.equal(before[name], after[name])] == targets
    losses += [float.fromhex(loss) for loss, _ in steps(engine, samples, 4)]
    assert losses[-1] < 0.8 * losses[0]
    for piece in pieces(engine.models[0]):
        assert torch.equal(piece.view, base[piece.name]), piece.name
    held = [part for optimizer in engine.optimizer.chained_optimizers for part in optimizer.get_parameters()]
    adapters = sum(p.numel() for p in engine.models[0].parameters() if p.requires_grad)
    assert sum(part.numel() for part in held) == adapters == sum(t.numel() for _, t in engine.export_adapter())


def test_recomputed_layers_give_the_same_gradients_with_dropout_too(engine_for: Callable, samples: list) -> None:
    """Recomputation draws the same elements again, and reaches the first layer though the embedding is frozen."""
    results = []
    for recompute in (None, "full"):
        engine = engine_for(optimizer=SETTINGS, recompute=recompute, lora=LoraConfig(lora_dropout=0.3))
        randomise(engine)
        engine.forward_backward(samples, supervised, replay=False)
        named = engine.models[0].named_parameters()
        results.append({name: p.main_grad.clone() for name, p in named if p.requires_grad})
    for name, grad in results[0].items():
        assert grad.any(), name
        torch.testing.assert_close(results[1][name], grad, msg=lambda text, name=name: f"{name}: {text}")


def test_dropout_leaves_scores_alone(engine_for: Callable, samples: list) -> None:
    scores = []
    for drop in (0.0, 0.5):
        engine = engine_for(optimizer=SETTINGS, lora=LoraConfig(lora_dropout=drop))
        randomise(engine)
        scores.append(engine.forward_logprobs(samples, replay=False))
    assert all(torch.equal(first, second) for first, second in zip(*scores, strict=True))


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(lora_dropout=0.1),
        LoraConfig(target_modules=("experts.down_proj",)),  # Megatron's optimizer of the others is a stub
        LoraConfig(target_modules=("q_proj",)),
    ],
    ids=["all", "experts", "q_proj"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    lora: LoraConfig, engine_for: Callable, samples: list, tmp_path: Path
) -> None:
    engine = engine_for(optimizer=SETTINGS, lora=lora)
    steps(engine, samples, 2)
    engine.save(tmp_path / "step_2", {"note": "two"})
    expected, weights = steps(engine, samples, 3), exported(engine)
    other = engine_for(optimizer=SETTINGS, lora=lora, seed=9)
    assert other.load(tmp_path / "step_2") == {"note": "two"}
    assert steps(other, samples, 3) == expected
    for name, tensor in other.export():
        assert torch.equal(tensor, weights[name]), name


def test_a_checkpoint_does_not_hold_the_frozen_weights(engine_for: Callable, samples: list, tmp_path: Path) -> None:
    engine = engine_for(optimizer=SETTINGS, lora=LoraConfig(target_modules=("q_proj",)))
    steps(engine, samples, 1)
    engine.save(tmp_path / "step_1", {})
    held = dist_checkpointing.load_tensors_metadata(str(tmp_path / "step_1"))
    kept = {name.rpartition("model.layers.")[0] for name in held}
    assert kept == {"", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.param."}
    assert all(".q_proj.lora_" in name for name in held)


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        (LoraConfig(r=16), r"lora\.r "),
        (LoraConfig(lora_alpha=16), r"lora\.lora_alpha"),
        (LoraConfig(lora_dropout=0.1), r"lora\.lora_dropout"),
        (LoraConfig(target_modules=("q_proj",)), r"lora\.projections"),
        (None, r"lora\."),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_by_name(
    lora: LoraConfig | None, named: str, engine_for: Callable, tmp_path: Path
) -> None:
    engine_for(optimizer=SETTINGS, lora=LoraConfig()).save(tmp_path / "step_0", {})
    with pytest.raises(BadInput, match=named):
        engine_for(optimizer=SETTINGS, lora=lora).load(tmp_path / "step_0")


def test_a_checkpoint_on_another_base_is_refused(engine_for: Callable, golden: Callable, tmp_path: Path) -> None:
    engine = engine_for(optimizer=SETTINGS, lora=LoraConfig())
    engine.save(tmp_path / "step_0", {})
    config = load_config(golden("tiny"))
    save_hf(tmp_path / "other", config, initial_tensors(config, seed=3, dtype=torch.float32))
    engine.load_hf(tmp_path / "other")
    with pytest.raises(BadInput, match=r"lora\.base"):
        engine.load(tmp_path / "step_0")


def test_an_adapter_folder_comes_back_as_it_was(engine_for: Callable, samples: list, tmp_path: Path) -> None:
    engine = engine_for(optimizer=SETTINGS, lora=LoraConfig())
    steps(engine, samples, 2)
    engine.save_adapter(tmp_path / "adapter", base="somewhere")
    engine.save_adapter(tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    other = engine_for(optimizer=SETTINGS, lora=LoraConfig(), seed=5)
    other.load_adapter(tmp_path / "adapter")
    values = dict(engine.export_adapter())
    for name, tensor in other.export_adapter():
        assert torch.equal(tensor, values[name]), name
    steps(other, samples, 1)  # the optimizer's main parameters are the loaded ones
    moved = dict(other.export_adapter())
    assert max((moved[name] - values[name]).abs().max().item() for name in values) < 2 * SETTINGS.lr


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        (LoraConfig(r=16, lora_alpha=16), r"has r = 8, this run has lora\.r = 16"),
        (LoraConfig(lora_alpha=16), r"has lora_alpha = 8, this run has lora\.lora_alpha = 16"),
        (LoraConfig(use_rslora=True), "has use_rslora = False"),
        (LoraConfig(target_modules=("q_proj",)), r"target_modules.*unexpected: base_model\.model\.model"),
        (LoraConfig(target_modules=("gate_proj", "experts.down_proj")), r"target_modules.*missing"),
    ],
)
def test_an_adapter_made_with_other_settings_is_refused_by_name(
    lora: LoraConfig, named: str, engine_for: Callable, tmp_path: Path
) -> None:
    some = ("q_proj", "mlp.up_proj", "experts.down_proj")
    engine_for(optimizer=None, lora=LoraConfig(target_modules=some)).save_adapter(tmp_path / "adapter")
    with pytest.raises(BadInput, match=named):
        engine_for(optimizer=None, lora=lora).load_adapter(tmp_path / "adapter")


def test_an_adapter_that_is_damaged_is_refused_by_name(engine_for: Callable, tmp_path: Path) -> None:
    engine = engine_for(optimizer=None, lora=LoraConfig(target_modules=("k_proj",)))
    folder = tmp_path / "adapter"
    with pytest.raises(BadInput, match=r"adapter_config\.json"):
        engine.load_adapter(folder)
    engine.save_adapter(folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, weights)
    with pytest.raises(BadInput, match=r"1 wrongly shaped: base_model.*layers\.0\.self_attn\.k_proj\.lora_A"):
        engine.load_adapter(folder)
    weights.write_bytes(b"no tensors")
    with pytest.raises(BadInput, match=r"adapter_model\.safetensors: not a readable"):
        engine.load_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(BadInput, match=r"adapter_config\.json: no readable"):
        engine.load_adapter(folder)


def test_an_adapter_that_cannot_be_written_leaves_the_older_one(
    engine_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(optimizer=None, lora=LoraConfig())
    engine.save_adapter(tmp_path / "adapter")
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    randomise(engine)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("beam_rl.trainer.adapter.save_file", full)
    with pytest.raises(OSError, match="no space"):
        engine.save_adapter(tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    after = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8


def test_settings_that_do_not_fit_the_model_die_before_anything_is_built(engine_for: Callable) -> None:
    with pytest.raises(BadInput, match=r"lora\.r is 12"):
        engine_for(lora=LoraConfig(r=12))
