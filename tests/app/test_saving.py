"""When a checkpoint counts: SkyRL saves a step before it evaluates and logs it."""

import asyncio
import functools
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from skyrl.train.trainer import RayPPOTrainer

from beam_rl import checkpoints, checks, gap, recipe
from beam_rl.model.errors import BadInput
from beam_rl.rollouts import RolloutStats
from beam_rl.trainer.worker import BeamPolicyWorkerBase
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
    written = False
    """Whether a save is written before somebody waits for it."""
    fails = False

    def save_checkpoint(self, model: str, path: str) -> None:
        assert self.pending is None, "the policy holds one unfinished save at most"
        self.pending = path

    def async_run_ray_method(self, dispatch_type: str, method: str, blocking: bool) -> list[bool]:
        assert (dispatch_type, method) == ("pass_through", "finalize_pending_saves")
        if self.pending is None:
            return [True]
        if not blocking and not self.written:
            return [False]
        path, self.pending = Path(self.pending), None
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.fails:
            raise OSError("disk full")
        path.mkdir()
        return [True]


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
    bare.monitor, bare.stream = gap.GapMonitor(loaded.beam.gap, 1.0), SimpleNamespace(state_dict=dict)
    monkeypatch.setattr(bare.monitor, "measures_without_r3", lambda step: False)
    bare.dispatch = bare.policy_model = Saves()
    bare.informative_share = 1.0
    bare.recorded, bare.published, bare.unpublished = 0, 0, None
    bare.publisher = None
    bare.global_step = 1
    monkeypatch.setattr(bare, "step_record", lambda logs: {"step": bare.global_step})
    monkeypatch.setattr(RayPPOTrainer, "_fire", lambda self, event, **fields: None)
    monkeypatch.setattr(RayPPOTrainer, "fwd_logprobs_values_reward", lambda self, training_input: training_input)
    monkeypatch.setattr(ray, "get", lambda references: references)
    return bare


def forward(trainer: Any) -> None:
    values = torch.zeros(1, 2)
    trainer.fwd_logprobs_values_reward(
        {"action_log_probs": values, "rollout_logprobs": values, "loss_mask": torch.ones(1, 2)}
    )


def log(trainer: Any) -> None:
    trainer._fire("on_log", logs={"trainer/global_step": trainer.global_step})


def test_a_checkpoint_does_not_count_before_its_steps_record_is_written(trainer: Any) -> None:
    """A kill during the last evaluation left a run with all steps done that could never be evaluated or summarised."""
    root, trainer.dispatch.written = trainer.observer.root, True
    trainer.save_checkpoints()
    trainer._fire("on_log", logs={"eval/avg8": 0.5})  # the evaluation's own numbers are no step record
    log(trainer)
    assert trainer.observer.latest == [None]
    trainer.global_step = 2
    log(trainer)
    assert trainer.observer.latest == [None, 1]
    assert latest(root) == 1


def test_steps_go_on_until_their_checkpoint_is_written(trainer: Any) -> None:
    """The step after a save waited for a slow disk, eleven times as long as it takes."""
    root = trainer.observer.root
    trainer.save_checkpoints()
    log(trainer)
    for trainer.global_step in (2, 3):
        forward(trainer)
        log(trainer)
        assert latest(root) is None
    trainer.global_step = 4
    trainer.dispatch.written = True
    forward(trainer)
    assert latest(root) == 1


def test_the_next_save_waits_for_the_last_one(trainer: Any) -> None:
    trainer.save_checkpoints()
    log(trainer)
    trainer.global_step = 2
    trainer.save_checkpoints()
    assert latest(trainer.observer.root) == 1
    assert trainer.dispatch.pending, "its own save goes on"


class Policy:
    """The policy's worker in this process, called as SkyRL's dispatch and actor group call it."""

    def __init__(self, worker: BeamPolicyWorkerBase) -> None:
        self.worker = worker

    def save_checkpoint(self, model: str, path: str) -> None:
        self.worker.save_checkpoint(path)

    def async_run_ray_method(self, dispatch_type: str, method: str, **options: Any) -> list[Any]:
        return [getattr(self.worker, method)(**options)]


def test_a_kill_while_a_checkpoint_is_written_resumes_from_the_one_before(
    trainer: Any, golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from beam_rl.model.config import load_config
    from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, TrainerEngine

    # isort: split
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    worker = BeamPolicyWorkerBase.__new__(BeamPolicyWorkerBase)
    worker.engine = engine = TrainerEngine(EngineConfig(dtype="float32", optimizer=OptimizerSettings(lr=1e-3)))
    engine.build(load_config(golden("tiny")))
    parameter = next(engine.models[0].parameters())
    trainer.dispatch = trainer.policy_model = Policy(worker)
    root, opened, write = trainer.observer.root, threading.Event(), filesystem_async._write_item

    @functools.wraps(write)  # Megatron looks at its parameters
    def waiting(*arguments: Any, **options: Any) -> Any:
        assert opened.wait(timeout=60)
        return write(*arguments, **options)

    monkeypatch.setattr(filesystem_async, "_write_item", waiting)
    opened.set()
    for trainer.global_step in (1, 2):
        parameter.data.fill_(trainer.global_step)
        trainer.save_checkpoints()
        log(trainer)
        if trainer.global_step == 1:
            trainer.publish_checkpoint()
            opened.clear()
    for trainer.global_step in (3, 4):
        parameter.data.fill_(trainer.global_step)
        forward(trainer)
        log(trainer)
    shutil.copytree(root, tmp_path / "killed")
    opened.set()
    trainer._fire("on_train_end")
    assert latest(root) == 2
    assert latest(tmp_path / "killed") == 1
    checkpoints.forget_beyond(tmp_path / "killed", 1)
    assert checkpoints.steps(tmp_path / "killed") == [1]
    for where, step in ((tmp_path / "killed", 1), (root, 2)):
        engine.load(checkpoints.folder(where, step) / "policy")
        assert bool((parameter == step).all())


def test_a_checkpoint_that_cannot_be_written_never_counts(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a run also publishes what is written: after a full disk it named a folder without a policy."""

    async def train(self: Any) -> None:
        forward(self)

    async def aclose() -> None: ...

    monkeypatch.setattr(RayPPOTrainer, "train", train)
    trainer.inference_engine_client = SimpleNamespace(aclose=aclose)
    trainer.save_checkpoints()
    log(trainer)
    trainer.global_step = 2
    trainer.dispatch.written = trainer.dispatch.fails = True
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(trainer.train())
    assert latest(trainer.observer.root) is None


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
    trainer.dispatch = trainer.policy_model = None
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
