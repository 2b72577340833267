"""The processes of a training job: torch.distributed and Megatron's parallel groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from beam_rl.model.errors import BadInput
from beam_rl.trainer.settings import Parallel


def device() -> torch.device:
    """This process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def initialize(parallel: Parallel, seed: int) -> None:
    """Join the job's groups (a world of one where nobody else started torch.distributed) and seed this rank.

    Raises:
        BadInput: the world does not divide by the layout, or the process already runs another layout.
    """
    if not dist.is_initialized():
        parallel_state.destroy_model_parallel()  # what is left of groups whose world somebody has ended
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        world = dist.get_world_size()
        for axes in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
            size = 1
            for axis in axes:
                size *= getattr(parallel, axis)
            if world % size:
                raise BadInput(f"{' x '.join(axes)} = {size} does not divide the world of {world} processes")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
        )
    running = Parallel(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    if running != parallel:
        raise BadInput(f"this process already runs the layout {running}, so an engine cannot use {parallel}")
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def shared_count(count: int) -> int:
    """Largest `count` among the ranks that must run the same number of micro batches (their experts are shared)."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return count
    value = torch.tensor([count], device=device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return int(value)
