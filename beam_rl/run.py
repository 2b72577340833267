"""`beam-rl train`: a recipe from start to end, in one folder."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import psutil

from beam_rl import checks, lifetime
from beam_rl.console import Bar, Console
from beam_rl.lines import Opening
from beam_rl.metrics import MetricsFile, summary, write_atomically
from beam_rl.model.errors import BadInput
from beam_rl.problems import Problems
from beam_rl.recipe import Recipe


def train(recipe: Recipe, resume: bool) -> int:
    """Run the recipe; returns the exit code. Raises BadInput before Ray starts."""
    started = psutil.Process().create_time()
    inputs = None if recipe.beam.tiny is not None else checks.inputs(recipe)
    logs = recipe.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not resume:
        write_atomically(recipe.run_dir / "recipe.yaml", recipe.to_yaml())
    with terminal_apart(logs / "driver.log") as terminal:
        console = Console(terminal)
        console.opening(opening(recipe, resume))
        try:
            with lifetime.bounded(logs) as temp_dir:
                if recipe.beam.tiny is not None:
                    recipe = prepare_tiny(recipe, console)
                    inputs = checks.inputs(recipe, console.say)
                assert inputs is not None
                observed = run(recipe, inputs, temp_dir, console, started)
        except BadInput:
            raise
        except KeyboardInterrupt:
            console.say(f"interrupted; go on with: beam-rl train --resume {recipe.run_dir}")
            return 1
        except Exception as error:
            logging.getLogger(__name__).exception("the run failed")
            console.say(f"the run failed: {cause(error)}\nlogs: {logs}")
            return 1
        finish(recipe, console, observed)
        return 1 if observed.stopped else 0


def opening(recipe: Recipe, resume: bool) -> Opening:
    """What the run is about to do; expected times are those of the quick start on two cores."""
    trainer, generator = recipe.trainer, recipe.generator
    responses = trainer.train_batch_size * generator.n_samples_per_prompt
    tiny = recipe.beam.tiny
    model = "a tiny Beam, warmed up on worked solutions" if tiny is not None else str(recipe.model_path)
    facts = [
        ("model", model),
        ("step", f"{trainer.train_batch_size} prompts x {generator.n_samples_per_prompt} samples = {responses} "
                 f"responses, {recipe.updates_per_step} updates"),
        ("precision", f"{recipe.beam.precision}, R3 {'on' if recipe.beam.r3 else 'off'}, gap budget "
                      f"{recipe.beam.gap.budget:g} nats a token ({recipe.beam.gap.action})"),
        ("run folder", str(recipe.run_dir)),
    ]  # fmt: skip
    small = recipe.beam.device == "cpu" and tiny is not None
    phases = [
        *([("warm-up (cached)" if cached(recipe) else "warm-up", 0.0 if cached(recipe) else 150.0)] if tiny else []),
        ("start-up", 60.0 if small else 0.0),
        ("evaluation", 6.0 if small else 0.0),
        ("training", 2.5 * recipe.steps if small else 0.0),
        ("evaluation", 6.0 if small else 0.0),
        ("export and report", 2.0 if small else 0.0),
    ]
    verb = "Resumes" if resume else "Trains"
    return Opening(f"{verb} {recipe.name} with DAPO: {recipe.steps} steps.", facts, phases)


def cached(recipe: Recipe) -> bool:
    """Whether the tiny model of this recipe is made already."""
    from beam_rl import tiny

    settings = recipe.beam.tiny
    if settings is None:
        return False
    dtype = "bfloat16" if recipe.beam.precision == "bf16" else "float32"
    return (Path(settings.cache_dir).expanduser() / tiny.cache_key(settings, recipe.trainer.seed, dtype)).is_dir()


def prepare_tiny(recipe: Recipe, console: Console) -> Recipe:
    """Make the tiny model and its problems, or find them in the cache; returns the recipe that names them."""
    from beam_rl import tiny

    assert recipe.beam.tiny is not None
    if cached(recipe):
        model = tiny.prepare(recipe, lambda done, total, note: None)
    else:
        with console.phase("warm-up", recipe.beam.tiny.warmup_steps) as bar:
            model = tiny.prepare(recipe, lambda done, total, note: bar.advance(done - bar.done))
    return recipe.with_values(
        trainer__policy__model__path=str(model),
        data__train_data=[str(model.parent / "train.jsonl")],
        data__val_data=[str(model.parent / "held_out.jsonl")],
    )


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
        self.starting: Any = None
        self.training: Bar | None = None
        self._phases: list[Any] = []

    def begin(self, name: str, total: int | None = None) -> Bar:
        """Show a phase until the next one begins or `end` is called."""
        self.end()
        phase = self.console.phase(name, total)
        self._phases.append(phase)
        return phase.__enter__()

    def end(self, error: bool = False) -> None:
        """Take the current phase off the screen."""
        while self._phases:
            self._phases.pop().__exit__(None, None, None)

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
        self.peak_rss = max(self.peak_rss, resident_bytes())

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


def run(
    recipe: Recipe, inputs: tuple[Any, Problems, Problems | None], temp_dir: Path, console: Console, started: float
) -> Observed:
    """Everything that needs Ray."""
    tokenizer, problems, held_out = inputs
    observed = Observed(recipe, console, started)
    observed.begin("start-up")
    try:
        # Start-up is imports. Ray starts while the driver imports SkyRL; servers and the policy's process import
        # while the driver goes on.
        importing = threading.Thread(target=import_module, args=("beam_rl.experiment",))
        importing.start()
        from beam_rl import launch, registries, servers

        with launch.ray_session(recipe, temp_dir, recipe.run_dir / "logs"):
            recipe = with_profile(recipe)
            config = recipe.skyrl()
            started_servers = servers.start(config, single=recipe.beam.device == "cpu")
            importing.join()
            experiment_module = import_module("beam_rl.experiment")
            held = registries.start(experiment_module.REGISTRIES)
            experiment_module.check_config(config)
            experiment = experiment_module.BeamExperiment(
                recipe, config, tokenizer, problems, held_out, started_servers, observed
            )
            try:
                experiment.run()
                observed.stopped = experiment.trainer.monitor.stop
                observed.begin("export")
                experiment.export()
            finally:
                started_servers.shutdown()
                del held
    finally:
        observed.end()
    return observed


def with_profile(recipe: Recipe) -> Recipe:
    """The recipe with the rollout engine's arguments filled in; those the recipe gives win."""
    from beam_rl.rollout.profile import engine_init_kwargs

    given = recipe.generator.inference_engine.engine_init_kwargs
    complete = recipe.with_values(
        generator__inference_engine__engine_init_kwargs=engine_init_kwargs(recipe.beam.device) | given
    )
    # SkyRL works on token ids; text is needed only to find stop strings.
    for name in ("sampling_params", "eval_sampling_params"):
        params = getattr(recipe.generator, name)
        if params.stop is None:
            extra = {"detokenize": False} | (params.additional_kwargs or {})
            complete = complete.with_values(**{f"generator__{name}__additional_kwargs": extra})
    return complete


def finish(recipe: Recipe, console: Console, observed: Observed) -> None:
    """Write `summary.json` and `report.html`, print the table."""
    from beam_rl.report import write_report

    numbers = summary(
        recipe,
        observed.metrics.records("step"),
        observed.metrics.records("eval"),
        observed.startup_seconds or 0.0,
        observed.peak_rss,
    )
    write_atomically(recipe.run_dir / "summary.json", json.dumps(numbers, indent=1) + "\n")
    write_report(recipe.run_dir)
    console.final(numbers, recipe.beam.gap.budget, recipe.run_dir)


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


def resident_bytes() -> int:
    """Resident memory of this process and all its descendants, shared pages counted once (PSS where readable)."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
