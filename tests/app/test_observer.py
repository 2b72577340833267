"""What a run observes of itself."""

import time

from beam_rl.observer import PeakMemory


def test_memory_that_is_free_again_was_counted() -> None:
    """Looked at between phases only, the peak left out warm-up, generation, training and export."""
    size = 200 * 2**20
    with PeakMemory() as before:
        pass
    with PeakMemory() as memory:
        block = bytearray(b"x") * size
        time.sleep(2.5)
        del block
    assert memory.bytes > before.bytes + size * 0.9
