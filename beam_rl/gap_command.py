"""`beam-rl gap`: a recipe's model and prompts, measured and printed."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beam_rl import checks, gap_table, inputs, precision
from beam_rl.console import Console
from beam_rl.model.errors import BadInput
from beam_rl.precision import NAMES, Name
from beam_rl.recipe import Recipe
from beam_rl.terminal import terminal_apart
from beam_rl.warmup import prepare_tiny


def run(
    recipe: Recipe,
    *,
    model: Path | None,
    adapter: Path | None,
    precisions: Sequence[Name] | None,
    prompts: int,
    explain: bool,
    as_json: bool,
) -> int:
    """Measure and print; progress goes to standard error, the result to standard output. Returns the exit code."""
    chosen = [name for name in NAMES if precisions is None or name in precisions]
    if adapter is not None and "lora" not in chosen:
        raise BadInput("--adapter: is for the lora rows, which --precision leaves out.")
    for name in chosen:
        try:
            checks.rollout_arithmetic(recipe, name)
        except BadInput as error:
            others = " ".join(other for other in chosen if other != name)
            raise BadInput(f"{error} Or leave this row out: --precision {others}") from error
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as errors, tempfile.TemporaryDirectory(prefix="beam-rl-") as logs:
        console = Console(errors)
        with terminal_apart(Path(logs) / "log"):  # what libraries say while they are imported is no part of the result
            tokenizer, found = measured(recipe, console, model, adapter, chosen, prompts, explain)
    print(json.dumps(found, indent=1) if as_json else "\n".join(gap_table.lines(found, tokenizer)))
    return 0


def measured(
    recipe: Recipe,
    console: Console,
    model: Path | None,
    adapter: Path | None,
    chosen: Sequence[Name],
    prompts: int,
    explain: bool,
) -> tuple[Any, dict[str, Any]]:
    """The tokenizer, and what `gap_table.measure` finds."""
    if recipe.beam.tiny is not None:
        recipe = prepare_tiny(recipe, console)
    if model is not None:
        recipe = recipe.with_values(trainer__policy__model__path=str(model.absolute()))
    recipe = recipe.with_values(trainer__algorithm__use_kl_loss=False)  # nobody trains: no reference is needed
    tokenizer, train, held_out = inputs.load(recipe, console.say)
    for name in chosen:
        precision.fits(recipe, inputs.load_model(Path(recipe.trainer.policy.model.path)), name)
    found = gap_table.measure(
        recipe,
        tokenizer,
        held_out or train,
        console,
        precisions=chosen,
        adapter=adapter,
        prompts=prompts,
        explain=explain,
    )
    return tokenizer, found
