"""An engine's settings from SkyRL's `trainer` section."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from beam_rl.trainer.precision import Precision
from beam_rl.trainer.settings import EngineConfig, OptimizerSettings, Parallel

if TYPE_CHECKING:
    from skyrl.train.config.config import TrainerConfig

SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
"""`trainer.policy.optimizer_config.scheduler`, and the engine's name for it."""


def layout(trainer: TrainerConfig) -> Parallel:
    """The parallel sizes of `policy.megatron_config`, which the reference shares."""
    sizes = trainer.policy.megatron_config
    tp = sizes.tensor_model_parallel_size
    return Parallel(
        tp=tp,
        pp=sizes.pipeline_model_parallel_size,
        cp=sizes.context_parallel_size,
        ep=sizes.expert_model_parallel_size,
        etp=sizes.expert_tensor_parallel_size or tp,
    )


def optimizer_settings(trainer: TrainerConfig, updates: int | None) -> OptimizerSettings:
    """The policy's optimizer; `updates` in the whole run are the length of a decaying schedule.

    A constant schedule has no length, so that a run may be continued for longer than it was meant to be.
    """
    settings = trainer.policy.optimizer_config
    schedule = cast(Literal["constant", "linear", "cosine"], SCHEDULES[settings.scheduler])
    return OptimizerSettings(
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(settings.adam_betas[0], settings.adam_betas[1]),
        clip_grad=settings.max_grad_norm,
        warmup_steps=settings.num_warmup_steps,
        schedule=schedule,
        total_steps=None if schedule == "constant" else updates,
    )


def engine_config(
    trainer: TrainerConfig, optimizer: OptimizerSettings | None, precision: Precision, *, recompute: bool
) -> EngineConfig:
    """The engine's configuration; `optimizer` None is a reference model's."""
    return EngineConfig(
        dtype=precision.dtype,
        lora=precision.lora,
        mxfp8=precision.mxfp8,
        parallel=layout(trainer),
        optimizer=optimizer,
        micro_batch_tokens=trainer.max_tokens_per_microbatch,
        recompute="full" if recompute else None,
        cuda_graphs=precision.cuda_graphs,
        seed=trainer.seed,
        temperature=trainer.algorithm.temperature or 1.0,
    )
