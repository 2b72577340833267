"""The Ray actors of a run's policy and reference."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from beam_rl import fingerprint
from beam_rl.rollout import nccl, transfer
from beam_rl.trainer.precision import Precision
from beam_rl.trainer.worker import BeamPolicyWorkerBase, BeamRefWorkerBase, EngineWorker

if TYPE_CHECKING:
    from beam_rl.trainer.engine import TrainerEngine


class PolicyWorkerBase(BeamPolicyWorkerBase):
    """The policy, which also knows this project's weight transfer: SkyRL's own (NCCL, CUDA IPC) are for GPUs."""

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Meet the rollout over the weight-transfer backend that its engines were configured with.

        Raises RuntimeError where weights would not arrive (`nccl.check`).
        """
        chosen = inference_engine_cfg.engine_init_kwargs.get("weight_transfer_config")
        if chosen is None or chosen["backend"] != transfer.BACKEND:
            if inference_engine_cfg.weight_sync_backend == "nccl" and not self.cfg.placement.colocate_all:
                nccl.check()
            self.fused_experts = chosen is not None and chosen["backend"] in transfer.DIRECT_BACKENDS
            await super().init_weight_sync_state(inference_engine_client, inference_engine_cfg)
            return
        from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient

        self._weight_sync_inference_client = inference_engine_client
        self._weight_sync_engine = await asyncio.to_thread(
            transfer.ShmTrainer.trainer_init,
            transfer.ShmTrainerInit(rank=torch.distributed.get_rank()),
            client=SkyrlWeightSyncClient(
                list(inference_engine_client.server_urls), inference_engine_client.data_parallel_size
            ),
            source=ExportedWeights(self.engine),
        )
        torch.distributed.barrier()

    async def broadcast_to_inference_engines(
        self, inference_engine_client: Any, inference_engine_cfg: Any, model_id: str | None = None
    ) -> None:
        """Send the current weights to the rollout; returns when it runs on them.

        SkyRL's own way would import vLLM here, only to ask the engine about GPU memory.
        """
        if not isinstance(self._weight_sync_engine, transfer.ShmTrainer):
            await super().broadcast_to_inference_engines(inference_engine_client, inference_engine_cfg, model_id)
            return
        await asyncio.to_thread(self._weight_sync_engine.send_weights)
        torch.distributed.barrier()

    def save_hf_model(self, export_dir: str, tokenizer: Any) -> None:
        """A Hugging Face checkpoint with its manifest: digests, and how this engine scores a fixed prompt."""
        super().save_hf_model(export_dir, tokenizer)
        fingerprint.write_manifest(Path(export_dir), self.engine)


class ExportedWeights:
    """The engine's current weights as the rollout wants them, walked through anew for every transfer."""

    def __init__(self, engine: "TrainerEngine") -> None:
        self.engine = engine

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.engine.rollout_weights())


def policy_worker(precision: Precision) -> Any:
    """The policy's actor class for a precision."""
    return _actor(PolicyWorkerBase, precision)


def reference_worker(precision: Precision) -> Any:
    """The reference's actor class: the model that training starts from, so without an adapter."""
    return _actor(BeamRefWorkerBase, replace(precision, lora=None))


def _actor(base: type[EngineWorker], precision: Precision) -> Any:
    """SkyRL constructs its workers itself, with arguments of its own: a class is where another value fits."""
    return ray.remote(num_gpus=1)(type(base.__name__.removesuffix("Base"), (base,), {"precision": precision}))
