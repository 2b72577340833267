"""What a run reads before Ray starts: the model folder, the tokenizer and the data, checked against the recipe.

All functions raise BadInput and change nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from beam_rl import checks, precision
from beam_rl.model.errors import BadInput
from beam_rl.problems import Problems, load_problems
from beam_rl.recipe import Recipe


def load(recipe: Recipe, report: Callable[[str], None] = print) -> tuple[Any, Problems, Problems | None]:
    """Check the model folder, the tokenizer and the data files against each other.

    `report` gets one line about prompts that were dropped. Returns (tokenizer, training problems, held-out problems).
    """
    assert recipe.model_path is not None
    config = load_model(recipe.model_path)
    if recipe.beam.r3 and not config.sparse_layers:
        raise BadInput("beam.r3=true: the model has no experts, so there are no routes to replay. Set beam.r3=false.")
    precision.fits(recipe, config)
    check_reference(recipe, config)
    tokenizer = load_tokenizer(recipe.model_path, config.vocab_size)
    room = config.max_position_embeddings - recipe.trainer.max_prompt_length
    for name, sampling in {
        "sampling_params": recipe.generator.sampling_params,
        "eval_sampling_params": checks.held_out_sampling(recipe),
    }.items():
        if room < sampling.max_generate_length:
            raise BadInput(
                f"trainer.max_prompt_length={recipe.trainer.max_prompt_length} + "
                f"generator.{name}.max_generate_length={sampling.max_generate_length} tokens are more than the model's "
                f"max_position_embeddings={config.max_position_embeddings}."
            )
    drop = recipe.beam.long_prompts == "drop"
    train = load_problems(recipe.data.train_data, "data.train_data", tokenizer, recipe, drop, report)
    if len(train) < recipe.trainer.train_batch_size:
        raise BadInput(
            f"data.train_data: {len(train)} problems are fewer than trainer.train_batch_size="
            f"{recipe.trainer.train_batch_size}."
        )
    held_out = None
    if recipe.data.val_data and recipe.trainer.eval_interval > 0:
        held_out = load_problems(recipe.data.val_data, "data.val_data", tokenizer, recipe, drop, report)
    return tokenizer, train, held_out


def check_reference(recipe: Recipe, config: Any) -> None:
    """A reference model of its own, which scores the policy's tokens, and under R3 with the policy's routes."""
    path = recipe.trainer.ref.model.path
    if not recipe.trainer.algorithm.use_kl_loss or path is None or Path(path) == recipe.model_path:
        return
    other, alike = load_model(Path(path)), ["vocab_size"]
    if recipe.beam.r3:
        alike += ["mlp_layer_types", "num_experts", "num_experts_per_tok"]
    for name in alike:
        if (theirs := getattr(other, name)) != (ours := getattr(config, name)):
            raise BadInput(f"trainer.ref.model.path={path}: its {name} is {theirs}, the policy's {ours}.")


def load_model(path: Path) -> Any:
    """The checkpoint's configuration, after a comparison of its tensors' names and shapes with what Beam needs."""
    from beam_rl.model.checkpoint import HFCheckpoint
    from beam_rl.model.config import load_config

    config = load_config(path)
    HFCheckpoint(path).validate(config)
    return config


def load_tokenizer(path: Path, vocabulary: int) -> Any:
    """The folder's tokenizer, as SkyRL loads it. Raises BadInput: none, no chat template, another vocabulary."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
        raise BadInput(f"{path}: has no tokenizer (tokenizer.json). Copy the model's tokenizer files there.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path}: the tokenizer cannot be read: {error}") from error
    size = len(tokenizer)
    padding = max(128, vocabulary // 100)  # embedding rows are often padded to a round number
    if size > vocabulary or vocabulary - size >= padding:
        raise BadInput(
            f"{path}: the tokenizer has {size} tokens but the model's vocab_size is {vocabulary}. "
            "They belong to different models."
        )
    if tokenizer.chat_template is None:
        raise BadInput(f"{path}: the tokenizer has no chat template (chat_template.jinja); prompts are conversations.")
    if tokenizer.eos_token_id is None:
        raise BadInput(f"{path}: the tokenizer names no eos_token; no response would end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
