"""A real run: every process, a kill in the middle, and the rest of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from beam_rl.metrics import read_lines
from beam_rl.model.checkpoint import HFCheckpoint
from beam_rl.model.config import load_config

MINUTES = 60


def weight_files(since: float) -> list[str]:
    """Weight-transfer files younger than `since`."""
    return [path.name for path in Path("/dev/shm").glob("beam-weights-*") if path.stat().st_ctime >= since]


def run(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "beam_rl", "train", *arguments], stdout=file, stderr=file)


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "step"]


@pytest.mark.timeout(20 * MINUTES)
def test_a_run_that_is_killed_leaves_nothing_and_goes_on_where_it_was(
    content: dict[str, Any], write: Any, descendants: Any, tmp_path: Path
) -> None:
    """With two trainer processes, which share the experts out, and a reference model beside them."""
    # A random model solves nothing, so no group is informative; the overlong penalty still makes advantages.
    content["trainer"]["algorithm"] = {"dynamic_sampling": {"type": None}, "use_kl_loss": True}
    content["trainer"]["placement"] = {"policy_num_gpus_per_node": 2}
    content["trainer"]["policy"]["megatron_config"] = {"expert_model_parallel_size": 2}
    content["trainer"] |= {"max_training_steps": 4, "policy_mini_batch_size": 8}
    content["beam"] |= {"precision": "fp32", "gap": {"without_r3_interval": 1}}  # so that any other weights show
    recipe, folder, log = write(content), tmp_path / "run", tmp_path / "log"

    since = time.time()
    driver = run([str(recipe)], log)
    started = descendants(driver)
    end = time.monotonic() + 8 * MINUTES
    while len(steps(folder)) < 2:
        assert driver.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        started.look()
        time.sleep(0.1)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert len(started.seen) > 5
    assert started.alive() == []
    assert weight_files(since) == []
    latest = int((folder / "checkpoints" / "latest_ckpt_global_step.txt").read_text())
    assert latest >= 1
    state = json.loads((folder / "checkpoints" / f"global_step_{latest}" / "state.json").read_text())
    assert state["stream"]["drawn"] == latest * content["trainer"]["train_batch_size"]

    driver = run(["--resume", str(folder)], log)
    assert driver.wait(timeout=10 * MINUTES) == 0, log.read_text()[-3000:]
    records = [line for line in read_lines(folder / "metrics.jsonl") if not line.get("rewound")]
    done = [line for line in records if line["kind"] == "step"]
    assert [line["step"] for line in done] == [1, 2, 3, 4]
    assert [line["step"] for line in records if line["kind"] == "resume"] == [latest]
    assert all(line["updates"] == 1 and line["grad_norm"] > 0 for line in done)
    assert all(line["gap_mean"] is not None and line["gap_mean_no_r3"] is not None for line in done)
    assert max(line["gap_max"] for line in done) < 1e-4, "the rollout must run on the trainer's weights at every step"
    first, *later = (line["kl"] for line in done)
    assert abs(first) < 1e-6 < 1e-4 < min(later), (
        f"{first}, {later}: the policy must leave the reference, which is the model that training began with"
    )

    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["updates"]) == (4, 4)
    assert summary["avg8_after"] is not None
    assert (folder / "report.html").is_file()
    HFCheckpoint(folder / "export").validate(load_config(folder / "export"))


@pytest.mark.timeout(12 * MINUTES)
def test_an_interrupt_during_start_up_leaves_nothing(
    content: dict[str, Any], write: Any, descendants: Any, tmp_path: Path
) -> None:
    since = time.time()
    log = tmp_path / "log"
    driver = run([str(write(content))], log)
    started = descendants(driver)
    end = time.monotonic() + 4 * MINUTES
    while started.running("SingleEngineServer") is None:
        assert driver.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(driver.pid, signal.SIGINT)
    assert driver.wait(timeout=2 * MINUTES) == 1
    assert log.read_text().splitlines()[-1] == "interrupted; no checkpoint was written yet"
    assert started.alive() == []
    assert weight_files(since) == []


@pytest.mark.timeout(12 * MINUTES)
@pytest.mark.parametrize("precision", ["lora", "mxfp8"])
def test_a_run_in_another_precision_trains_what_it_says(
    precision: str, content: dict[str, Any], write: Any, checkpoint: Path, tmp_path: Path
) -> None:
    content["trainer"] |= {"max_training_steps": 2, "ckpt_interval": 2}
    content["trainer"]["algorithm"] = {"dynamic_sampling": {"type": None}}
    content["trainer"]["policy"]["optimizer_config"]["lr"] = 1e-3
    content["beam"] |= {"precision": precision, "lora": {"target_modules": ["q_proj", "experts.down_proj"]}}
    folder, log = tmp_path / "run", tmp_path / "log"
    assert run([str(write(content))], log).wait(timeout=10 * MINUTES) == 0, log.read_text()[-3000:]

    done = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "step"]
    assert [(line["step"], line["updates"]) for line in done] == [(1, 2), (2, 2)]
    assert all(
        line["grad_norm"] > 0 and line["gap_budget"] == {"lora": 0.01, "mxfp8": 0.03}[precision] for line in done
    )
    assert json.loads((folder / "summary.json").read_text())["precision"] == precision
    config = load_config(folder / "export")
    before, after = (dict(HFCheckpoint(path).tensors(config)) for path in (checkpoint, folder / "export"))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    if precision == "lora":
        assert all(".q_proj." in name or (".experts." in name and ".down_proj." in name) for name in changed)
        assert any(".q_proj." in name for name in changed)
        assert any(".experts." in name for name in changed)
        assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    else:
        assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight"} <= changed
