"""What a run observes of itself."""

import io
import time
from contextlib import ExitStack

import pytest

from beam_rl import observer
from beam_rl.console import Console
from beam_rl.observer import PeakMemory


def test_memory_that_is_free_again_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at between phases only, the peak left out warm-up, generation, training and export."""
    size = 2**29  # the kernel takes back some of this process's pages at any time
    monkeypatch.setattr(observer, "MEMORY_INTERVAL", 0.2)
    console = Console(io.StringIO())
    with PeakMemory(console) as before:
        pass
    with PeakMemory(console) as memory, console.phase("training"):
        block = bytearray(b"x") * size
        started = time.monotonic()
        while memory.bytes < before.bytes + size / 2:
            assert time.monotonic() < started + 60, "nobody looks"
            time.sleep(0.05)
        del block
        lasted = time.monotonic() - started
    assert memory.bytes >= before.bytes + size / 2
    assert memory.by_phase == {"training": memory.bytes}
    assert console.seconds["training"] >= lasted


def test_a_phase_that_begins_during_a_look_may_be_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(io.StringIO())
    with ExitStack() as phase:

        def look() -> int:
            phase.enter_context(console.phase("training"))
            return 7

        monkeypatch.setattr(observer, "resident_bytes", look)
        with PeakMemory(console) as memory:
            pass
    assert memory.by_phase == {"training": 7}
