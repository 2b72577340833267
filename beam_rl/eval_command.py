"""`beam-rl eval`, `beam-rl eval compare` and `beam-rl grade`; their options are in `eval_options`."""

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from beam_rl import lifetime
from beam_rl.console import Console
from beam_rl.eval_lines import comparison, report
from beam_rl.eval_options import PRESETS
from beam_rl.eval_page import render
from beam_rl.evals import sources
from beam_rl.evals.comparison import compare
from beam_rl.evals.endpoint import Endpoint
from beam_rl.evals.files import write_atomically
from beam_rl.evals.grader import grade
from beam_rl.evals.journal import Journal, opened
from beam_rl.evals.results import Results, Sampling, read
from beam_rl.evals.runner import Run, ServerLost, evaluate, sections
from beam_rl.evals.task import Task
from beam_rl.model.errors import BadInput

FINGERPRINT_BYTES = 1 << 20
"""Bytes that are hashed at each end of a weight file."""
GRADE_CHUNK = 64
"""Lines that a thread of `beam-rl grade` takes at a time."""


def eval_command(options: argparse.Namespace) -> int:
    """Evaluate; 0 when every sample has a response, else 1."""
    check_numbers(options)
    task = sources.load(options.task, options.data, options.prompt).first(options.limit)
    sampling = sampling_of(options)
    folder = options.out or Path(f"runs/eval-{task.name}-{datetime.now():%Y%m%d-%H%M%S}")
    if options.model is not None:
        for option in ("api_key_env", "served_model"):
            if getattr(options, option) is not None:
                raise BadInput(f"--{option.replace('_', '-')}: goes with --endpoint, not with --model.")
        if not (options.model / "config.json").is_file():
            raise BadInput(f"--model {options.model}: not a checkpoint folder (it has no config.json).")
    elif options.engine:
        raise BadInput("--engine: goes with --model, not with --endpoint.")
    console = Console(sys.stdout)
    with terminated_as_interrupted(), opened(folder) as journal:
        journal.check(**sections(task, sampling))
        if options.model is None:
            return run(options, task, sampling, journal, console, options.endpoint)
        return run_on_own_server(options, task, sampling, journal, console)


def run_on_own_server(
    options: argparse.Namespace, task: Task, sampling: Sampling, journal: Journal, console: Console
) -> int:
    """Start a server, evaluate, stop it."""
    from beam_rl import eval_server

    where = eval_server.device()
    eval_server.check_seed(where, sampling.seed)
    checkpoint = fingerprint(options.model)
    journal.check(model=checkpoint)
    logs = journal.folder / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / "server.log"
    with lifetime.bounded(logs), ExitStack() as stack:  # a kill of this process ends the server, too
        try:
            with console.phase("start the server"):
                server = stack.enter_context(
                    eval_server.serving(options.model, where, log, options.concurrency, options.engine)
                )
        except eval_server.ServerFailed as error:
            console.say(f"the evaluation failed: {error}")
            return 1
        return run(options, task, sampling, journal, console, server.url, checkpoint, server.died)


def run(
    options: argparse.Namespace,
    task: Task,
    sampling: Sampling,
    journal: Journal,
    console: Console,
    url: str,
    checkpoint: dict[str, str] | None = None,
    died: Callable[[], str | None] = lambda: None,
) -> int:
    """Evaluate against a server that answers, and report."""
    folder = journal.folder
    endpoint = Endpoint(url, key(options.api_key_env), options.served_model, options.timeout)
    total = len(task.problems) * sampling.samples
    with console.phase(f"{task.name}, {len(task.problems)} problems x {sampling.samples}", total) as bar:
        what = Run(
            task=task,
            sampling=sampling,
            endpoint=endpoint,
            concurrency=options.concurrency,
            checkpoint=checkpoint or {},
            died=died,
            progress=lambda done: bar.advance(done - bar.done),
        )
        lost = None
        try:
            results = evaluate(what, journal)
        except ServerLost as error:
            lost = error
        except KeyboardInterrupt:
            console.say(f"interrupted; what is done is kept in {folder}: the same command with --out {folder} goes on")
            write_page(folder)
            return 1
    if lost is not None:
        console.say(f"the evaluation stopped: {lost}")
        console.say(f"what is done is kept in {folder}: the same command with --out {folder} goes on")
        write_page(folder)
        return 1
    write_page(folder, results)
    for line in report(results):
        console.say(line)
    console.say(f"  {folder / 'results.json'}\n  {folder / 'report.html'}")
    return 0 if results.status == "complete" else 1


