"""`beam-rl train`: a recipe from start to end, in one folder."""

import gc
import json
import threading
import traceback
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from beam_rl import checkpoints, folder, inputs, lifetime, precision
from beam_rl.console import Console
from beam_rl.evals.files import write_atomically
from beam_rl.lines import Opening
from beam_rl.metrics import summary
from beam_rl.model.errors import BadInput
from beam_rl.observer import Observed, PeakMemory
from beam_rl.problems import Problems
from beam_rl.recipe import Recipe
from beam_rl.terminal import cause, terminal_apart
from beam_rl.warmup import cached, prepare_tiny


def train(recipe: Recipe, resume: bool) -> int:
    """Run the recipe; returns the exit code. Raises BadInput before anything is trained."""
    started = psutil.Process().create_time()
    read = None if recipe.beam.tiny is not None else inputs.load(recipe)
    recipe, made = (recipe, False) if resume else folder.claim(recipe)
    logs = recipe.run_dir / "logs"
    with ExitStack() as stack:
        stack.enter_context(folder.held(recipe.run_dir))
        stack.enter_context(folder.recorded(recipe, made))
        logs.mkdir(exist_ok=True)
        terminal = stack.enter_context(terminal_apart(logs / "driver.log"))
        stack.callback(gc.collect)  # SkyRL's unfinished bars are printed once more, when they are collected
        console = Console(terminal)
        memory = stack.enter_context(PeakMemory(console))
        console.opening(opening(recipe, resume))
        try:
            with lifetime.bounded(logs) as temp_dir:
                if recipe.beam.tiny is not None:
                    recipe = prepare_tiny(recipe, console)
                    read = inputs.load(recipe, console.say)
                assert read is not None
                observed = run(recipe, read, temp_dir, console, started)
        except BadInput:
            raise
        except KeyboardInterrupt:
            saved = checkpoints.latest(recipe.run_dir / "checkpoints")
            remedy = (
                f"go on with: beam-rl train --resume {recipe.run_dir}" if saved else "no checkpoint was written yet"
            )
            console.say(f"interrupted; {remedy}")
            return 1
        except Exception as error:
            traceback.print_exc()  # into the log; loguru's queue cannot take every remote exception
            console.say(f"the run failed: {cause(error)}\nlogs: {logs}")
            return 1
        finish(recipe, console, observed, memory)
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
                      f"{recipe.beam.gap_budget:g} nats a token ({recipe.beam.gap.action})"),
        ("run folder", str(recipe.run_dir)),
    ]  # fmt: skip
    small = recipe.beam.device == "cpu" and tiny is not None
    phases = [
        *([("warm-up (cached)" if cached(recipe) else "warm-up", 0.0 if cached(recipe) else 230.0)] if tiny else []),
        ("start-up", 45.0 if small else 0.0),
        ("evaluation", 5.0 if small else 0.0),
        ("training", 2.2 * recipe.steps if small else 0.0),
        ("evaluation", 5.0 if small else 0.0),
        ("export and report", 2.0 if small else 0.0),
    ]
    verb = "Resumes" if resume else "Trains"
    return Opening(f"{verb} {recipe.name} with DAPO: {recipe.steps} steps.", facts, phases)


def run(
    recipe: Recipe, read: tuple[Any, Problems, Problems | None], temp_dir: Path, console: Console, started: float
) -> Observed:
    """Everything that needs Ray."""
    tokenizer, problems, held_out = read
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
            if recipe.trainer.placement.colocate_all:
                importing.join()  # the GPUs are SkyRL's to find, and two threads must not import it at once
            starting = servers.start(recipe)
            importing.join()
            module = import_module("beam_rl.experiment")
            held = registries.start(module.REGISTRIES)
            config = recipe.skyrl()
            try:
                module.check_config(config)  # not before Ray: it needs SkyRL's imports, beside which Ray starts
                (recipe.run_dir / "summary.json").unlink(missing_ok=True)  # of a run that now goes on
                experiment = module.BeamExperiment(recipe, config, tokenizer, problems, held_out, starting, observed)
                try:
                    experiment.run()
                finally:
                    experiment.close()
                observed.stopped = experiment.trainer.monitor.stop
                observed.begin("export")
                experiment.export()
            finally:
                starting.shutdown()
                del held
    except BaseException as error:
        observed.end(error)
        raise
    observed.end()
    return observed


def with_profile(recipe: Recipe) -> Recipe:
    """The recipe with the rollout engine's arguments filled in; those the recipe gives win."""
    pushed = recipe.generator.inference_engine.weight_sync_backend == "nccl"  # SkyRL's others pull, and are its own
    separate = pushed and not recipe.trainer.placement.colocate_all
    arguments = precision.engine_arguments(recipe, recipe.beam.precision, separate=separate)
    given = recipe.generator.inference_engine.engine_init_kwargs
    complete = recipe.with_values(generator__inference_engine__engine_init_kwargs=arguments | given)
    # SkyRL works on token ids; text is needed only to find stop strings.
    for name in ("sampling_params", "eval_sampling_params"):
        params = getattr(recipe.generator, name)
        if params.stop is None:
            extra = {"detokenize": False} | (params.additional_kwargs or {})
            complete = complete.with_values(**{f"generator__{name}__additional_kwargs": extra})
    return complete


def finish(recipe: Recipe, console: Console, observed: Observed, memory: PeakMemory) -> None:
    """Write `summary.json` and `report.html`, print the table."""
    from beam_rl.report import write_report

    numbers = summary(
        recipe,
        observed.metrics.records("step"),
        observed.metrics.records("eval"),
        observed.startup_seconds or 0.0,
        memory.bytes,
    )
    numbers |= {"phase_seconds": console.seconds, "phase_peak_rss_bytes": memory.by_phase}
    write_atomically(recipe.run_dir / "summary.json", json.dumps(numbers, indent=1) + "\n")
    write_report(recipe.run_dir)
    console.final(numbers, recipe.beam.gap_budget, recipe.run_dir)
