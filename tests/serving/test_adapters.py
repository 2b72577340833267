"""Adapters come, change and go under running requests, with the right log-probs at every point."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import load_config

MODULES = (
    *(f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 2, 5) for name in "qkvo"),
    *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
)
R, ALPHA = 4, 8


def write_adapter(folder: Path, base: Path, seed: int, merged: Path) -> None:
    """A PEFT adapter of attention and dense layers, in place of what was in the folder; and a checkpoint with it."""
    generator = torch.Generator().manual_seed(seed)
    tensors, whole = {}, load_file(base / "model.safetensors")
    for module in MODULES:
        weight = whole[f"{module}.weight"]
        a = 0.1 * torch.randn(R, weight.shape[1], generator=generator)
        b = 0.1 * torch.randn(weight.shape[0], R, generator=generator)
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        whole[f"{module}.weight"] = weight + ALPHA / R * b @ a
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "target_modules": ["q_proj", "k_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    save_hf(merged, load_config(base), whole.items())


def test_adapters_are_exchanged_under_running_requests(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """In, another over it (the same folder, written anew), out; every token fits the weights its span names."""
    adapter = tmp_path / "adapter"
    base = servers[0].status()["version"]
    versions = {base: models["A"]}
    load = live.Load([server.url for server in servers], in_flight=16)

    async def exchange() -> None:
        async with load:
            for seed in (1, 2):
                write_adapter(adapter, models["A"], seed, tmp_path / f"merged{seed}")
                report = await asyncio.to_thread(swap, adapter)
                versions[report["endpoints"][0]["after"]] = tmp_path / f"merged{seed}"
                assert servers[0].status()["base"] == base
            report = await asyncio.to_thread(swap, "--remove-adapter")
            assert [one["after"] for one in report["endpoints"]] == [base, base]

    asyncio.run(exchange())
    assert [answer.error for answer in load.answers if answer.error] == []
    assert {span["version"] for answer in load.answers for span in answer.spans} == set(versions)
    assert len(versions) == 3
    largest, ties = live.distance(load.answers, live.full_forward(versions, load.answers), versions)
    assert largest <= live.TOLERANCE
    assert ties <= len(load.answers) / 10


def test_an_adapter_that_cannot_be_merged_whole_is_refused(
    servers: list[Any], models: dict[str, Path], swap: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Attention could be merged, but a part of the experts' does not fit: nothing is."""
    adapter = tmp_path / "adapter"
    write_adapter(adapter, models["A"], 1, tmp_path / "merged")
    tensors = load_file(adapter / "adapter_model.safetensors")
    block = "base_model.model.model.layers.2.mlp.experts"
    tensors |= {f"{block}.lora_A.weight": torch.zeros(7, 128), f"{block}.lora_B.weight": torch.zeros(64, 7)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    before = servers[0].status()["version"]
    assert "no such part of the model" in json.dumps(swap(adapter, code=2))
    assert servers[0].status()["version"] == before
