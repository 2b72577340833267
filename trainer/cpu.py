"""Everything megatron-core 0.19.2 assumes about CUDA, answered by the CPU. Inert where CUDA is present.

Megatron names CUDA in two ways, and each has its own answer:

* It calls `torch.cuda.<function>` (current device, streams, events, random state). Without a GPU those functions only
  ever raise, so `install()` puts CPU answers in their place for this process; `torch.cuda.is_available()` stays false.
* It writes `device="cuda"` and compares `tensor.type()` with `"torch.cuda.FloatTensor"`, in the optimizer, the
  schedules and the gradient clip. `cuda_as_cpu()` is a function mode that reads both as the CPU. It costs a microsecond
  or two a call, so it is entered around those parts of Megatron only and left again for the model's own forward.

Five functions of Megatron need a CPU version of their own (`REPLACED`). `tests/trainer/test_cpu.py` fails when a new
Megatron makes any entry of this module unnecessary or wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Event:
    """A CUDA event on a device that finishes every operation before it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream:
    """The one stream there is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *args: Any) -> _Event:
        return _Event()


_STREAM = _Stream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for calls that only order or release GPU work."""


STUBS: dict[str, Any] = {
    "Event": _Event,
    "Stream": _Stream,
    "current_device": lambda: torch.device("cpu"),
    "current_stream": lambda *_: _STREAM,
    "stream": lambda *_: contextlib.nullcontext(),
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}


def _get_rng_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """CPU version of `tensor_parallel.random._get_cuda_rng_state`."""
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """CPU version of `tensor_parallel.random._set_cuda_rng_state`, which waits for CUDA to start."""
    torch.set_rng_state(new_state)


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """CPU version of `moe_utils.maybe_move_tensor_to_cpu`, which makes the numpy split sizes only from CUDA tensors."""
    return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
    """`filesystem_async.get_write_results_queue` that needs no other process; the original spawns one."""
    return queue.Queue()


def _gather_along_first_dim(
    input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """CPU version of `mappings._gather_along_first_dim`: gloo gathers parts of one size only."""
    if output_split_sizes is None or group.size() == 1:
        return ORIGINALS[_GATHER](input_, group, output_split_sizes, use_global_buffer)
    padded = input_.new_zeros(max(1, *output_split_sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in output_split_sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


_GATHER = "megatron.core.tensor_parallel.mappings._gather_along_first_dim"

REPLACED: dict[str, Callable[..., Any]] = {
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": _get_rng_state,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": _set_rng_state,
    _GATHER: _gather_along_first_dim,
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _move_to_cpu,
    "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue": _results_queue,
}

ORIGINALS: dict[str, Callable[..., Any]] = {}
"""What `REPLACED` took the place of."""


def install() -> None:
    """Let Megatron run in this process without CUDA. Idempotent; does nothing where CUDA is available."""
    if torch.cuda.is_available() or torch.cuda.current_device is STUBS["current_device"]:
        return
    with _no_compiler():
        modules = {name: importlib.import_module(name.rpartition(".")[0]) for name in REPLACED}
    for name, stub in STUBS.items():
        setattr(torch.cuda, name, stub)
    for name, module in modules.items():
        function = name.rpartition(".")[2]
        ORIGINALS[name] = getattr(module, function)
        setattr(module, function, REPLACED[name])


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """Import Megatron with `torch.compile` as the identity: its `jit_fuser` decorates small helpers at import.

    A machine without a GPU need not have a C++ compiler, and importing the compiler alone takes two seconds.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found": we know
    compile_ = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).* not installed.*")
            yield
    finally:
        torch.compile = compile_
    if dynamo := sys.modules.get("torch._dynamo"):  # Megatron, or something else, was imported earlier
        dynamo.config.disable = True


class _CudaAsCpu(TorchFunctionMode):
    """Reads `device="cuda"` as the CPU, and gives CPU tensors the type names that Megatron compares with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **(kwargs or {}))


def cuda_as_cpu() -> contextlib.AbstractContextManager[Any]:
    """Around Megatron's optimizer, schedules and checkpoints: `"cuda"` in their code means the CPU."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaAsCpu()


def without_mode() -> contextlib.AbstractContextManager[Any]:
    """Inside `cuda_as_cpu()`, around the model's forward: its many small operations need no translation."""
    return contextlib.nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction()
