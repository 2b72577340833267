"""Several vLLM engines on one GPU, each in its own process: they start together, and are measured in turns."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PATIENCE = 300.0
"""Seconds that an engine waits for the others."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Of the tests' engines, to which the tests hand functions."""


@dataclass
class Turns:
    """How the processes wait for one another."""

    barrier: Any
    lock: Any

    def meet(self) -> None:
        """Wait until all engines are here."""
        self.barrier.wait(PATIENCE)


Job = Callable[[Turns], Any]
_turns: Turns


def together(jobs: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], folder: Path) -> dict[str, Any]:
    """Run `function(turns, *arguments)` of every job in a process of its own; what they return, by name.

    What a process prints goes to `folder/NAME.log`. Raises RuntimeError with the log's end where one fails.
    """
    context = get_context("spawn")
    turns = Turns(context.Barrier(len(jobs)), context.Lock())
    logs = {name: folder / f"{name.replace(' ', '-').replace(',', '')}.log" for name in jobs}
    pools = {name: ProcessPoolExecutor(1, context, _prepare, (logs[name], turns)) for name in jobs}
    try:
        futures = {name: pools[name].submit(_call, *jobs[name]) for name in jobs}
        results, failed = {}, {}
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except Exception as error:
                failed[name] = error
        if failed:
            # An engine that only waited for another one is not the culprit.
            culprits = {n: e for n, e in failed.items() if "BrokenBarrier" not in type(e).__name__} or failed
            name, error = next(iter(culprits.items()))
            said = logs[name].read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}\n{said}") from error
        return results
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)


def _prepare(log: Path, turns: Turns) -> None:
    global _turns
    _turns = turns
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= ENVIRONMENT


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(_turns, *arguments)
    except BaseException:
        _turns.barrier.abort()
        raise
