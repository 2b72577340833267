"""The Ray actors of a run's policy and reference."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ray
import torch

from beam_rl.rollout import transfer
from beam_rl.trainer.worker import BeamPolicyWorkerBase, BeamRefWorkerBase

if TYPE_CHECKING:
    from beam_rl.trainer.engine import TrainerEngine


class PolicyWorkerBase(BeamPolicyWorkerBase):
    """The policy, which also knows this project's weight transfer: SkyRL's own are for GPUs."""

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """Meet the rollout over the weight-transfer backend that its engines were configured with."""
        backend = inference_engine_cfg.engine_init_kwargs["weight_transfer_config"]["backend"]
        if backend != transfer.BACKEND:
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


class ExportedWeights:
    """The engine's current weights under their Hugging Face names, walked through anew for every transfer."""

    def __init__(self, engine: "TrainerEngine") -> None:
        self.engine = engine

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.engine.export())


PolicyWorker = ray.remote(num_gpus=1)(PolicyWorkerBase)
RefWorker = ray.remote(num_gpus=1)(BeamRefWorkerBase)
