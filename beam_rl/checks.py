"""Everything that can be found wrong in a recipe before Ray starts: settings against each other.

All functions raise BadInput and change nothing; what has to be read for it is `inputs`' part.
"""

import math
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from beam_rl import checkpoints, precision
from beam_rl.model.errors import BadInput
from beam_rl.problems import known_environments
from beam_rl.recipe import Recipe

if TYPE_CHECKING:
    from beam_rl.trainer.precision import Precision

RESHAPING = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "structured_outputs"),
}
"""Of vLLM's sampling parameters, those that change the probabilities of tokens."""


def settings(recipe: Recipe) -> None:
    """Cross-field rules of the recipe; the message names the key, its value and the remedy."""
    trainer, generator = recipe.trainer, recipe.generator
    positive = {
        "trainer.max_training_steps": trainer.max_training_steps,
        "trainer.train_batch_size": trainer.train_batch_size,
        "trainer.policy_mini_batch_size": trainer.policy_mini_batch_size,
        "trainer.update_epochs_per_batch": trainer.update_epochs_per_batch,
        "trainer.max_tokens_per_microbatch": trainer.max_tokens_per_microbatch,
        "trainer.max_prompt_length": trainer.max_prompt_length,
        "trainer.policy.optimizer_config.lr": trainer.policy.optimizer_config.lr,
        "trainer.policy.optimizer_config.max_grad_norm": trainer.policy.optimizer_config.max_grad_norm,
        "trainer.algorithm.dynamic_sampling.max_sample_batches": (
            trainer.algorithm.dynamic_sampling.max_sample_batches
        ),
        "generator.sampling_params.max_generate_length": generator.sampling_params.max_generate_length,
        "generator.eval_sampling_params.max_generate_length": held_out_sampling(recipe).max_generate_length,
        "generator.sampling_params.temperature": generator.sampling_params.temperature,
        "generator.eval_n_samples_per_prompt": generator.eval_n_samples_per_prompt,
        "trainer.placement.policy_num_nodes": trainer.placement.policy_num_nodes,
        "trainer.placement.policy_num_gpus_per_node": trainer.placement.policy_num_gpus_per_node,
        "trainer.placement.ref_num_nodes": trainer.placement.ref_num_nodes,
        "trainer.placement.ref_num_gpus_per_node": trainer.placement.ref_num_gpus_per_node,
        "generator.inference_engine.num_engines": generator.inference_engine.num_engines,
    }
    for key, value in positive.items():
        if value is None or not 0 < value < math.inf:
            raise BadInput(f"{key}={value}: must be above 0, and finite.")
    if generator.n_samples_per_prompt < 2:
        raise BadInput(
            f"generator.n_samples_per_prompt={generator.n_samples_per_prompt}: a group of one has no advantage "
            "(group-normalised rewards are 0). Use 2 or more; DAPO uses 16."
        )
    divides(recipe)
    optimizer(recipe)
    lengths(recipe)
    supported(recipe)
    arithmetic(recipe)
    engine(recipe)
    if recipe.beam.endpoints:
        from beam_rl.publish import admin_token

        admin_token(recipe.beam)


def held_out_sampling(recipe: Recipe) -> Any:
    """The evaluation's sampling parameters, which SkyRL may lack and a loaded recipe has."""
    sampling = recipe.generator.eval_sampling_params
    assert sampling is not None
    return sampling


def divides(recipe: Recipe) -> None:
    """Batches split evenly into mini-batches and over data-parallel ranks."""
    trainer, samples = recipe.trainer, recipe.generator.n_samples_per_prompt
    batch, mini = trainer.train_batch_size, trainer.policy_mini_batch_size
    if batch % mini:
        raise BadInput(
            f"trainer.train_batch_size={batch} does not divide into mini-batches of "
            f"trainer.policy_mini_batch_size={mini} prompts. Make the first a multiple of the second."
        )
    if recipe.world_size % recipe.model_parallel:
        raise BadInput(
            f"trainer.placement: {recipe.world_size} processes do not divide by "
            f"tensor * pipeline * context parallel = {recipe.model_parallel}."
        )
    if recipe.reference_size % recipe.model_parallel:
        raise BadInput(
            f"trainer.placement: {recipe.reference_size} processes of the reference do not divide by "
            f"tensor * pipeline * context parallel = {recipe.model_parallel}."
        )
    if mini * samples % recipe.data_parallel:
        raise BadInput(
            f"trainer.policy_mini_batch_size={mini} x generator.n_samples_per_prompt={samples} samples do not divide "
            f"over {recipe.data_parallel} data-parallel ranks."
        )


