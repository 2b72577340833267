"""The Ray actors of a run's policy and reference."""

from typing import Any

import ray

from beam_rl.rollout import transfer
from beam_rl.trainer.worker import BeamPolicyWorkerBase, BeamRefWorkerBase


class PolicyWorkerBase(BeamPolicyWorkerBase):
    """The policy, which knows this project's own weight transfer without asking vLLM (whose import takes seconds)."""

    def transfer_class(self, backend: str) -> Any:
        return transfer.ShmTrainer if backend == transfer.BACKEND else super().transfer_class(backend)


PolicyWorker = ray.remote(num_gpus=1)(PolicyWorkerBase)
RefWorker = ray.remote(num_gpus=1)(BeamRefWorkerBase)
