"""The run's processes end with the driver, whether it returns, fails, or is killed.

Every process that the run starts inherits two environment variables: a marker by which the watchdog finds it, and
SPT_NOENV, which keeps setproctitle (Ray, vLLM) from overwriting the environment in /proc.
"""

import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from beam_rl import watchdog

TOGETHER_SECONDS = 1.0
"""Signals that follow each other faster are one."""


@contextmanager
def bounded(log_dir: Path) -> Iterator[Path]:
    """Start the watchdog, mark this process's future children, and wait at the end until none of them is left.

    Yields the run's temporary folder, which is also TMPDIR for the children. SIGTERM ends the block as Ctrl-C does; a
    signal that is ignored, as SIGINT in a shell's background, stays so.
    """
    marker = secrets.token_hex(8)
    temp_dir = Path(tempfile.mkdtemp(prefix="beam-rl-"))  # short: Ray puts sockets below it (107 bytes at most)
    dog = subprocess.Popen(
        [sys.executable, "-S", "-E", watchdog.__file__, marker, str(temp_dir), str(log_dir)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    changes = {watchdog.VARIABLE: marker, "SPT_NOENV": "1", "TMPDIR": str(temp_dir)}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    interrupt, previous = interrupter(), {}
    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(each) != signal.SIG_IGN:
                previous[each] = signal.signal(each, interrupt)
        yield temp_dir
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler or signal.SIG_DFL)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        assert dog.stdin is not None
        dog.stdin.close()
        dog.wait()


def interrupter() -> Callable[[int, object], None]:
    """A handler of signals that raises KeyboardInterrupt, once for those that come together.

    `timeout` signals its child and then the child's process group: the second would break the first one's clean-up.
    """
    last = -math.inf

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > TOGETHER_SECONDS:
            raise KeyboardInterrupt

    return interrupt
