"""Checkpoints of a `TrainerEngine`: Megatron's torch_dist format, resharding over layouts, written atomically.

A folder is complete or absent: it is written beside its place under a hidden name, closed with Megatron's integrity
manifest (a SHA-256 of every file), and renamed. Loading verifies the manifest first.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from beam_rl.model.errors import BadInput
from beam_rl.trainer import optimizer

if TYPE_CHECKING:
    from beam_rl.trainer.engine import TrainerEngine

MANIFEST = "integrity.json"
"""Megatron's manifest; written last, so a folder that has it is complete."""


def save(engine: TrainerEngine, path: Path, extra: Mapping[str, Any]) -> None:
    """Write `engine` and `extra` (plain values and tensors, the same on every rank) as the folder `path`."""
    partial = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(engine, loading=False)
    state |= {"extra": dict(extra), "made_by": _identity(engine), "random_layout": _layout()}
    if engine.config.optimizer is not None:
        state["schedule"] = engine.schedule.state_dict()
    dist_checkpointing.save(state, str(partial), verify_integrity=True)
    if dist.get_rank() == 0:
        _sync(partial)
        _replace(partial, path)
    dist.barrier()


def load(engine: TrainerEngine, path: Path) -> dict[str, Any]:
    """Bring `engine` to the state that was saved in `path`; returns the `extra` of `save`."""
    verify(path)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except CheckpointingException as error:
        raise BadInput(f"checkpoint {path}: {error}") from error
    _check_identity(path, common["made_by"], _identity(engine))
    state = _sharded_state(engine, loading=True)
    if common["random_layout"] != _layout():
        del state["random"]  # another layout has other ranks: theirs start from the seed
    state = dist_checkpointing.load(state, str(path))
    for i, model in enumerate(engine.models):
        model.load_state_dict(state[f"model{i}"])
    if engine.config.optimizer is not None:
        optimizer.load_state(engine.optimizer, state["optimizer"])
        engine.schedule.num_steps = 0  # Megatron adds the loaded count to what is there
        engine.schedule.load_state_dict(state["schedule"])
        engine.zero_grad()
    if "random" in state:
        _set_random_state(state["random"])
    return state["extra"]


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint that was written to its end (its files may have been damaged since)."""
    return (path / MANIFEST).is_file()


def verify(path: Path) -> None:
    """Raise `BadInput` naming the folder or the file if `path` is not an undamaged, complete checkpoint."""
    if not path.is_dir():
        raise BadInput(f"checkpoint {path}: no such folder")
    if not is_complete(path):
        raise BadInput(f"checkpoint {path}: {MANIFEST} is missing, so it was never finished; use an earlier one")
    try:
        dist_checkpointing.validation.verify_integrity_manifest(str(path))
    except (CheckpointingException, json.JSONDecodeError, KeyError) as error:
        raise BadInput(f"checkpoint {path} is damaged; use an earlier one: {error}") from error


def prune(folder: Path, keep: int) -> None:
    """Delete what was never finished, and all but the `keep` newest checkpoints of `folder` (names end in a step)."""
    numbered = {}
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith((".partial", ".replaced")):
            shutil.rmtree(path)
        elif (step := re.search(r"(\d+)$", path.name)) and is_complete(path):
            numbered[int(step[1])] = path
    for step_number in sorted(numbered)[: max(0, len(numbered) - keep)]:
        doomed = numbered[step_number]
        (doomed / MANIFEST).unlink()  # first, so that a half-deleted folder is no checkpoint
        shutil.rmtree(doomed)


def _sharded_state(engine: TrainerEngine, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {"random": _random_state()}
    models: dict[str, Any] = {}
    for i, model in enumerate(engine.models):
        models |= {f"model{i}": model.sharded_state_dict(metadata=metadata)}
    if engine.config.optimizer is not None:
        state["optimizer"] = engine.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)
    return state | models


def _identity(engine: TrainerEngine) -> dict[str, Any]:
    """What must be the same when a checkpoint is continued."""
    hf = engine.hf.to_dict()
    identity = {f"model.{key}": hf[key] for key in sorted(hf) if key not in ("transformers_version", "dtype")}
    identity["dtype"] = engine.config.dtype
    settings = engine.config.optimizer
    for key, value in asdict(settings).items() if settings is not None else ():
        if settings is not None and settings.schedule == "constant" and key in ("min_lr", "total_steps", "decay_steps"):
            continue  # a constant schedule never ends, so a run may be made longer
        identity[f"optimizer.{key}"] = list(value) if isinstance(value, tuple) else value
    return identity


def _check_identity(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    for key in sorted(saved.keys() | ours.keys()):
        if saved.get(key) != ours.get(key):
            raise BadInput(
                f"checkpoint {path} has {key} = {saved.get(key)!r}, this run {ours.get(key)!r}:"
                " a checkpoint is continued with the settings that it was made with"
            )


def _layout() -> list[int]:
    """World and sizes of the layout: random states belong to its ranks."""
    return [
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    ]


def _random_state() -> ShardedObject:
    """All random generators of this rank."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _sync(folder: Path) -> None:
    """Force a finished folder to the disk, its directory entries included."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(partial: Path, path: Path) -> None:
    """Move a finished folder to its place, over an older one of that name."""
    old = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)
