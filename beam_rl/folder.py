"""A run's folder: made for one run alone, and held by one driver at a time."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from beam_rl.evals.files import write_atomically
from beam_rl.model.errors import BadInput
from beam_rl.recipe import Recipe


def claim(recipe: Recipe) -> tuple[Recipe, bool]:
    """Make the run's folder; returns the recipe with it, and whether the folder is new.

    Where the recipe names none and the one named after the second is taken, `-2`, `-3`, ... is put behind its name.
    """
    where = recipe.run_dir
    where.parent.mkdir(parents=True, exist_ok=True)
    if recipe.beam.run_dir is not None:
        new = not where.exists()
        where.mkdir(exist_ok=True)
        return recipe, new
    number = 1
    while True:
        try:
            where.mkdir()
            return moved(recipe, where), True
        except FileExistsError:
            number += 1
            where = recipe.run_dir.with_name(f"{recipe.run_dir.name}-{number}")


def moved(recipe: Recipe, where: Path) -> Recipe:
    """The recipe of a run in another folder."""
    values = recipe.with_values(
        trainer__ckpt_path=str(where / "checkpoints"),
        trainer__export_path=str(where / "exports"),
        trainer__log_path=str(where / "logs"),
    )
    return replace(values, run_dir=where)


@contextmanager
def held(where: Path) -> Iterator[None]:
    """Keep other drivers out of a run's folder; the lock goes with this process. Raises BadInput: another is in it."""
    lock = FileLock(where / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BadInput(f"{where}: another beam-rl train is running in this folder.") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def recorded(recipe: Recipe, made: bool) -> Iterator[None]:
    """Write `recipe.yaml`; a BadInput in the block undoes that, and removes a new folder (`made`) that holds no work.

    So the corrected recipe may use the folder, and a resume refused for an override does not keep that override.
    """
    path = recipe.run_dir / "recipe.yaml"
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    write_atomically(path, recipe.to_yaml())
    try:
        yield
    except BadInput:
        worked = any((recipe.run_dir / name).exists() for name in ("metrics.jsonl", "checkpoints"))
        if before is not None:
            write_atomically(path, before)
        elif made and not worked:
            shutil.rmtree(recipe.run_dir)
        raise
