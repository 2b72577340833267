"""The terminal belongs to the run's own words; everything that libraries print goes to a file."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def terminal_apart(log: Path) -> Iterator[TextIO]:
    """Send this process's standard output and error, and its children's, to `log`; yields the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        terminal.close()


def cause(error: BaseException) -> str:
    """The innermost reason of a failure in a line: what a remote process said, not how it reached the driver."""
    while True:
        inner = getattr(error, "cause", None) or error.__cause__
        if not isinstance(inner, BaseException):
            break
        error = inner
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[-1]}"