def optimizer(recipe: Recipe) -> None:
    """What the policy's optimizer would refuse in its worker, minutes later."""
    key, chosen = "trainer.policy.optimizer_config", recipe.trainer.policy.optimizer_config
    if not 0 <= chosen.weight_decay < math.inf:
        raise BadInput(f"{key}.weight_decay={chosen.weight_decay}: must be 0 or more, and finite.")
    if len(chosen.adam_betas) != 2 or not all(0 <= beta < 1 for beta in chosen.adam_betas):
        raise BadInput(f"{key}.adam_betas={chosen.adam_betas}: must be two numbers from 0 to below 1.")
    warmup, updates = chosen.num_warmup_steps, recipe.steps * recipe.updates_per_step
    if warmup < 0:
        raise BadInput(f"{key}.num_warmup_steps={warmup}: must be 0 or more.")
    if chosen.scheduler in ("linear", "cosine") and warmup >= updates:
        raise BadInput(
            f"{key}.num_warmup_steps={warmup}: the run's {updates} updates leave nothing for the {chosen.scheduler} "
            "decay. Warm up for fewer, or use scheduler=constant_with_warmup."
        )


def lengths(recipe: Recipe) -> None:
    """Token budgets fit each other."""
    limit = recipe.generator.sampling_params.max_generate_length
    overlong = recipe.beam.overlong
    if overlong is not None and overlong.buffer >= limit:
        raise BadInput(
            f"beam.overlong.buffer={overlong.buffer}: must be less than "
            f"generator.sampling_params.max_generate_length={limit}. Shrink it, or set beam.overlong=null."
        )


