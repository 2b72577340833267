"""Weights that are not what they should be are refused or rolled back; each server stays on one version and serves.

Faults are real: files are broken on disk before they are swapped in.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from beam_rl.model.checkpoint import HFCheckpoint, save_hf
from beam_rl.model.config import load_config
from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import MANIFEST, Origin

Swap = Callable[..., dict[str, Any]]


def _lose_a_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_off(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2_000_000)


def _flip_a_bit(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(3_000_000)
        byte = file.read(1)[0]
        file.seek(3_000_000)
        file.write(bytes([byte ^ 1]))


def _change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _not_a_number(folder: Path) -> None:
    _change_tensors(folder, lambda tensors: tensors["lm_head.weight"].view(-1)[5:6].fill_(float("nan")))
    manifest.write(folder)


def _drop_a_tensor(folder: Path) -> None:
    _change_tensors(folder, lambda tensors: tensors.__delitem__("model.norm.weight"))


def _other_type(folder: Path) -> None:
    config = load_config(folder)
    tensors = {name: tensor.bfloat16() for name, tensor in HFCheckpoint(folder).tensors(config)}
    save_hf(folder, config, tensors.items())


def _other_model(folder: Path) -> None:
    _edit(folder / "config.json", lambda content: content.update(routed_scaling_factor=1.25))


def _other_vocabulary(folder: Path) -> None:
    def swap_two(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]

    _edit(folder / "tokenizer.json", swap_two)


def _damaged_manifest(folder: Path) -> None:
    _edit(folder / MANIFEST, lambda content: next(iter(content["tensors"].values())).update(sha256="0" * 64))


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file vanished": (_lose_a_file, "weights are missing"),
    "a file was cut off": (_cut_off, "not a readable safetensors"),
    "a bit flipped": (_flip_a_bit, "1 changed: "),
    "a value is not finite": (_not_a_number, "not finite in lm_head"),
    "a tensor is missing": (_drop_a_tensor, r"missing: model.norm"),
    "another type": (_other_type, "BF16"),
    "another architecture": (_other_model, "routed_scaling_factor is 1.25"),
    "another vocabulary": (_other_vocabulary, "another vocabulary"),
    "a damaged manifest": (_damaged_manifest, "damaged"),
}


def test_broken_weights_are_refused_before_anything_stops(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None, tmp_path: Path
) -> None:
    for name, (break_it, why) in BROKEN.items():
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(models["B"], folder)
        break_it(folder)
        report = swap(folder, "--no-fingerprint", code=2)
        text = json.dumps(report)
        assert why in text, f"{name}: {text}"
        assert [live.serves(server) for server in servers] == ["A", "A"], name


def test_an_earlier_step_of_the_run_is_taken_on_demand_only(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None, tmp_path: Path
) -> None:
    for step, model in ((4, "A"), (3, "B")):
        shutil.copytree(models[model], tmp_path / str(step))
        manifest.add_origin(tmp_path / str(step), Origin("run", step))
    swap(models["B"])
    swap(tmp_path / "4")
    assert "older than step 4" in json.dumps(swap(tmp_path / "3", code=2))
    assert live.serves(servers[0]) == "step-4"
    swap(tmp_path / "3", "--allow-older")
    swap(models["A"])


def test_a_dry_run_verifies_and_changes_nothing(
    servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None
) -> None:
    report = swap(models["B"], "--dry-run")
    assert [one["outcome"] for one in report["endpoints"]] == ["staged", "staged"]
    assert all(one["after"].startswith("B-") for one in report["endpoints"])


def test_weights_whose_model_scores_otherwise_are_rolled_back_everywhere(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None, tmp_path: Path
) -> None:
    """A fingerprint that is not the model's, as if the weights had been loaded wrongly; 8 streams live through it."""
    folder = tmp_path / "odd"
    shutil.copytree(models["B"], folder)
    _edit(folder / MANIFEST, lambda content: content["fingerprint"]["logprobs"].__setitem__(3, -9.0))
    load = live.Load([server.url for server in servers], in_flight=8)

    async def exchange() -> dict[str, Any]:
        async with load:
            return await asyncio.to_thread(swap, folder, code=1)

    report = asyncio.run(exchange())
    for endpoint in report["endpoints"]:
        assert endpoint["outcome"] == "rolled back"
        assert "scores its prompt" in endpoint["error"]
        assert endpoint["verified"]["max"] <= 2e-5
        assert endpoint["before"] == endpoint["after"]
    assert [answer.error for answer in load.answers if answer.error] == []


def test_a_rollback_brings_the_version_before_verified(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap
) -> None:
    swap(models["B"])
    report = swap("--rollback")
    assert [live.serves(server) for server in servers] == ["A", "A"]
    assert all(endpoint["verified"]["max"] <= 2e-5 for endpoint in report["endpoints"])
