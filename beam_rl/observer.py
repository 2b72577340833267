"""What a run tells the outside while it goes on: the metrics file, the console, its own memory."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil

from beam_rl.console import Bar, Console
from beam_rl.metrics import MetricsFile
from beam_rl.recipe import Recipe


class Observed:
    """The run's observer: records into `metrics.jsonl`, lines and bars on the console, times and memory."""

    def __init__(self, recipe: Recipe, console: Console, started: float) -> None:
        self.recipe = recipe
        self.console = console
        self.started = started
        self.metrics = MetricsFile(recipe.run_dir)
        self.startup_seconds: float | None = None
        """Seconds from the process's start to the first training step."""
        self.peak_rss = 0
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
        self.peak_rss = max(self.peak_rss, resident_bytes())

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
        self.peak_rss = max(self.peak_rss, resident_bytes())

    def evaluated(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        self.console.evaluation(record)

    def resumed(self, step: int) -> None:
        self.metrics.rewind(step, time.time())
        self.console.say(f"resumed after step {step}")

    def note(self, text: str) -> None:
        self.console.say(text)


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
