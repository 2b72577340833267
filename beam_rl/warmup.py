"""The tiny model's warm-up as part of a run: in a process of its own, with a progress bar, or from the cache."""

from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

from beam_rl.console import Console
from beam_rl.model.errors import BadInput
from beam_rl.recipe import Recipe


def cached(recipe: Recipe) -> bool:
    """Whether the tiny model of this recipe is made already."""
    from beam_rl import tiny

    return recipe.beam.tiny is not None and tiny.cache_folder(recipe).is_dir()


def prepare_tiny(recipe: Recipe, console: Console) -> Recipe:
    """Make the tiny model and its problems, or find them in the cache; returns the recipe that names them.

    The warm-up trains in a process of its own, whose memory is free again before Ray starts.
    """
    from beam_rl import tiny

    assert recipe.beam.tiny is not None
    if not cached(recipe):
        with console.phase("warm-up", recipe.beam.tiny.warmup_steps) as bar:
            context = get_context("spawn")
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=make_tiny, args=(recipe, sender))
            child.start()
            sender.close()
            with suppress(EOFError):
                while True:
                    message = receiver.recv()
                    if isinstance(message, BadInput):
                        raise message
                    bar.advance(message - bar.done)
            child.join()
            if child.exitcode:
                raise RuntimeError(f"the warm-up process ended with exit code {child.exitcode}")
    model = tiny.prepare(recipe, lambda done: None)
    return recipe.with_values(
        trainer__policy__model__path=str(model),
        data__train_data=[str(model.parent / "train.jsonl")],
        data__val_data=[str(model.parent / "held_out.jsonl")],
    )


def make_tiny(recipe: Recipe, progress: Connection) -> None:
    """Body of the warm-up process: sends the number of steps done, or the BadInput that it met.

    It computes on one thread: a second one gains nothing on operations this small, and waits in vain for a core that
    anything else uses (0.36 s a step, against 0.44 s on two idle cores and 0.62 s under a run's own progress bar).
    """
    import torch

    from beam_rl import tiny

    torch.set_num_threads(1)

    try:
        tiny.prepare(recipe, progress.send)
    except BadInput as error:
        progress.send(error)
