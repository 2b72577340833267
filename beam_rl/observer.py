"""What a run tells the outside while it goes on: the metrics file, the console; and what memory it takes."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import psutil

from beam_rl.console import Bar, Console
from beam_rl.metrics import MetricsFile
from beam_rl.recipe import Recipe


class Observed:
    """The run's observer: records into `metrics.jsonl`, lines and bars on the console, times."""

    def __init__(self, recipe: Recipe, console: Console, started: float) -> None:
        self.recipe = recipe
        self.console = console
        self.started = started
        self.metrics = MetricsFile(recipe.run_dir)
        self.startup_seconds: float | None = None
        """Seconds from the process's start to the first training step."""
        self.stopped = False
        """Whether the gap monitor ended the run early."""
        self.training: Bar | None = None
        self._phase: AbstractContextManager[Bar] | None = None

    def begin(self, name: str, total: int | None = None) -> Bar:
        """Show a phase until the next one begins or `end` is called."""
        self.end()
        self._phase = self.console.phase(name, total)
        return self._phase.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        """Take the current phase off the screen; with `error`, as one that did not finish."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def step_started(self, step: int) -> None:
        if self.startup_seconds is None:
            self.startup_seconds = time.time() - self.started
            self.training = self.begin("training", self.recipe.steps)
            self.training.advance(step - 1)

    def step(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        self.console.step(record, self.recipe.steps)
        assert self.training is not None
        self.training.advance()

    @contextmanager
    def evaluating(self, step: int, responses: int) -> Iterator[Any]:
        if step == 0:
            self.end()
        with self.console.phase(f"evaluation after step {step}" if step else "evaluation", responses) as bar:
            yield bar.advance

    def evaluated(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        self.console.evaluation(record)

    def resumed(self, step: int) -> None:
        self.metrics.rewind(step, time.time())
        self.console.say(f"resumed after step {step}")

    def note(self, text: str) -> None:
        self.console.say(text)


MEMORY_INTERVAL = 5.0
"""Seconds between two looks at the memory; each reads every process's page tables."""


class PeakMemory:
    """The largest `resident_bytes` while the block ran, looked at by a thread; also of each of the console's phases."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bytes = 0
        self.by_phase: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            before, now, after = self.console.current, resident_bytes(), self.console.current
            self.bytes = max(self.bytes, now)
            for phase in {before, after}:  # a look takes a while: what began meanwhile may be what was seen
                if phase is not None:
                    self.by_phase[phase] = max(self.by_phase.get(phase, 0), now)
            over = self._done.wait(MEMORY_INTERVAL)


def resident_bytes() -> int:
    """Resident memory of this process and all its descendants; shared pages are divided among their users (PSS)."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
