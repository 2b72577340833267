"""`beam.precision`, as the trainer and the rollout take it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from beam_rl.model.errors import BadInput
from beam_rl.trainer.precision import Precision

if TYPE_CHECKING:
    from beam_rl.recipe import Recipe
    from beam_rl.trainer.settings import EngineConfig

Name = Literal["lora", "bf16", "mxfp8"]
"""The precisions to train in. (`fp32` is a fourth value of the recipe's key, for parity and debugging.)"""
NAMES: tuple[Name, ...] = get_args(Name)


def named(recipe: "Recipe", name: str) -> Precision:
    """A precision by its name, with the recipe's settings for it."""
    beam = recipe.beam
    return Precision(
        dtype="float32" if name == "fp32" else "bfloat16",
        lora=beam.lora.config() if name == "lora" else None,
        mxfp8=beam.mxfp8.config() if name == "mxfp8" else None,
    )


def chosen(recipe: "Recipe") -> Precision:
    """The recipe's own. Without a word about CUDA graphs there are none where somebody else needs their memory."""
    graphs = recipe.beam.cuda_graphs
    if graphs is None and (recipe.trainer.placement.colocate_all or recipe.shares_reference):
        graphs = False
    return replace(named(recipe, recipe.beam.precision), cuda_graphs=graphs)


def fits(recipe: "Recipe", config: Any, name: str | None = None) -> None:
    """A precision (the recipe's, unless named) and the parallel layout against the model."""
    from beam_rl.trainer.skyrl_settings import layout

    sizes, chosen = layout(recipe.trainer), named(recipe, name or recipe.beam.precision)
    try:
        if chosen.lora is not None:
            chosen.lora.check(config)
        if chosen.mxfp8 is not None:
            chosen.mxfp8.check(config, tp=sizes.tp, etp=sizes.etp)
    except BadInput as error:
        raise BadInput(f"beam.{error}") from error


def single_engine(recipe: "Recipe", name: str) -> "EngineConfig":
    """The configuration of a trainer engine of the recipe in one process, for forward passes."""
    from beam_rl.trainer.settings import Parallel
    from beam_rl.trainer.skyrl_settings import engine_config

    config = engine_config(recipe.trainer, None, named(recipe, name), recompute=False)
    return replace(config, parallel=Parallel())


def engine_arguments(recipe: "Recipe", name: str, *, separate: bool = False) -> dict[str, Any]:
    """vLLM's arguments that a rollout in a precision needs, on the recipe's device.

    `separate`: its trainer is on other GPUs and pushes weights to it.
    """
    from beam_rl.rollout.profile import engine_init_kwargs

    return engine_init_kwargs(recipe.beam.device, named(recipe, name).mxfp8, separate=separate)