def supported(recipe: Recipe) -> None:
    """Combinations that train wrongly, or that this version does not do."""
    trainer, generator = recipe.trainer, recipe.generator
    sampling = generator.sampling_params
    refusals = {
        "generator.sampling_params.top_p": (sampling.top_p != 1.0, sampling.top_p, "1.0"),
        "generator.sampling_params.top_k": (sampling.top_k not in (-1, 0), sampling.top_k, "-1"),
        "generator.sampling_params.min_p": (sampling.min_p != 0.0, sampling.min_p, "0.0"),
        "generator.sampling_params.repetition_penalty": (
            sampling.repetition_penalty != 1.0,
            sampling.repetition_penalty,
            "1.0",
        ),
        **{
            f"generator.sampling_params.additional_kwargs.{name}": (True, value, "nothing (leave it out)")
            for name, value in (sampling.additional_kwargs or {}).items()
            if name in RESHAPING
        },
    }
    for key, (refused, value, remedy) in refusals.items():
        if refused:
            raise BadInput(
                f"{key}={value}: makes another distribution of the rollout's than the trainer's log-probs are of. "
                f"Set it to {remedy} for training (evaluation may use it)."
            )
    correction = trainer.algorithm.off_policy_correction
    choices: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "trainer.algorithm.policy_loss_type": (trainer.algorithm.policy_loss_type, ("dual_clip", "regular")),
        "trainer.algorithm.advantage_estimator": (
            trainer.algorithm.advantage_estimator,
            ("grpo", "rloo", "maxrl", "reinforce++"),
        ),
        "trainer.algorithm.off_policy_correction.tis_ratio_type": (correction.tis_ratio_type, (None, "token")),
        # Verdicts over whole sequences, which the trainer does not see apart once they are packed.
        "trainer.algorithm.off_policy_correction.sequence_mask_metric": (correction.sequence_mask_metric, (None,)),
        **{
            f"trainer.algorithm.off_policy_correction.{name}": (getattr(correction, name), (None,))
            for name in ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
        },
        "trainer.policy.optimizer_config.scheduler": (
            trainer.policy.optimizer_config.scheduler,
            ("constant", "constant_with_warmup", "linear", "cosine"),
        ),
        "environment.env_class": (recipe.environment.env_class, known_environments()),
        "trainer.algorithm.dynamic_sampling.type": (trainer.algorithm.dynamic_sampling.type, (None, "filter")),
    }
    for key, (value, known) in choices.items():
        if value not in known:
            wanted = " or ".join("null" if choice is None else repr(choice) for choice in known)
            raise BadInput(f"{key}={value!r}: this version has {wanted}.")
    if sampling.logprobs is None:
        raise BadInput("generator.sampling_params.logprobs=None: the gap and R3 need the rollout's log-probs. Use 0.")
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
    if trainer.logger == "wandb" and not offline and not os.environ.get("WANDB_API_KEY"):
        raise BadInput("trainer.logger=wandb: set WANDB_API_KEY, or WANDB_MODE=offline.")
    for key, on in {
        "trainer.fully_async.enabled": trainer.fully_async.enabled,
        "generator.step_wise_trajectories": generator.step_wise_trajectories,
        "generator.apply_overlong_filtering": generator.apply_overlong_filtering and recipe.beam.overlong is not None,
        "trainer.algorithm.zero_variance_filter": trainer.algorithm.zero_variance_filter,
        "generator.batched": generator.batched,
        "generator.vision_language_generator": generator.vision_language_generator,
        "trainer.mtp.enabled": trainer.mtp.enabled,
        "trainer.policy.model.lora": trainer.policy.model.lora.rank > 0,
        "trainer.algorithm.use_entropy_loss": trainer.algorithm.use_entropy_loss,
        "trainer.algorithm.use_kl_in_reward": trainer.algorithm.use_kl_in_reward,
        "trainer.critic.model.path": bool(trainer.critic.model.path),
    }.items():
        if on:
            raise BadInput(f"{key}: this version cannot do it. Remove it.")
    placement(recipe)


def placement(recipe: Recipe) -> None:
    """Which processes there are, and which of them share devices."""
    trainer, rollout = recipe.trainer, recipe.generator.inference_engine
    processes = {
        "generator.inference_engine.num_engines": rollout.num_engines,
        "generator.inference_engine.tensor_parallel_size": rollout.tensor_parallel_size,
        "generator.inference_engine.pipeline_parallel_size": rollout.pipeline_parallel_size,
        "generator.inference_engine.data_parallel_size": rollout.data_parallel_size,
    }
    for key, count in processes.items():
        if recipe.beam.device == "cpu" and count > 1:
            raise BadInput(f"{key}={count}: beam.device=cpu runs one engine, in one process. Set it to 1.")
    shared = trainer.placement.colocate_all
    transport = ((rollout.engine_init_kwargs or {}).get("weight_transfer_config") or {}).get("backend")
    if transport is not None:
        from beam_rl.rollout.transfer import IPC_BACKEND, NCCL_BACKEND  # imports torch

        if transport == (NCCL_BACKEND if shared else IPC_BACKEND):
            raise BadInput(
                f"generator.inference_engine.engine_init_kwargs.weight_transfer_config.backend={transport}: is for "
                f"trainer.placement.colocate_all={str(not shared).lower()}. Remove one of them."
            )
    if not shared:
        return
    key = "trainer.placement.colocate_all=true"
    if recipe.beam.device == "cpu":
        raise BadInput(f"{key}: there is no GPU to share with beam.device=cpu. Remove it.")
    sizes = (rollout.tensor_parallel_size, rollout.pipeline_parallel_size, rollout.data_parallel_size)
    engines = rollout.num_engines * math.prod(sizes)
    if engines != recipe.world_size:
        raise BadInput(
            f"{key}: trainer and rollout share all GPUs, but trainer.placement has {recipe.world_size} and "
            f"generator.inference_engine (num_engines x tensor x pipeline x data parallel) {engines}. "
            "Make them equal, or set colocate_all=false."
        )
    if sizes[0] * sizes[1] > trainer.placement.policy_num_gpus_per_node:
        raise BadInput(
            f"generator.inference_engine: an engine's {sizes[0] * sizes[1]} GPUs (tensor x pipeline parallel) are more "
            f"than trainer.placement.policy_num_gpus_per_node={trainer.placement.policy_num_gpus_per_node}. An engine "
            "must fit on a node: use data parallelism, or more engines."
        )
    if recipe.beam.endpoints:
        raise BadInput(f"beam.publish: this version cannot publish while {key}. Remove one of them.")


