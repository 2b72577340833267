"""Checkpoint folders: what is refused, what is written, and that a write is all or nothing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl.model.checkpoint import HFCheckpoint, open_checkpoint, save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.model.names import export_hf, load_hf
from beam_rl.model.tensors import hf_tensors, initial_tensors


@pytest.fixture
def folder(small: BeamConfig, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_hf(path, small, initial_tensors(small, seed=1, dtype=torch.bfloat16), shard_bytes=20_000)
    return path


def test_shards_hold_everything_and_the_index_says_where(small: BeamConfig, folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    found = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == found
    expected = dict(initial_tensors(small, seed=1, dtype=torch.bfloat16))
    assert set(found) == set(expected) == set(hf_tensors(small))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in expected.values())
    config, checkpoint = open_checkpoint(folder)
    assert config.num_experts == small.num_experts
    for name, tensor in checkpoint.tensors(config):
        assert torch.equal(tensor, expected[name])
        assert tensor.dtype == expected[name].dtype


def test_router_stays_float32_in_a_bfloat16_model(small: BeamConfig, folder: Path, build: Callable) -> None:
    """A cast of the whole model must not cost the router its low bits either."""
    checkpoint = HFCheckpoint(folder)
    model = build(small, torch.bfloat16)
    load_hf([model], checkpoint)
    exported = dict(export_hf([model.float().bfloat16()]))
    for name, tensor in checkpoint.tensors(small):
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name
    assert exported["model.layers.1.mlp.gate.weight"].dtype == torch.float32


def test_same_seed_gives_the_same_fresh_weights(small: BeamConfig) -> None:
    first, again, other = (dict(initial_tensors(small, seed, torch.float32)) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_failing_export_leaves_the_old_checkpoint_and_no_debris(small: BeamConfig, folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", torch.zeros(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_hf(folder, small, interrupted())
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_saving_again_replaces_the_folder(small: BeamConfig, folder: Path) -> None:
    save_hf(folder, small, initial_tensors(small, seed=2, dtype=torch.bfloat16))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    open_checkpoint(folder)


def test_tokenizer_travels_with_an_export(small: BeamConfig, folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text(name)
    new = tmp_path / "deep" / "export"
    save_hf(new, small, initial_tensors(small, seed=2, dtype=torch.bfloat16), copy_from=folder)
    assert (new / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert (new / "tokenizer.json").exists()
    assert not (new / "model.safetensors.index.json").exists()


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> HFCheckpoint:
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return HFCheckpoint(folder)


def test_missing_extra_and_wrongly_shaped_tensors_are_named(small: BeamConfig, folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.norm.weight"] = torch.ones(31)

    with pytest.raises(BadInput) as raised:
        edited(folder, edit).validate(small)
    message = str(raised.value)
    assert "1 missing: model.layers.2.mlp.experts.5.up_proj.weight" in message
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "1 wrongly shaped: model.norm.weight has shape [31] instead of [32]" in message


def test_half_fused_layer_is_refused(small: BeamConfig, folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(8, 64, 32)

    with pytest.raises(BadInput, match=r"missing: model\.layers\.1\.mlp\.experts\.down_proj.* 24 unexpected"):
        edited(folder, edit).validate(small)


def test_missing_shard_is_named(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(BadInput, match=r"names model-00002-of-.* which is missing"):
        HFCheckpoint(folder)


def test_truncated_shard_is_named(folder: Path) -> None:
    shard = next(folder.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(BadInput, match=f"{shard.name}: not a readable safetensors file"):
        HFCheckpoint(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}'])
def test_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadInput, match=r"index\.json: not an index"):
        HFCheckpoint(folder)


def test_folder_without_weights_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="weights are missing"):
        HFCheckpoint(tmp_path)
    with pytest.raises(BadInput, match="no such folder"):
        HFCheckpoint(tmp_path / "absent")
