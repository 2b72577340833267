"""A manifest tells what was exported from everything else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from beam_rl import fingerprint
from beam_rl.model.errors import BadInput
from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import MANIFEST, Fingerprint, Origin


def test_the_trainers_numbers_for_weights_without_a_manifest(
    live: Any, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What `beam-rl swap` runs in a process of its own for such weights."""
    fingerprint.main(str(models["A"]))
    found = Fingerprint(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    expected = live.trainer_score(models["A"], torch.tensor([found.tokens]))[0]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-5)
    known = manifest.read(models["A"])
    assert known is not None
    assert known.fingerprint is not None
    assert known.fingerprint.tokens == found.tokens


def test_what_is_read_is_what_was_written(models: dict[str, Path], tmp_path: Path) -> None:
    known = manifest.read(models["A"])
    assert known is not None
    assert manifest.Manifest.from_dict(json.loads(json.dumps(known.to_dict()))) == known
    assert known.digest == manifest.compute(models["A"]).digest
    other = manifest.read(models["B"])
    assert other is not None
    assert other.digest != known.digest
    faults = manifest.differences(other.tensors, known.tensors, digests=True)
    assert faults == [next(fault for fault in faults if "changed" in fault)]
    assert manifest.differences(other.tensors, known.tensors, digests=False) == []


def test_damaged_manifests_are_bad_input(models: dict[str, Path], tmp_path: Path) -> None:
    content = json.loads((models["A"] / MANIFEST).read_text())
    for broken in ({}, content | {"format": 2}, content | {"digest": "0"}, content | {"tensors": 3}, []):
        (tmp_path / MANIFEST).write_text(json.dumps(broken))
        with pytest.raises(BadInput, match="export the checkpoint again"):
            manifest.read(tmp_path)
    (tmp_path / MANIFEST).unlink()
    assert manifest.read(tmp_path) is None
    with pytest.raises(BadInput, match="has no"):
        manifest.add_origin(tmp_path, Origin("run", 1))
