"""A drafter that vLLM could not load, or of another model, is found before an engine starts."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.rollout.drafter import DrafterShape, check_drafter, drafter_tensors, write_random
from beam_rl.tiny import ARCHITECTURE

TARGET = BeamConfig(**ARCHITECTURE, architectures=["BeamForCausalLM"], dtype="bfloat16")


def test_the_file_holds_every_tensor_in_the_kernels_type(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "drafter", TARGET, DrafterShape(), mask_token=31, seed=1)
    check_drafter(folder, TARGET)
    shapes = drafter_tensors(json.loads((folder / "config.json").read_text()))
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        assert {name: tuple(part.get_shape()) for name, part in found.items()} == shapes
        assert {part.get_dtype() for part in found.values()} == {"BF16"}
    assert shapes["fc.weight"] == (128, 3 * 128)
    assert shapes["layers.1.mlp_conv.kernel_projection.weight"] == (2 * 4 * (128 // 32), 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "has DFlash2BeamDraftModel"),
        ({"vocab_size": 64}, "vocab_size is 64, the model's is 32"),
        ({"dflash_config": {"target_layer_ids": [6]}}, "the model has 6 layers"),
    ],
)
def test_another_models_drafter_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = write_random(tmp_path / "drafter", TARGET, DrafterShape(), mask_token=31, seed=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadInput, match=message):
        check_drafter(folder, TARGET)
    with pytest.raises(BadInput, match="no config"):
        check_drafter(tmp_path, TARGET)
