"""A PEFT adapter goes into the weights whole, as the trainer merges it, or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl import tiny
from beam_rl.model.tensors import hf_tensors, initial_tensors
from beam_rl.rollout.swap_adapter import Adapter
from beam_rl.rollout.swap_store import Unfit

CONFIG = tiny.architecture("float32")
BASE = dict(initial_tensors(CONFIG, 1, torch.float32))
PREFIX = "base_model.model."


def pair(shape: tuple[int, ...], r: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(r, shape[1], generator=generator), torch.randn(shape[0], r, generator=generator)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes an adapter's folder from its tensors and settings."""

    def to_folder(tensors: dict[str, Tensor], **settings: Any) -> Path:
        content = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | settings
        (tmp_path / "adapter_config.json").write_text(json.dumps(content))
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
        return tmp_path

    return to_folder


def merged(folder: Path) -> dict[str, Tensor]:
    return dict(Adapter(folder, CONFIG).merged(BASE.__getitem__))


def changed(found: dict[str, Tensor]) -> set[str]:
    assert list(found) == list(hf_tensors(CONFIG))
    return {name for name, tensor in found.items() if not torch.equal(tensor, BASE[name])}


def test_attention_and_dense_adapters_are_added_in_their_scale(write: Callable[..., Path]) -> None:
    names = ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"]
    pairs = {name: pair(BASE[f"{name}.weight"].shape, 4, seed) for seed, name in enumerate(names)}
    tensors = {f"{PREFIX}{n}.lora_{m}.weight": p[i] for n, p in pairs.items() for i, m in enumerate("AB")}
    for settings, scale in (
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 4, "down_proj": 4}}, 1.0),
    ):
        found = merged(write(tensors, **settings))
        assert changed(found) == {f"{name}.weight" for name in names}
        for name, (a, b) in pairs.items():
            torch.testing.assert_close(found[f"{name}.weight"], BASE[f"{name}.weight"] + scale * b @ a)


def test_adapters_of_experts_reach_every_expert(write: Callable[..., Path]) -> None:
    """Each expert's product, from PEFT's stacked rows of A and interleaved columns of B."""
    block, experts, r = "model.layers.2.mlp.experts", CONFIG.num_experts, 4
    hidden, width = CONFIG.hidden_size, CONFIG.moe_intermediate_size
    up = [pair((2 * width, hidden), r, e) for e in range(experts)]
    down = [pair((hidden, width), r, 100 + e) for e in range(experts)]
    tensors = {}
    for name, pairs in ((f"{PREFIX}{block}.base_layer", up), (f"{PREFIX}{block}", down)):
        tensors[f"{name}.lora_A.weight"] = torch.cat([a for a, _ in pairs])
        tensors[f"{name}.lora_B.weight"] = torch.stack([b for _, b in pairs], dim=2).flatten(1)
    found = merged(write(tensors))
    assert len(changed(found)) == 3 * experts
    for e in range(experts):
        gate_up = 2.0 * up[e][1] @ up[e][0]
        deltas = {"gate": gate_up[:width], "up": gate_up[width:], "down": 2.0 * down[e][1] @ down[e][0]}
        for projection, delta in deltas.items():
            name = f"{block}.{e}.{projection}_proj.weight"
            torch.testing.assert_close(found[name], BASE[name] + delta, rtol=1e-5, atol=1e-5)


def test_half_an_adapter_and_foreign_parts_are_refused(write: Callable[..., Path]) -> None:
    module = f"{PREFIX}model.layers.1.self_attn.q_proj"
    a, b = pair(BASE["model.layers.1.self_attn.q_proj.weight"].shape, 4, 0)
    good = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    block = f"{PREFIX}model.layers.2.mlp.experts"
    expert_a, expert_b = torch.zeros(4 * CONFIG.num_experts, CONFIG.hidden_size), torch.zeros(CONFIG.hidden_size, 4)
    cases: list[tuple[str, dict[str, Tensor], dict[str, Any]]] = [
        ("half of a pair", {f"{module}.lora_A.weight": a}, {}),
        ("half of a pair", good | {f"{PREFIX}lm_head.modules_to_save.weight": b}, {}),
        ("no such part", good | {f"{block}.lora_A.weight": expert_a, f"{block}.lora_B.weight": expert_b}, {}),
        ("no such part", {name.replace("q_proj", "x_proj"): tensor for name, tensor in good.items()}, {}),
        ("do not fit", {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b[:-1]}, {}),
        ("not finite", {f"{module}.lora_A.weight": a / 0, f"{module}.lora_B.weight": b}, {}),
        ("rank 4 in the file, 8", good, {"r": 8}),
        ("use_dora", good, {"use_dora": True}),
        ("bias", good, {"bias": "all"}),
        ("only LoRA", good, {"peft_type": "IA3"}),
    ]
    for why, tensors, settings in cases:
        with pytest.raises(Unfit, match=why):
            Adapter(write(tensors, **settings), CONFIG)


def test_the_sum_is_the_trainers_own(tmp_path: Path) -> None:
    """The trainer's merged export and its PEFT files agree, experts included."""
    from beam_rl.model.checkpoint import save_hf
    from beam_rl.model.lora_config import LoraConfig
    from beam_rl.trainer.engine import EngineConfig, TrainerEngine

    save_hf(tmp_path / "base", CONFIG, BASE.items())
    engine = TrainerEngine(EngineConfig(dtype="float32", optimizer=None, lora=LoraConfig(r=8)))
    engine.build(CONFIG)
    engine.load_hf(tmp_path / "base")
    generator = torch.Generator().manual_seed(3)
    for name, parameter in engine.models[0].named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    engine.save_adapter(tmp_path / "adapter")
    expected = dict(engine.export())
    base = load_file(tmp_path / "base" / "model.safetensors")
    found = dict(Adapter(tmp_path / "adapter", CONFIG).merged(base.__getitem__))
    assert len(changed(found)) > 100, "attention, dense layers and experts were to have adapters"
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
