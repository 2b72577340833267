"""Megatron's distributed AdamW and its learning-rate schedule.

The distributed optimizer also serves a data-parallel size of one: it is what keeps the float32 main parameters, and
checkpoints then look the same for every layout.

Megatron expects Apex or Transformer Engine, whose fused Adam keeps one step count a group. This project installs
neither, so torch's fused AdamW runs, with a step count a parameter; `prepare_state` and `load_state` bridge what
`DistributedOptimizer` does not do for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from beam_rl.trainer.settings import OptimizerSettings

_FOREVER = 2**31
"""Steps after which a constant schedule ends, as Megatron wants a number."""


def build_optimizer(
    settings: OptimizerSettings, chunks: Seq[torch.nn.Module], dtype: torch.dtype
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Optimizer and schedule of a model wrapped in Megatron's DistributedDataParallel."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    overrides = get_standard_config_overrides(config)
    if dtype == torch.bfloat16:
        # The distributed optimizer orders float32 parameters before bfloat16 ones inside a group, and then indexes the
        # group as if it had not; the router's float32 weights therefore have a group of their own. The override says
        # nothing new: it only has to differ from every other group's.
        own = ParamKey(predicate=ParamPredicate(name="float32", fn=lambda param: param.dtype == torch.float32))
        overrides[own] = ParamGroupOverride(start_wd=settings.weight_decay, end_wd=settings.weight_decay)
    optimizer = get_megatron_optimizer(config, list(chunks), config_overrides=overrides)
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    prepare_state(optimizer)
    return optimizer, _schedule(settings, optimizer)


def _schedule(settings: OptimizerSettings, optimizer: ChainedOptimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.total_steps or _FOREVER,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def tensors(optimizer: ChainedOptimizer) -> Iterator[torch.Tensor]:
    """Main parameters and AdamW's state on this rank. A float32 parameter is its own main parameter."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                yield param.data
                yield from (value for name, value in part.optimizer.state[param].items() if name != "step")


def prepare_state(optimizer: ChainedOptimizer) -> None:
    """Create AdamW's state before its first step, as saving and loading need it, and choose the fused kernel."""
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        for group in adam.param_groups:
            group["fused"], group["foreach"] = True, False
            for param in group["params"]:
                adam.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def step(optimizer: ChainedOptimizer, schedule: OptimizerParamScheduler) -> tuple[float, float, bool]:
    """Clip and apply the accumulated gradients.

    A gradient that is not finite changes nothing and still counts in the schedule, so that all runs of a recipe have
    the same learning rate at the same step.

    Returns:
        norm of the whole gradient before clipping, the learning rate, and whether the step was skipped.
    """
    schedule.step(1)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    finite = math.isfinite(norm)
    if finite:
        if (limit := optimizer.config.clip_grad) > 0 and (params := optimizer.get_parameters()):
            clip_grad_by_total_norm_fp32(params, limit, norm)
        optimizer.step_with_ready_grads()
    return norm, float(optimizer.param_groups[0]["lr"]), not finite


@torch.no_grad()
def load_state(optimizer: ChainedOptimizer, state: Any) -> None:
    """`ChainedOptimizer.load_state_dict` for torch's AdamW.

    Megatron hands every parameter the same step tensor, which AdamW would then count up once a parameter, and its
    copy of the loaded tensors looks for a stored "step" that does not exist; so step counts are set aside meanwhile.
    """
    chained = optimizer.chained_optimizers
    states = [state] if len(chained) == 1 else [state[i] for i in sorted(state)]
    for part, loaded in zip(chained, states, strict=True):
        tensors = loaded.pop("param_state")
        part.load_state_dict(loaded)
        states_of = part.optimizer.state
        steps = {param: states_of[param].pop("step").clone() for param in states_of}
        part.load_parameter_state_from_fully_reshardable(tensors)
        for param, count in steps.items():
            states_of[param]["step"] = count
