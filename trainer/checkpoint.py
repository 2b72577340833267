"""Checkpoints of a `TrainerEngine`: Megatron's torch_dist format, resharding over layouts, written atomically.

A folder is complete or absent: it is written beside its place under a hidden name, closed with Megatron's integrity
manifest (a SHA-256 of every file), and renamed. Loading verifies the manifest first (`manifest`).

Saving has two parts: `begin` copies everything to host memory and starts a thread that writes the files, `PendingSave`
waits for the thread and closes the folder. Megatron offers the same request to processes that it forks or spawns. A
fork of a trainer with the threads of Ray, gRPC and OpenMP inherits their locks in whatever state they are, and the
spawned worker insists on CUDA; a thread that writes files needs neither, because writing releases the interpreter.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from beam_rl.model.errors import BadInput
from beam_rl.trainer import distributed, manifest, optimizer

if TYPE_CHECKING:
    from beam_rl.trainer.engine import TrainerEngine


@dataclass
class PendingSave:
    """A checkpoint on its way to the disk; its methods are collectives of all ranks."""

    path: Path
    """The folder's final name."""
    partial: Path
    """The folder's name until then."""
    writer: Thread
    """Writes this rank's files."""
    request: Any
    """Megatron's, whose last functions gather what the ranks have written and close the folder."""

    def written(self) -> bool:
        """Whether every rank has written its files."""
        writing = torch.tensor(int(self.writer.is_alive()), device=distributed.device())
        dist.all_reduce(writing)
        return int(writing) == 0

    def finish(self) -> None:
        """Wait for the files of all ranks, then close the folder and give it its name.

        Raises what Megatron raises when a file could not be written; the folder then never appears.
        """
        self.writer.join()
        for close in self.request.finalize_fns:
            close()
        if dist.get_rank() == 0:
            _sync(self.partial)
            _replace(self.partial, self.path)
        dist.barrier()


def begin(engine: TrainerEngine, path: Path, extra: Mapping[str, Any]) -> PendingSave:
    """Copy `engine` and `extra` (plain values and tensors, the same on every rank), and start to write `path`.

    Training may go on at once; the folder appears when the result's `finish` has run.
    """
    partial = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(engine, loading=False)
    state |= {"extra": dict(extra), "made_by": _identity(engine), "random_layout": _layout()}
    if engine.config.optimizer is not None:
        state["schedule"] = engine.schedule.state_dict()
    request: Any = dist_checkpointing.save(
        state, str(partial), async_sharded_save=True, async_strategy="mcore", verify_integrity=True
    )
    writer = Thread(target=_write, args=(request, _copied(request)), name=f"save {path.name}", daemon=True)
    writer.start()
    return PendingSave(path, partial, writer, request)


def _copied(request: Any) -> list[Any]:
    """Arguments of the request's writer, every tensor copied to host memory of its own."""
    if request.async_fn is None:  # another rank saves all that this one holds
        return []
    rank, buckets, results = request.async_fn_args
    copies = [
        (file, key, (objects, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]))
        for file, key, (objects, tensors) in buckets
    ]
    return [rank, copies, results]


def _write(request: Any, arguments: list[Any]) -> None:
    if request.async_fn is not None:
        request.async_fn(*arguments, **request.async_fn_kwargs)


def load(engine: TrainerEngine, path: Path) -> dict[str, Any]:
    """Bring `engine` to the state that was saved in `path`; returns the `extra` of `begin`."""
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
        model.load_state_dict(_frozen(engine, model) | state[f"model{i}"])
    if engine.config.optimizer is not None:
        optimizer.load_state(engine.optimizer, state["optimizer"])
        engine.schedule.num_steps = 0  # Megatron adds the loaded count to what is there
        engine.schedule.load_state_dict(state["schedule"])
        engine.zero_grad()
    if "random" in state:
        _set_random_state(state["random"])
    return state["extra"]


def verify(path: Path) -> None:
    """Raise `BadInput` unless `path` is a whole checkpoint: it names the file at fault, and the newest whole one.

    A collective: the first rank reads, and all ranks learn what it found.
    """
    refusal: list[str | None] = [None]
    if dist.get_rank() == 0 and (fault := manifest.fault(path)):
        other = manifest.newest_whole(path)
        offer = f"the newest whole one is {other}" if other else "there is no whole one beside it"
        refusal = [f"checkpoint {path}: {fault}; {offer}"]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise BadInput(refusal[0])


def _sharded_state(engine: TrainerEngine, *, loading: bool) -> dict[str, Any]:
    """Everything that differs between ranks, as Megatron's sharded tensors and objects."""
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
    for i, model in enumerate(engine.models):
        frozen = _frozen(engine, model)
        state[f"model{i}"] = {name: part for name, part in models[f"model{i}"].items() if name not in frozen}
    return state


def _frozen(engine: TrainerEngine, model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters that are not trained: the checkpoint that training started from has them, so ours do not."""
    if engine.config.optimizer is None:
        return {}
    return {name: parameter.data for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _identity(engine: TrainerEngine) -> dict[str, Any]:
    """What must be the same when a checkpoint is continued."""
    hf = engine.hf.to_dict()
    identity = {f"model.{key}": hf[key] for key in sorted(hf) if key not in ("transformers_version", "dtype")}
    identity["dtype"] = engine.config.dtype
    if engine.config.mxfp8 is not None:
        identity |= {f"mxfp8.{key}": value for key, value in asdict(engine.config.mxfp8).items()}
    settings = engine.config.optimizer
    for key, value in asdict(settings).items() if settings is not None else ():
        if settings is not None and settings.schedule == "constant" and key in ("min_lr", "total_steps"):
            continue  # a constant schedule never ends, so a run may be made longer
        identity[f"optimizer.{key}"] = list(value) if isinstance(value, tuple) else value
    if engine.config.lora is not None:
        identity |= {f"lora.{key}": value for key, value in engine.config.lora.identity().items()}
        identity["lora.base"] = engine.base  # the frozen weights are not in the checkpoint
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
        parallel_state.get_expert_tensor_parallel_world_size(),
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