def compare_command(options: argparse.Namespace) -> int:
    print("\n".join(comparison(compare(read(options.before), read(options.after)))))
    return 0


def grade_command(options: argparse.Namespace) -> int:
    """Print a verdict a line, in the file's order."""
    for verdict in verdicts(options.file):
        print(verdict)
    return 0


def verdicts(file: Path) -> Iterator[str]:
    """The verdict on every line of a file, in order. Raises BadInput before the first one: a line cannot be graded."""
    rows = sources.read_rows(file)
    for number, row in enumerate(rows, 1):
        check_response(row, f"{file}: row {number}")

    def verdict(row: dict[str, Any]) -> str:
        return grade(row["response"], row["answer"], truncated=row.get("truncated", False)).value

    def chunk(start: int) -> list[str]:
        return [verdict(row) for row in rows[start : start + GRADE_CHUNK]]

    with ThreadPoolExecutor(4 * len(os.sched_getaffinity(0))) as threads:
        for found in threads.map(chunk, range(0, len(rows), GRADE_CHUNK)):
            yield from found


def check_response(row: Any, where: str) -> None:
    """Raise BadInput unless a row can be graded."""
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        raise BadInput(f'{where}: needs "response", a text.')
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, int | float | str) or not str(answer).strip():
        raise BadInput(f'{where}: "answer" is {answer!r}: a number or LaTeX is wanted.')
    if not isinstance(row.get("truncated", False), bool):
        raise BadInput(f'{where}: "truncated" is {row["truncated"]!r}: true or false is wanted.')


def check_numbers(options: argparse.Namespace) -> None:
    """Raise BadInput for a number that no run can have."""
    for name, least in (("samples", 1), ("limit", 1), ("max_tokens", 1), ("concurrency", 1), ("timeout", 1)):
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise BadInput(f"--{name.replace('_', '-')} {value}: give at least {least}.")
    if options.temperature is not None and not 0 <= options.temperature <= 2:
        raise BadInput(f"--temperature {options.temperature}: give a number from 0 to 2.")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise BadInput(f"--top-p {options.top_p}: give a number above 0, up to 1.")


def sampling_of(options: argparse.Namespace) -> Sampling:
    """The preset with what was asked for instead."""
    preset, effort = PRESETS[options.preset], options.reasoning_effort
    return Sampling(
        samples=options.samples,
        temperature=preset.temperature if options.temperature is None else options.temperature,
        top_p=preset.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or preset.max_tokens,
        reasoning_effort=preset.reasoning_effort if effort is None else None if effort == "default" else effort,
        seed=options.seed,
    )


def key(variable: str | None) -> str | None:
    """The endpoint's key. Raises BadInput: the variable is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise BadInput(f"--api-key-env {variable}: this variable is not set.")
    return os.environ[variable]


def fingerprint(model: Path) -> dict[str, str]:
    """What tells a checkpoint from another: its path, and hashes of its configuration and its weight files."""
    weights = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        weights.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            weights.update(file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            weights.update(file.read())
    return {
        "path": str(model.absolute()),
        "config_hash": hashlib.sha256((model / "config.json").read_bytes()).hexdigest(),
        "weights_hash": weights.hexdigest(),
    }


def write_page(folder: Path, results: Results | None = None) -> None:
    """Write `report.html`, where there are results."""
    if results is None and not (folder / "results.json").is_file():
        return
    write_atomically(folder / "report.html", render(results or read(folder)))


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: what is done is kept, servers are stopped."""
    before = signal.signal(signal.SIGTERM, lifetime.interrupter())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
