"""Run by `test_checkpoint_ranks.py` in two processes: what they share of a checkpoint's work, and how they agree."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from beam_rl.model.config import load_config
from beam_rl.model.errors import BadInput
from beam_rl.trainer import manifest
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Parallel, Sequence, TrainerEngine

# isort: split
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import save_integrity_manifest, verify_integrity_manifest

SAMPLES = [Sequence(torch.arange(3, 20), torch.ones(16)), Sequence(torch.arange(40, 50), torch.ones(9))]


def train(engine: TrainerEngine) -> float:
    """Loss of one step."""
    found = engine.forward_backward(SAMPLES, lambda logprobs, *_: (-logprobs.sum() / 100, {}), replay=False)["loss"]
    engine.optimizer_step()
    return found


def everyones(value: Any) -> list[Any]:
    """The value of both ranks."""
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values


@contextmanager
def hashed(fails: bool = False) -> Iterator[list[tuple[str, str]]]:
    """Names of the files that this rank hashes inside the block, and of the threads; or a disk that `fails`."""
    seen: list[tuple[str, str]] = []
    original = manifest.digest

    def digest(file: Path) -> str:
        if fails:
            raise OSError(5, "Input/output error")
        seen.append((file.name, threading.current_thread().name))
        return original(file)

    manifest.digest = digest
    try:
        yield seen
    finally:
        manifest.digest = original


@contextmanager
def held_back(holds: bool) -> Iterator[threading.Event]:
    """A writer's thread that, where it `holds`, waits at its first tensor until the event is set."""
    opened, original = threading.Event(), filesystem_async._write_item

    @functools.wraps(original)  # Megatron looks at its parameters
    def waiting(*arguments: Any, **options: Any) -> Any:
        assert not holds or opened.wait(timeout=100)
        return original(*arguments, **options)

    filesystem_async._write_item = waiting
    try:
        yield opened
    finally:
        filesystem_async._write_item = original


def refusal(engine: TrainerEngine, path: Path) -> str:
    """What both ranks say of a checkpoint, which is the same."""
    with pytest.raises(BadInput) as caught:
        engine.load(path)
    first, second = everyones(str(caught.value))
    assert first == second
    return first


def each_rank_hashes_what_it_wrote(engine: TrainerEngine, folder: Path, rank: int) -> None:
    with hashed() as seen:
        engine.save(folder / "step_1", {"note": 1})
    written = [(f"__{rank}_0.distcp", "save step_1")]
    assert sorted(seen) == sorted(
        written + ([(".metadata", "MainThread"), ("metadata.json", "MainThread")] if rank == 0 else [])
    )


def the_manifest_is_megatrons(folder: Path, rank: int) -> None:
    verify_integrity_manifest(str(folder / "step_1"))
    if rank == 0:
        file = folder / "step_1" / manifest.MANIFEST
        ours = file.read_text()
        save_integrity_manifest(str(folder / "step_1"))
        assert file.read_text() == ours
    dist.barrier()


def each_rank_verifies_a_share(engine: TrainerEngine, folder: Path) -> None:
    """Of a checkpoint whose manifest Megatron has written, as those of earlier versions."""
    with hashed() as seen:
        assert engine.load(folder / "step_1") == {"note": 1}
    shares = everyones([name for name, _ in seen])
    assert all(shares)
    files = [path.name for path in (folder / "step_1").iterdir() if path.name != manifest.MANIFEST]
    assert sorted(shares[0] + shares[1]) == sorted(files)


def a_fault_that_one_rank_finds_is_everyones(engine: TrainerEngine, folder: Path, rank: int) -> None:
    engine.save(folder / "step_2", {})
    with hashed(fails=rank == 1):
        message = refusal(engine, folder / "step_2")
    assert "cannot be read (Input/output error)" in message
    for name in ("__0_0.distcp", "__1_0.distcp"):  # one is in each rank's share
        file = folder / "step_2" / name
        whole = file.read_bytes()
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        dist.barrier()
        message = refusal(engine, folder / "step_2")
        assert message.endswith(f"its file {name} is damaged; the newest whole one is {folder / 'step_1'}")
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole)
        dist.barrier()


def nobody_closes_a_folder_that_one_rank_still_writes(engine: TrainerEngine, folder: Path, rank: int) -> None:
    """Neither training nor memory that is lent to the rollout touches what is being written."""
    with held_back(rank == 1) as opened:
        engine.save(folder / "step_3", {}, asynchronous=True)
        assert engine._pending is not None
        if rank == 0:
            engine._pending.digests.result()
        assert not engine.finalize_saves(blocking=False)
        engine.offload()
        engine.backload()
        expected = train(engine), train(engine)
        assert not engine.finalize_saves(blocking=False)
        assert not (folder / "step_3").exists()
        opened.set()
        engine._pending.digests.result()
        dist.barrier()
        assert engine.finalize_saves(blocking=False)
    assert (folder / "step_3").is_dir()
    engine.load(folder / "step_3")
    assert (train(engine), train(engine)) == expected


def a_file_that_cannot_be_read_back_ends_the_save_everywhere(engine: TrainerEngine, folder: Path, rank: int) -> None:
    with hashed(fails=rank == 1), pytest.raises(OSError, match=r"step_4: .*Input/output error"):
        engine.save(folder / "step_4", {})
    assert not (folder / "step_4").exists()
    engine.save(folder / "step_4", {})
    engine.load(folder / "step_4")


def main(model: Path, folder: Path) -> None:
    rank = dist.get_rank()
    parallel = Parallel(tp=2, etp=2)
    engine = TrainerEngine(EngineConfig(dtype="float32", parallel=parallel, optimizer=OptimizerSettings(lr=1e-3)))
    engine.build(load_config(model))
    engine.load_hf(model)
    each_rank_hashes_what_it_wrote(engine, folder, rank)
    the_manifest_is_megatrons(folder, rank)
    each_rank_verifies_a_share(engine, folder)
    a_fault_that_one_rank_finds_is_everyones(engine, folder, rank)
    nobody_closes_a_folder_that_one_rank_still_writes(engine, folder, rank)
    a_file_that_cannot_be_read_back_ends_the_save_everywhere(engine, folder, rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
