"""Checkpoints: a run that stops and goes on is the run that never stopped, and a damaged one is refused by name."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from beam_rl.model.errors import BadInput
from beam_rl.trainer import checkpoint
from beam_rl.trainer.engine import OptimizerSettings

SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.1, warmup_steps=2, schedule="linear", total_steps=8)

RESUME = """
import json, sys, torch
from beam_rl.model.config import load_config
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Sequence, TrainerEngine
model, folder, dtype, samples = sys.argv[1:]
settings = OptimizerSettings(lr=1e-3, weight_decay=0.1, warmup_steps=2, schedule="linear", total_steps=8)
engine = TrainerEngine(EngineConfig(dtype=dtype, optimizer=settings, seed=99))
engine.build(load_config(model))
extra = engine.load(folder)
samples = [Sequence(torch.tensor(ids), torch.ones(len(ids) - 1)) for ids in json.loads(samples)]
torch.set_num_threads(int(extra["threads"]))
steps = []
for _ in range(3):
    loss = engine.forward_backward(samples, lambda logprobs, *_: (-logprobs.sum() / 100, {}), replay=False)["loss"]
    steps.append([loss.hex(), engine.optimizer_step()["grad_norm"].hex()])
weights = sum(float(tensor.double().abs().sum()) for _, tensor in engine.export())
print(json.dumps([extra["note"], steps, weights.hex(), torch.rand(1).item()]))
"""


def supervised(logprobs, *_):
    return -logprobs.sum() / 100, {}


def train(engine, samples, count):
    steps = []
    for _ in range(count):
        loss = engine.forward_backward(samples, supervised, replay=False)["loss"]
        steps.append([loss.hex(), engine.optimizer_step()["grad_norm"].hex()])
    return steps


@pytest.fixture
def plain(samples):
    """The samples, whole, without fields."""
    for sample in samples:
        sample.loss_mask, sample.fields = torch.ones(len(sample.tokens) - 1), {}
    return samples


@pytest.fixture
def saved(engine_for, plain, tmp_path):
    """An engine two steps into its run, and its checkpoint."""
    engine = engine_for(optimizer=SETTINGS)
    train(engine, plain, 2)
    engine.save(tmp_path / "step_2", {"note": "two"})
    return engine, tmp_path / "step_2"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_process_goes_on_bit_for_bit(dtype, engine_for, plain, golden, tmp_path):
    engine = engine_for(dtype=dtype, optimizer=SETTINGS)
    train(engine, plain, 2)
    engine.save(tmp_path / "step_2", {"note": {"step": 2}, "threads": torch.get_num_threads()})
    expected = train(engine, plain, 3)
    weights = sum(float(tensor.double().abs().sum()) for _, tensor in engine.export())
    tokens = json.dumps([sample.tokens.tolist() for sample in plain])
    result = subprocess.run(
        [sys.executable, "-c", RESUME, str(golden("tiny")), str(tmp_path / "step_2"), dtype, tokens],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [{"step": 2}, expected, weights.hex(), torch.rand(1).item()]


def test_going_back_to_a_checkpoint_restores_everything(saved, plain):
    engine, path = saved
    random_numbers = (random.random(), np.random.rand(), torch.rand(2))
    first = train(engine, plain, 3)
    assert engine.load(path) == {"note": "two"}
    assert (random.random(), np.random.rand()) == random_numbers[:2]
    assert torch.equal(torch.rand(2), random_numbers[2])
    assert train(engine, plain, 3) == first
    assert engine.optimizer_step()["lr"] == pytest.approx(1e-3 * 2 / 6)  # step 6 of 8, after 2 of warm-up


def test_every_parameter_counts_its_own_steps_after_a_load(saved, plain):
    """Megatron gives them all one step tensor, which AdamW then counts up once a parameter."""
    engine, path = saved
    engine.load(path)
    train(engine, plain, 1)
    counts = [state["step"] for part in engine.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    assert {float(count) for count in counts} == {3.0}
    assert len({count.data_ptr() for count in counts}) == len(counts)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
@pytest.mark.parametrize("victim", ["*.distcp", ".metadata", "metadata.json"])
def test_a_damaged_file_is_refused_by_name(damage, victim, saved):
    engine, path = saved
    file = next(path.glob(victim))
    data = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    with pytest.raises(BadInput, match=file.name.replace(".", r"\.")):
        engine.load(path)


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_an_unfinished_checkpoint_is_refused(content, saved):
    engine, path = saved
    manifest = path / checkpoint.MANIFEST
    manifest.unlink()
    if content is not None:
        manifest.write_text(content)
    with pytest.raises(BadInput, match="step_2"):
        engine.load(path)


def test_a_folder_that_is_not_there_is_refused(saved):
    engine, path = saved
    with pytest.raises(BadInput, match="no such folder"):
        engine.load(path.with_name("step_9"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"optimizer": OptimizerSettings(lr=2e-3, weight_decay=0.1)}, r"optimizer\."),
        ({"optimizer": None}, r"optimizer\."),
        ({"name": "groups"}, r"model\."),
    ],
)
def test_other_settings_are_refused_by_name(changes, named, saved, engine_for):
    _, path = saved
    other = engine_for(**({"optimizer": SETTINGS} | changes))
    with pytest.raises(BadInput, match=named):
        other.load(path)


def test_a_constant_schedule_may_be_made_longer(engine_for, plain, tmp_path):
    engine = engine_for(optimizer=OptimizerSettings(lr=1e-3, total_steps=2))
    train(engine, plain, 1)
    engine.save(tmp_path / "step_1", {})
    engine_for(optimizer=OptimizerSettings(lr=1e-3, total_steps=9)).load(tmp_path / "step_1")


def test_a_save_that_dies_leaves_the_older_checkpoint(saved, plain, monkeypatch):
    engine, path = saved
    expected = train(engine, plain, 1)

    def die(state, folder, **_):
        (Path(folder) / "half.distcp").write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(dist_checkpointing, "save", die)
        for name in ("step_2", "step_3"):
            with pytest.raises(OSError, match="disk full"):
                engine.save(path.with_name(name), {})
    assert not path.with_name("step_3").exists()
    engine.load(path)
    assert train(engine, plain, 1) == expected
    engine.save(path.with_name("step_3"), {})
    assert sorted(p.name for p in path.parent.glob("step_*")) == ["step_2", "step_3"]


def test_saving_again_replaces(saved, plain):
    engine, path = saved
    train(engine, plain, 1)
    engine.save(path, {"note": "three"})
    assert engine.load(path) == {"note": "three"}
    assert [p.name for p in path.parent.iterdir()] == ["step_2"]


def test_prune_keeps_the_newest_by_number_and_clears_what_never_finished(tmp_path):
    for step in (2, 10, 9, 1):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / checkpoint.MANIFEST).write_text("{}")
    (tmp_path / "step_11").mkdir()  # somebody else's, or being written by an older version: not ours to judge
    (tmp_path / ".step_12.partial").mkdir()
    (tmp_path / "notes.txt").write_text("")
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step_10", "step_11", "step_9"]
