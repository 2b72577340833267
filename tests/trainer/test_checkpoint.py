"""Checkpoints: a run that stops and goes on is the run that never stopped, and a damaged one is refused by name."""

import functools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from beam_rl.model.errors import BadInput
from beam_rl.problems import Problems, ProblemStream
from beam_rl.trainer import manifest, optimizer
from beam_rl.trainer.engine import OptimizerSettings, Sequence
from beam_rl.trainer.worker import BeamPolicyWorkerBase

SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.1, warmup_steps=2, schedule="linear", total_steps=8)

RESUME = """
import json, sys, torch
from beam_rl.model.config import load_config
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Sequence, TrainerEngine
model, folder, dtype, recompute, samples = sys.argv[1:]
settings = OptimizerSettings(lr=1e-3, weight_decay=0.1, warmup_steps=2, schedule="linear", total_steps=8)
engine = TrainerEngine(EngineConfig(dtype=dtype, optimizer=settings, seed=99, recompute=recompute or None))
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

DIE = """
import os, signal, sys, threading
from beam_rl.model.config import load_config
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, TrainerEngine
engine = TrainerEngine(EngineConfig(dtype="float32", optimizer=OptimizerSettings()))
engine.build(load_config(sys.argv[1]))
engine.save(sys.argv[2] + "/step_1", {}, asynchronous=True)
for thread in threading.enumerate():
    if thread.name.startswith("save"):
        thread.join()
os.kill(os.getpid(), signal.SIGKILL)
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
def gate(monkeypatch):
    """Holds the writer's thread at its first file, until the event is set."""

    def hold():
        opened, write = threading.Event(), filesystem_async._write_item

        @functools.wraps(write)  # Megatron looks at its parameters
        def waiting(*arguments, **options):
            assert opened.wait(timeout=60)
            return write(*arguments, **options)

        monkeypatch.setattr(filesystem_async, "_write_item", waiting)
        return opened

    return hold


@pytest.fixture
def saved(engine_for, plain, tmp_path):
    """An engine two steps into its run, and its checkpoint."""
    engine = engine_for(optimizer=SETTINGS)
    train(engine, plain, 2)
    engine.save(tmp_path / "step_2", {"note": "two"})
    return engine, tmp_path / "step_2"


@pytest.mark.parametrize(("dtype", "recompute"), [("float32", None), ("bfloat16", None), ("bfloat16", "full")])
def test_a_fresh_process_goes_on_bit_for_bit(dtype, recompute, engine_for, plain, golden, tmp_path):
    engine = engine_for(dtype=dtype, recompute=recompute, optimizer=SETTINGS)
    train(engine, plain, 2)
    engine.save(tmp_path / "step_2", {"note": {"step": 2}, "threads": torch.get_num_threads()})
    expected = train(engine, plain, 3)
    weights = sum(float(tensor.double().abs().sum()) for _, tensor in engine.export())
    tokens = json.dumps([sample.tokens.tolist() for sample in plain])
    result = subprocess.run(
        [sys.executable, "-c", RESUME, str(golden("tiny")), str(tmp_path / "step_2"), dtype, recompute or "", tokens],
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


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"algorithm": "sha256", "files": {}}'])
def test_an_unfinished_checkpoint_is_refused(content, saved):
    engine, path = saved
    (path / manifest.MANIFEST).unlink()
    if content is not None:
        (path / manifest.MANIFEST).write_text(content)
    with pytest.raises(BadInput, match=f"step_2: {manifest.MANIFEST}"):
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


# Data


def problem_samples(stream, text):
    """The stream's next batch as samples: each problem is a piece of the text, as long as its number tells."""
    (batch,) = islice(stream, 1)
    numbers = [int(item["prompt"][0]["content"]) for item in batch]
    return [Sequence(text[7 * n : 7 * n + 9 + n].clone(), torch.ones(8 + n)) for n in numbers]


@pytest.mark.parametrize("saved_after", [1, 2, 3, 5, 6])
def test_a_resume_on_the_end_of_a_pass_trains_on_what_would_have_come(saved_after, engine_for, reference, tmp_path):
    """Ten problems, four a batch: batches end a pass in their middle (third), or with it (fifth); see verl#5725,
    where such a resume ran no step at all, verl#3457 and SkyRL#2010, where it began another order."""
    problems = Problems([{"prompt": [{"role": "user", "content": str(n)}], "reward_spec": {}} for n in range(10)])
    text = reference["input_ids"].flatten()

    def run(engine, stream, count):
        steps = []
        for _ in range(count):
            steps += train(engine, problem_samples(stream, text), 1)
        return steps

    stream = ProblemStream(problems, 4, 8, seed=3)
    engine = engine_for(optimizer=SETTINGS)
    run(engine, stream, saved_after)
    engine.save(tmp_path / "saved", {"stream": stream.state_dict(), "step": saved_after})
    expected = run(engine, stream, 8 - saved_after)
    weights = {name: tensor.clone() for name, tensor in engine.export()}
    again = engine_for(optimizer=SETTINGS)
    extra = again.load(tmp_path / "saved")
    fresh = ProblemStream(problems, 4, 8, seed=3)
    fresh.load_state_dict(extra["stream"])
    assert run(again, fresh, 8 - extra["step"]) == expected
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.export())


# Asynchronous saves


