"""Checkpoints of a `TrainerEngine`: Megatron's torch_dist format, resharding over layouts, written atomically.

A folder is complete or absent: it is written beside its place under a hidden name, closed with an integrity manifest
(a SHA-256 of every file, in Megatron's format), and renamed. Loading verifies the manifest first (`manifest`). Megatron
would hash and verify everything on the first rank; here each rank hashes what it wrote, and verifies a share.

Saving has two parts: `begin` copies everything to host memory, once, and starts a thread that writes and hashes the
files, `PendingSave` waits for the thread and closes the folder. Megatron offers the same request to processes that it
forks or spawns. A fork of a trainer with the threads of Ray, gRPC and OpenMP inherits their locks in whatever state
they are, and the spawned worker insists on CUDA; a thread needs neither, because writing and hashing release the
interpreter.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
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
from beam_rl.trainer import checkpoint_optimizer, manifest, optimizer

if TYPE_CHECKING:
    from beam_rl.trainer.engine import TrainerEngine

_ALONE = 2
"""Uses of a storage that one tensor has: the tensor's, and the handle's through which they are counted."""
_ALIGNMENT = 64
"""Bytes that the place of a copy in host memory is a multiple of."""


class HostMemory:
    """Host memory for an engine's copies, kept between saves: faulting in fresh memory takes longer than copying."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def of(self, size: int) -> np.ndarray:
        """So many bytes; the last save's, where that had the same size."""
        if len(self._bytes) != size:
            self._bytes = np.empty(0, np.uint8)  # frees them first
            self._bytes = np.empty(size, np.uint8)
        return self._bytes


@dataclass
class PendingSave:
    """A checkpoint on its way to the disk; its methods are collectives of all ranks."""

    path: Path
    """The folder's final name."""
    partial: Path
    """The folder's name until then."""
    digests: Future[dict[str, str]]
    """SHA-256 of this rank's files by name, once its thread has written them."""
    close: list[Callable[[], None]]
    """Megatron's last functions, which gather what the ranks have written and say so in the folder."""

    def written(self) -> bool:
        """Whether every rank has written its files. A flag of the host: the rollout may hold the device's memory."""
        writing = torch.tensor(int(not self.digests.done()))
        dist.all_reduce(writing)
        return int(writing) == 0

    def finish(self) -> None:
        """Wait for the files of all ranks, then close the folder and give it its name.

        Raises on every rank what Megatron raises when a file could not be written, and OSError when one could not be
        read back or the folder not be closed; it then never appears.
        """
        error = self.digests.exception()
        try:
            for close in self.close:
                close()
        except Exception as failure:
            raise failure from error
        parts = _gathered(repr(error) if error else self.digests.result())
        _agree(self.path, [part for part in parts if isinstance(part, str)], error)
        digests = {name: digest for part in parts for name, digest in part.items()}
        _on_first_rank(self.path, partial(self._name, digests))

    def _name(self, digests: Mapping[str, str]) -> None:
        manifest.write(self.partial, digests)
        _sync(self.partial)
        _replace(self.partial, self.path)


def begin(engine: TrainerEngine, path: Path, extra: Mapping[str, Any]) -> PendingSave:
    """Copy `engine` and `extra` (plain values and tensors, the same on every rank), and start to write `path`.

    Training may go on at once; the folder appears when the result's `finish` has run.
    """
    unfinished = path.with_name(f".{path.name}.partial")
    _on_first_rank(path, partial(_make_empty, unfinished))
    request = _request(engine, unfinished, extra)
    _copy(engine, request)
    digests: Future[dict[str, str]] = Future()
    Thread(target=_write, args=(request, digests), name=f"save {path.name}", daemon=True).start()
    return PendingSave(path, unfinished, digests, request.finalize_fns)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _on_first_rank(path: Path, work: Callable[[], None]) -> None:
    """Do work on the checkpoint `path` on the first rank; the others wait, and learn whether it failed."""
    error: OSError | None = None
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as failure:
            error = failure
    _agree(path, [one for one in _gathered(error and repr(error)) if one], error)


def _agree(path: Path, failures: list[str], error: BaseException | None) -> None:
    """Raise the first of all ranks' failures, on all of them."""
    if failures:
        raise OSError(f"checkpoint {path}: {failures[0]}") from error


def _request(engine: TrainerEngine, folder: Path, extra: Mapping[str, Any]) -> Any:
    """Megatron's request to write into a folder; nothing else holds what was gathered for it."""
    state = _sharded_state(engine, loading=False)
    state |= {"extra": dict(extra), "made_by": _identity(engine), "random_layout": _layout()}
    if engine.config.optimizer is not None:
        state["schedule"] = engine.schedule.state_dict()
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")


def _buckets(request: Any) -> list[Any]:
    """What the request writes on this rank: a path, its name, and (objects, tensors) a file."""
    return request.async_fn_args[1] if request.async_fn is not None else []  # another rank saves all that this one has


def _copy(engine: TrainerEngine, request: Any) -> None:
    """Put tensors in host memory of their own into the request, which then holds neither the engine's nor the GPU's."""
    buckets = _buckets(request)
    lent = [tensor for _, _, (_, tensors) in buckets for _, tensor in tensors if not _alone(tensor)]
    ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in lent))
    memory = engine.host_memory.of(ends[-1] if ends else 0)
    copies = {}
    for tensor, start in zip(lent, (0, *ends), strict=False):
        place = torch.from_numpy(memory[start : start + tensor.nbytes])  # a storage of that size: all of it is written
        copies[tensor] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    buckets[:] = [
        (file, name, (objects, [(item, copies.get(tensor, tensor)) for item, tensor in tensors]))
        for file, name, (objects, tensors) in buckets
    ]


def _alone(tensor: Tensor) -> bool:
    """Whether a tensor lies in host memory that nothing else uses, as what Megatron has cloned there does."""
    return tensor.is_cpu and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _ALONE


def _write(request: Any, digests: Future[dict[str, str]]) -> None:
    """Write and hash this rank's files; an error is for `finish` to raise, on every rank."""
    try:
        if request.async_fn is not None:
            request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
        digests.set_result({name: manifest.digest(Path(file)) for file, name, _ in _buckets(request)})
    except BaseException as error:
        digests.set_exception(error)


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

    A collective: each rank reads a share of the files, and all ranks learn what any of them found.
    """
    fault = _fault(path)
    if fault is None:
        return
    others = _gathered(manifest.beside(path))[0]  # the first rank's list, so that all look at the same ones
    whole = next((other for other in others if _fault(other) is None), None)
    offer = f"the newest whole one is {whole}" if whole else "there is no whole one beside it"
    raise BadInput(f"checkpoint {path}: {fault}; {offer}")


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, by the first rank that found something; None if it is whole."""
    faults = _gathered(manifest.fault(path, dist.get_rank(), dist.get_world_size()))
    return next((fault for fault in faults if fault is not None), None)


def _gathered(value: Any) -> list[Any]:
    """Every rank's value, in their order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
    if engine.config.optimizer is not None and loading:
        state["optimizer"] = engine.optimizer.sharded_state_dict(models, is_loading=True, metadata=metadata)
    elif engine.config.optimizer is not None:
        state["optimizer"] = checkpoint_optimizer.sharded_state(engine.optimizer, models)
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
