"""When a checkpoint counts: SkyRL saves a step before it evaluates and logs it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from skyrl.train.trainer import RayPPOTrainer

from beam_rl import checkpoints, checks, recipe
from beam_rl.model.errors import BadInput
from beam_rl.rollouts import RolloutStats
from beam_rl.training import BeamTrainer


class Records:
    """An observer that notes the latest checkpoint's step at every record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.latest: list[int | None] = []

    def step(self, record: dict[str, Any]) -> None:
        self.latest.append(latest(self.root))


class Saves:
    """The policy's checkpoints: a folder appears when the save is finished, as the worker's does."""

    pending: str | None = None

    def save_checkpoint(self, model: str, path: str) -> None:
        assert self.pending is None, "the policy holds one unfinished save at most"
        self.pending = path

    def finalize_pending_saves(self, model: str) -> None:
        if self.pending is not None:
            Path(self.pending).mkdir(parents=True)
            self.pending = None


def latest(root: Path) -> int | None:
    found = checkpoints.latest(root)
    return found and found[0]


@pytest.fixture
def trainer(content: dict[str, Any], write: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer at step 1 with what its checkpoints touch; the policy is an empty folder."""
    loaded = recipe.load(write(content))
    root = Path(loaded.trainer.ckpt_path)
    root.mkdir(parents=True)
    bare: Any = BeamTrainer.__new__(BeamTrainer)
    bare.recipe, bare.cfg = loaded, SimpleNamespace(trainer=loaded.trainer)
    bare.observer, bare.stats = Records(root), RolloutStats()
    bare.monitor, bare.stream = SimpleNamespace(over=0), SimpleNamespace(state_dict=dict)
    bare.dispatch = Saves()
    bare.informative_share = 1.0
    bare.recorded, bare.published, bare.unpublished = 0, 0, None
    bare.publisher = None
    bare.global_step = 1
    monkeypatch.setattr(bare, "step_record", lambda logs: {"step": bare.global_step})
    monkeypatch.setattr(RayPPOTrainer, "_fire", lambda self, event, **fields: None)
    return bare


def log(trainer: Any) -> None:
    trainer._fire("on_log", logs={"trainer/global_step": trainer.global_step})


def test_a_checkpoint_does_not_count_before_its_steps_record_is_written(trainer: Any) -> None:
    """A kill during the last evaluation left a run with all steps done that could never be evaluated or summarised."""
    root = trainer.observer.root
    trainer.save_checkpoints()
    trainer._fire("on_log", logs={"eval/avg8": 0.5})  # the evaluation's own numbers are no step record
    log(trainer)
    assert trainer.observer.latest == [None]
    trainer.global_step = 2
    log(trainer)
    assert trainer.observer.latest == [None, 1]
    assert latest(root) == 1


def test_a_checkpoint_is_written_while_the_next_step_runs(trainer: Any) -> None:
    trainer.save_checkpoints()
    log(trainer)
    assert trainer.dispatch.pending, "the step ended without waiting for its checkpoint"
    trainer.global_step = 2
    trainer.save_checkpoints()
    assert latest(trainer.observer.root) == 1


def test_the_last_steps_checkpoint_counts_when_training_ends(trainer: Any) -> None:
    trainer.save_checkpoints()
    log(trainer)
    trainer._fire("on_train_end")
    assert latest(trainer.observer.root) == 1


def test_skyrls_checkpoint_after_its_loop_counts_at_once(trainer: Any) -> None:
    log(trainer)
    assert latest(trainer.observer.root) is None  # nothing was saved at this step
    trainer.save_checkpoints()
    assert latest(trainer.observer.root) == 1


def test_a_resume_with_no_step_left_does_not_write_over_its_checkpoint(trainer: Any) -> None:
    trainer.save_checkpoints()
    log(trainer)
    trainer._fire("on_train_end")
    trainer.dispatch = None
    trainer.save_checkpoints()


def test_a_run_killed_before_its_summary_can_be_resumed(trainer: Any) -> None:
    trainer.global_step = trainer.recipe.steps
    trainer.save_checkpoints()
    log(trainer)
    trainer._fire("on_train_end")
    checks.folder(trainer.recipe, resume=True)
    (trainer.recipe.run_dir / "summary.json").write_text("{}")
    with pytest.raises(BadInput, match="steps are done"):
        checks.folder(trainer.recipe, resume=True)