def arithmetic(recipe: Recipe) -> None:
    """The settings of the precision; `inputs` compares them with the model, unless that is still to be made."""
    try:
        chosen = precision.chosen(recipe)
    except BadInput as error:
        raise BadInput(f"beam.{error}") from error
    rollout_arithmetic(recipe, recipe.beam.precision)
    if chosen.cuda_graphs:
        cuda_graphs(recipe, chosen)
    tiny = recipe.beam.tiny
    if tiny is not None and (chosen.lora or chosen.mxfp8 or tiny.architecture):
        from beam_rl.tiny import architecture

        precision.fits(recipe, architecture(changes=tiny.architecture))


def cuda_graphs(recipe: Recipe, chosen: "Precision") -> None:
    """What excludes a trainer's CUDA graphs."""
    from beam_rl.trainer.skyrl_settings import engine_config  # imports torch

    key = "beam.cuda_graphs=true"
    if recipe.beam.device == "cpu":
        raise BadInput(f"{key}: there is no GPU with beam.device=cpu. Remove it.")
    for shared, name, borrower in (
        (recipe.trainer.placement.colocate_all, "colocate_all", "rollout"),
        (recipe.shares_reference, "colocate_policy_ref", "reference"),
    ):
        if shared:
            raise BadInput(
                f"{key}: graphs keep memory, which trainer.placement.{name}=true lends to the {borrower}. "
                f"Set that to false, or remove {key}."
            )
    if recipe.trainer.gradient_checkpointing:
        raise BadInput(f"{key}: excludes trainer.gradient_checkpointing=true. Remove one of them.")
    try:
        engine_config(recipe.trainer, None, chosen, recompute=False)
    except BadInput as error:
        raise BadInput(f"beam.{error}") from error


def rollout_arithmetic(recipe: Recipe, name: str) -> None:
    """A precision that the rollout does not have on the recipe's device."""
    try:
        precision.engine_arguments(recipe, name)
    except BadInput as error:
        raise BadInput(f"beam.precision={name}: {error}") from error


def engine(recipe: Recipe) -> None:
    """What the rollout's engine cannot do, or would do wrongly."""
    from beam_rl.rollout.profile import check_engine  # after the cheap rules: it imports torch

    given = asdict(recipe.generator.inference_engine)
    if recipe.beam.device == "cpu":
        written = recipe.values["generator"]["inference_engine"]
        given = {key: value for key, value in given.items() if key in written}  # SkyRL's defaults are for GPUs
    check_engine(given, recipe.beam.device)


def folder(recipe: Recipe, resume: bool) -> None:
    """A new run needs a new folder (`run.claim` finds one where none is named); a resumed one needs a checkpoint.

    A run that has all its steps but no summary was killed at the very end: it may be resumed.
    """
    where = recipe.run_dir
    taken = where.exists() and (not where.is_dir() or any(where.iterdir()))
    if not resume and recipe.beam.run_dir is not None and taken:
        raise BadInput(f"beam.run_dir={where}: exists. Go on with --resume {where}, or choose another folder.")
    if not resume:
        return
    found = checkpoints.latest(where / "checkpoints")
    if found is None:
        raise BadInput(f"--resume {where}: has no finished checkpoint to go on from. Start the recipe anew.")
    if found[0] >= recipe.steps and (where / "summary.json").is_file():
        raise BadInput(
            f"--resume {where}: all {recipe.steps} steps are done. To go on, add trainer.max_training_steps=..."
        )
