"""A run's folder belongs to one run, and to one driver at a time."""

from pathlib import Path
from typing import Any

import pytest

from beam_rl import folder, recipe
from beam_rl.model.errors import BadInput


@pytest.fixture
def unnamed(content: dict[str, Any], write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that names no folder."""
    monkeypatch.chdir(tmp_path)
    del content["beam"]["run_dir"]
    return write(content)


def test_two_runs_of_the_same_second_have_a_folder_each(unnamed: Path) -> None:
    loaded = recipe.load(unnamed)
    first, second, third = (folder.claim(loaded)[0] for _ in range(3))
    assert [run.run_dir.name.removeprefix(loaded.run_dir.name) for run in (first, second, third)] == ["", "-2", "-3"]
    assert all(run.trainer.ckpt_path == str(run.run_dir / "checkpoints") for run in (first, second, third))
    assert recipe.load(unnamed, run_dir=third.run_dir).values == third.values  # no path is left behind


def test_a_live_runs_folder_is_refused_by_name(tmp_path: Path) -> None:
    with folder.held(tmp_path), pytest.raises(BadInput, match=str(tmp_path)), folder.held(tmp_path):
        raise AssertionError("two drivers in one folder")
    with folder.held(tmp_path):
        pass


def refused(loaded: recipe.Recipe, made: bool) -> None:
    with pytest.raises(BadInput), folder.recorded(loaded, made):
        raise BadInput("no")


def test_only_a_new_folder_without_work_is_removed(content: dict[str, Any], write: Any) -> None:
    loaded = recipe.load(write(content))
    folder.claim(loaded)
    refused(loaded, made=True)
    assert not loaded.run_dir.exists()
    for made, work in ((False, "notes"), (True, "metrics.jsonl"), (True, "checkpoints")):
        folder.claim(loaded)
        (loaded.run_dir / work).touch()
        refused(loaded, made)
        assert (loaded.run_dir / work).exists()
        (loaded.run_dir / work).unlink()
        (loaded.run_dir / "recipe.yaml").unlink()


def test_a_resume_keeps_its_overrides_unless_they_are_refused(content: dict[str, Any], write: Any) -> None:
    path = write(content)
    first, made = folder.claim(recipe.load(path))
    assert made
    with folder.recorded(first, made):
        pass
    refused(recipe.load(path, ["trainer.max_training_steps=5"]), made=False)
    assert recipe.load(first.run_dir / "recipe.yaml").steps == 3
    with folder.recorded(recipe.load(path, ["trainer.max_training_steps=9"]), False):
        pass
    assert recipe.load(first.run_dir / "recipe.yaml").steps == 9