def test_an_asynchronous_save_holds_the_moment_it_was_asked_for(engine_for, plain, tmp_path, gate):
    """Training goes on while the files are written: what is written must be a copy."""
    engine = engine_for(optimizer=SETTINGS)
    train(engine, plain, 2)
    opened = gate()
    engine.save(tmp_path / "step_2", {"note": "two"}, asynchronous=True)
    expected = train(engine, plain, 3)
    assert not engine.finalize_saves(blocking=False)
    assert not (tmp_path / "step_2").exists()
    opened.set()
    assert engine.finalize_saves()
    assert engine.finalize_saves(blocking=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert engine.load(tmp_path / "step_2") == {"note": "two"}
    assert train(engine, plain, 3) == expected


def test_cyclic_garbage_is_collected_while_files_are_written(engine_for, tmp_path, gate):
    """Megatron turns the collector off while it writes, and training makes garbage meanwhile."""
    engine = engine_for(optimizer=SETTINGS)
    opened = gate()
    engine.save(tmp_path / "step_1", {}, asynchronous=True)
    garbage = torch.nn.Module()
    garbage.cycle, left = [garbage], weakref.ref(garbage)
    del garbage
    assert not engine.finalize_saves(blocking=False)
    assert left() is None
    opened.set()
    assert engine.finalize_saves()


def test_the_worker_says_whether_its_save_is_complete(engine_for, tmp_path, gate):
    """The driver publishes a checkpoint by what the workers answer, and must not be kept waiting for it."""
    worker = BeamPolicyWorkerBase.__new__(BeamPolicyWorkerBase)
    worker.engine = engine_for(optimizer=SETTINGS)
    opened = gate()
    worker.save_checkpoint(str(tmp_path / "policy"))
    assert not worker.finalize_pending_saves(blocking=False)
    opened.set()
    assert worker.finalize_pending_saves()
    assert (tmp_path / "policy").is_dir()


def test_a_save_copies_nothing_twice_on_the_host(engine_for, plain, tmp_path, monkeypatch):
    """What Megatron has gathered or cloned is nobody else's; only what it hands over as it lies in the engine is."""
    engine = engine_for(optimizer=SETTINGS)
    train(engine, plain, 1)
    requests, handed = [], {}

    def tensors(request):
        return [pair for _, _, (_, pairs) in request.async_fn_args[1] for pair in pairs]

    def save(*arguments, **options):
        requests.append(original(*arguments, **options))
        handed.update({item.index: tensor.data_ptr() for item, tensor in tensors(requests[0])})
        return requests[0]

    original = dist_checkpointing.save
    monkeypatch.setattr(dist_checkpointing, "save", save)
    engine.save(tmp_path / "step_1", {}, asynchronous=True)
    (model,) = engine.models
    live = (*model.parameters(), *model.buffers(), *optimizer.tensors(engine.optimizer))
    ours = {tensor.untyped_storage().data_ptr() for tensor in live}
    kept = [(handed[item.index] in ours, handed[item.index] == copy.data_ptr()) for item, copy in tensors(requests[0])]
    assert set(kept) == {(True, False), (False, True)}, "the engine's own is copied, the rest is not"


def test_the_next_save_and_a_load_complete_the_pending_one(engine_for, plain, tmp_path):
    engine = engine_for(optimizer=SETTINGS)
    for step in (1, 2):
        train(engine, plain, 1)
        engine.save(tmp_path / f"step_{step}", {"step": step}, asynchronous=True)
    assert (tmp_path / "step_1").exists()
    assert engine.load(tmp_path / "step_2") == {"step": 2}


def test_a_process_that_dies_in_an_asynchronous_save_leaves_no_checkpoint(golden, tmp_path):
    """Killed after some files were written, before the folder was closed."""
    result = subprocess.run(
        [sys.executable, "-c", DIE, str(golden("tiny")), str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".step_1.partial"]
    assert any(path.stat().st_size for path in (tmp_path / ".step_1.partial").iterdir())


def test_a_file_that_cannot_be_written_is_an_error_and_the_next_save_works(engine_for, plain, tmp_path, monkeypatch):
    engine = engine_for(optimizer=SETTINGS)

    def full(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem_async, "_write_item", full)
        engine.save(tmp_path / "step_1", {}, asynchronous=True)
        with pytest.raises(CheckpointException, match="Worker failure"):
            engine.finalize_saves()
    assert not (tmp_path / "step_1").exists()
    engine.save(tmp_path / "step_1", {})
    engine.load(tmp_path / "step_1")


# Refusals that offer another checkpoint


@pytest.mark.parametrize("inside", ["", "policy"])
def test_the_newest_whole_checkpoint_is_offered(inside, engine_for, tmp_path):
    """Beside a damaged one: neither another damaged one, nor an unfinished one, nor one of another name."""
    engine = engine_for(optimizer=SETTINGS)
    for step in (2, 9, 10, 11):
        engine.save(tmp_path / f"global_step_{step}" / inside, {})
    engine.save(tmp_path / "best_12" / inside, {})
    (tmp_path / "global_step_12").mkdir()
    for step in (10, 11):
        file = next((tmp_path / f"global_step_{step}" / inside).glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])
    offer = re.escape(f"the newest whole one is {tmp_path / 'global_step_9' / inside}")
    for step in (10, 11, 12):
        with pytest.raises(BadInput, match=f"{offer}$"):
            engine.load(tmp_path / f"global_step_{step}" / inside)
    for step in (2, 9):
        shutil.rmtree(tmp_path / f"global_step_{step}")
    with pytest.raises(BadInput, match=r"\.distcp is damaged; there is no whole one beside it$"):
        engine.load(tmp_path / "global_step_10" / inside)
