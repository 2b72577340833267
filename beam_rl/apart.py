"""A function in a process of its own, whose output goes to a log: for what imports vLLM or Megatron."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from beam_rl.model.errors import BadInput


def call[**P, T](function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """`function(*arguments, **named)`, all picklable, in a new process. Raises what it raises.

    Raises:
        RuntimeError: the process ended without a result, or failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="beam-rl-") as folder:
        log = Path(folder) / "log"
        try:
            with ProcessPoolExecutor(1, get_context("spawn"), _redirect, (log,)) as pool:
                return pool.submit(function, *arguments, **named).result()
        except (BadInput, KeyboardInterrupt):
            raise
        except Exception as error:
            said = log.read_text(errors="replace")[-3000:] if log.is_file() else ""
            what = (
                "the process was killed" if isinstance(error, BrokenProcessPool) else f"{type(error).__name__}: {error}"
            )
            raise RuntimeError(f"{function.__module__}.{function.__qualname__}: {what}\n{said}".rstrip()) from error


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
