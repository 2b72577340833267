"""Processes on one GPU: engines that start together and are measured in turns, and one that tells as it goes."""

import os
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

PATIENCE = 300.0
"""Seconds that an engine waits for the others."""
SILENCE = 210.0
"""Seconds that a process may tell nothing, before it is taken to hang."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests hand functions to engines
    "NCCL_NVLS_ENABLE": "0",  # NVLink's multicast is not everywhere allowed, and gains nothing between two GPUs
}
"""Of the tests' engines, and of the trainer that sends to them."""

Tell = Callable[[str, Any], None]
"""Takes a result's name and value."""


@dataclass
class Turns:
    """How the processes wait for one another."""

    barrier: Any
    lock: Any

    def meet(self) -> bool:
        """Wait until all engines are here; False: one of them has failed, and none will come any more."""
        try:
            self.barrier.wait(PATIENCE)
        except BrokenBarrierError:
            return False
        return True


_turns: Turns


def together(
    jobs: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Run `function(turns, *arguments)` of every job in a process of its own.

    What a process prints goes to `folder/NAME.log`.

    Returns:
        what they returned, by name, and why others failed, with their logs' ends.
    """
    context = get_context("spawn")
    turns = Turns(context.Barrier(len(jobs)), context.Lock())
    logs = {name: _log(folder, name) for name in jobs}
    pools = {name: ProcessPoolExecutor(1, context, _prepare, (logs[name], turns)) for name in jobs}
    results, failed = {}, []
    try:
        futures = {name: pools[name].submit(_call, *jobs[name]) for name in jobs}
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}\n{_said(logs[name])}")
        return results, failed
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)


def streamed(function: Callable[..., None], arguments: tuple[Any, ...], report: Tell, folder: Path) -> str | None:
    """Run `function(tell, *arguments)` in a process of its own; what it tells is reported at once.

    Returns:
        why it failed, with its log's end; None: it did not.
    """
    context = get_context("spawn")
    log = _log(folder, function.__name__)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(sending, log, function, arguments))
    process.start()
    sending.close()
    try:
        while receiving.poll(SILENCE):
            said = receiving.recv()
            if not isinstance(said, tuple):
                return said and f"{said}\n{_said(log)}"
            report(*said)
        return f"{function.__name__} said nothing for {SILENCE:g} s\n{_said(log)}"
    except EOFError:
        return f"the process of {function.__name__} ended before it was done\n{_said(log)}"
    finally:
        process.join(10)
        process.kill()  # a thread may still wait for an engine that will never answer
        process.join()


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-').replace(',', '')}.log"


def _said(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.is_file() else ""


def _prepare(log: Path, turns: Turns | None = None) -> None:
    global _turns
    if turns is not None:
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


def _tell(sending: Connection, log: Path, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    _prepare(log)
    try:
        function(lambda key, value: sending.send((key, value)), *arguments)
    except BaseException as error:
        plain = isinstance(error, AssertionError)  # a check says what is wrong by itself
        sending.send(str(error) if plain else traceback.format_exc())
    else:
        sending.send(None)
