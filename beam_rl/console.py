"""Writes a run's progress: bars on a terminal, plain lines in a file, a pipe or a dumb terminal."""

import io
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.text import Text

from beam_rl import lines
from beam_rl.lines import Opening

PLAIN_INTERVAL = 10.0
"""Seconds between two lines about the same phase, where there is no bar."""


class Bar:
    """The progress of one phase; `Console.phase` makes it."""

    def __init__(self, console: "Console", name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._console = console
        self._lock = threading.Lock()
        self._started = self._last_line = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return time.monotonic() - self._started

    def advance(self, amount: int = 1) -> None:
        """Counts `amount` more units as done; any thread may call it."""
        with self._lock:
            self.done += amount
        if not self._console.show(self) and time.monotonic() - self._last_line >= PLAIN_INTERVAL:
            self._last_line = time.monotonic()
            count = f"{self.done}/{self.total}" if self.total is not None else str(self.done)
            self._console.say(f"{self.name}: {count} after {lines.duration(self.seconds)}")


class Console:
    """Where `beam-rl train` speaks to its user."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows ? for ± and does not end the run
        self._out = RichConsole(file=stream, highlight=False)
        self._bars = self._out.is_terminal and not self._out.is_dumb_terminal
        self._progress: Progress | None = None
        self._tasks: dict[Bar, Any] = {}
        self.seconds: dict[str, float] = {}
        """What each finished phase took, all phases of one name together."""
        self.current: str | None = None
        """The phase that was begun last and goes on."""

    def say(self, text: str | Text) -> None:
        """Prints a line, above the bars if there are any."""
        # Text of our own has no markup, and a log is no place to wrap lines at 80 columns.
        self._out.print(text, soft_wrap=True, markup=False)

    def opening(self, opening: Opening) -> None:
        """Says what is about to happen and roughly how long it takes."""
        self._block(lines.opening_lines(opening))

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Bar]:
        """Shows a phase while the block runs: `with console.phase("warm-up", total=300) as bar: bar.advance()`.

        `total` is in whatever `advance` counts; None where it is not known. Phases may follow or hold each other.
        """
        bar = Bar(self, name, total)
        outer, self.current = self.current, name
        if self._bars:
            if self._progress is None:
                self._progress = _progress(self._out)
                self._progress.start()
            self._tasks[bar] = self._progress.add_task(name, total=total)
        else:
            self.say(f"{name}: started")
        end = "stopped after"
        try:
            yield bar
            end = "done in"
        finally:
            self.current = outer
            self.seconds[name] = self.seconds.get(name, 0.0) + bar.seconds
            self._remove(bar)
            self.say(f"{name}: {end} {lines.duration(bar.seconds)}")

    def step(self, record: Mapping[str, Any], steps: int) -> None:
        """Prints a training step's line; `steps` is the number of steps of the whole run."""
        self.say(lines.step_line(record, steps))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Prints an evaluation's line."""
        self.say(lines.eval_line(record))

    def final(self, summary: Mapping[str, Any], budget: float, run_dir: Path) -> None:
        """Prints the table at the end; `summary` is what `summary.json` holds."""
        self._block(lines.final_lines(summary, budget, run_dir))

    def show(self, bar: Bar) -> bool:
        """Moves the bar on the screen; False where there are no bars."""
        if self._progress is None:
            return False
        self._progress.update(self._tasks[bar], completed=bar.done)
        return True

    def _remove(self, bar: Bar) -> None:
        if self._progress is None:
            return
        self._progress.remove_task(self._tasks.pop(bar))
        if not self._tasks:
            self._progress.stop()
            self._progress = None

    def _block(self, block: Sequence[Text]) -> None:
        self.say("")
        for line in block:
            self.say(line)
        self.say("")


def _progress(out: RichConsole) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeLeftColumn(elapsed_when_finished=True),
        console=out,
        transient=True,  # a finished phase leaves one line behind, not a full bar
        redirect_stdout=False,  # rich would print on the terminal what libraries write to the log
        redirect_stderr=False,
    )
