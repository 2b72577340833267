"""metrics.jsonl, checkpoints and the order of problems across restarts."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from beam_rl import checkpoints
from beam_rl.metrics import PHASES, MetricsFile, read_lines, summary
from beam_rl.model.errors import BadInput
from beam_rl.problems import Problems, ProblemStream
from beam_rl.recipe import load
from beam_rl.tracking import RunTracking, run_id


def step(number: int, **more: object) -> dict[str, object]:
    phases = {"generate": 1.0, "logprobs": 0.1, "train": 0.5, "sync": 0.1, "other": 0.3}
    return {
        "kind": "step", "step": number, "updates": 2, "gap_mean": 0.001 * number, "gap_max": 0.01,
        "step_seconds": 2.0, "seconds": phases,
    } | more  # fmt: skip


def test_a_restart_marks_the_steps_that_it_repeats(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for number in (1, 2, 3):
        metrics.append(step(number))
    metrics.rewind(2, time=0.0)
    metrics.append(step(3, gap_mean=0.5))
    lines = list(read_lines(metrics.path))
    assert [(line["kind"], line.get("rewound", False)) for line in lines] == [
        ("step", False), ("step", False), ("step", True), ("resume", False), ("step", False),
    ]  # fmt: skip
    assert [record["gap_mean"] for record in metrics.records("step")] == [0.001, 0.002, 0.5]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.append(step(1))
    with metrics.path.open("a") as file:
        file.write('{"kind": "step", "st')
    metrics.rewind(1, time=0.0)
    assert len(metrics.records("step")) == 1
    assert all(json.loads(line) for line in metrics.path.read_text().splitlines())


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.append({"kind": "eval", "se": float("nan"), "deep": {"x": [float("inf"), 1.0]}})
    assert json.loads(metrics.path.read_text()) == {"kind": "eval", "se": None, "deep": {"x": [None, 1.0]}}


def test_what_is_neither_generation_nor_training_is_a_share_of_the_median_step(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("beam: {tiny: {}}")
    seconds = dict.fromkeys(PHASES, 0.1)
    steps: Any = [step(n, seconds=seconds | {"other": other}) for n, other in enumerate((0.1, 0.5, 0.2), 1)]
    assert summary(load(path), steps, [], 0.0, 0)["overhead_share_median"] == pytest.approx(0.15)


def test_the_summary_has_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("beam: {tiny: {}}")
    evals = [{"step": 0, "avg8": 0.5, "se": 0.02}, {"step": 10, "avg8": 0.7, "se": 0.01}]
    numbers = summary(load(path), [step(1), step(2)], evals, 61.0, 5 * 2**30)  # type: ignore[list-item]
    assert list(numbers) == [
        "avg8_before", "avg8_after", "se_before", "se_after", "gap_mean_worst_step", "gap_mean", "gap_max", "steps",
        "updates", "startup_seconds", "step_seconds_median", "overhead_share_median", "seconds_by_phase",
        "peak_rss_bytes", "seed", "precision", "r3",
    ]  # fmt: skip
    assert (numbers["avg8_before"], numbers["avg8_after"], numbers["updates"]) == (0.5, 0.7, 4)
    assert numbers["gap_mean_worst_step"] == 0.002
    assert numbers["seconds_by_phase"]["generate"] == 2.0


def test_a_checkpoint_counts_once_it_is_named_the_latest(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (checkpoints.folder(tmp_path, number) / "policy").mkdir(parents=True)
    checkpoints.publish(tmp_path, 1, {"step": 1}, keep=2)
    assert checkpoints.latest(tmp_path) == (1, {"step": 1})
    checkpoints.forget_beyond(tmp_path, 1)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]


def test_old_checkpoints_go_only_after_the_new_one_counts(tmp_path: Path) -> None:
    for number in (9, 10, 11):
        (checkpoints.folder(tmp_path, number) / "policy").mkdir(parents=True)
        checkpoints.publish(tmp_path, number, {}, keep=2)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_10", "global_step_11"]


def test_the_wandb_run_id_survives_a_restart(tmp_path: Path) -> None:
    first = run_id(tmp_path / "id")
    assert run_id(tmp_path / "id") == first != run_id(tmp_path / "other")


def problems(count: int) -> Problems:
    return Problems(
        [{"prompt": [{"role": "user", "content": str(index)}], "reward_spec": {}} for index in range(count)]
    )


def contents(stream: ProblemStream, batches: int) -> list[str]:
    return [item["prompt"][0]["content"] for batch in islice(stream, batches) for item in batch]


def test_a_restart_continues_the_order_across_the_end_of_a_pass() -> None:
    """A restart on an epoch boundary ran zero steps elsewhere (verl#5725), or began another order (verl#3457)."""
    whole = contents(ProblemStream(problems(10), 4, 100, seed=1), 10)
    for cut in range(10):
        first = ProblemStream(problems(10), 4, 100, seed=1)
        head = contents(first, cut)
        second = ProblemStream(problems(10), 4, 100, seed=1)
        second.load_state_dict(first.state_dict())
        assert head + contents(second, 10 - cut) == whole


def test_every_pass_has_every_problem_once_in_its_own_order() -> None:
    order = contents(ProblemStream(problems(10), 5, 100, seed=1), 4)
    assert sorted(order[:10], key=int) == sorted(order[10:], key=int) == [str(index) for index in range(10)]
    assert order[:10] != order[10:]
    assert order != contents(ProblemStream(problems(10), 5, 100, seed=2), 4)


def test_the_same_problem_twice_in_a_batch_is_two_groups() -> None:
    """Groups are told apart by uid: one problem at the end of a pass and the start of the next is not one group."""
    (batch,) = islice(ProblemStream(problems(3), 8, 100, seed=1), 1)
    assert len({item["uid"] for item in batch}) == 8


def test_another_data_set_is_not_resumed_silently() -> None:
    state = ProblemStream(problems(10), 4, 100, seed=1).state_dict()
    with pytest.raises(BadInput, match="problems=10"):
        ProblemStream(problems(11), 4, 100, seed=1).load_state_dict(state)


def test_a_repeated_step_is_logged_again_in_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B drops steps that go back, and a restart without the run's id begins another run (wandb#4482, verl#2783)."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    ids = []
    for _ in range(2):
        tracking = RunTracking(tmp_path, project_name="p", experiment_name="e", backend="wandb", config={})
        for number in (1, 2, 1):
            tracking.log({"loss": float(number)}, step=number, commit=True)
        assert wandb.run is not None
        assert wandb.run.step == 3  # W&B's own counter: nothing was dropped
        ids.append(wandb.run.id)
        del tracking  # SkyRL's tracker finishes the run when it goes
    assert ids[0] == ids[1]
