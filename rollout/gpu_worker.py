"""vLLM's GPU worker with the quick capture of routed experts."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from beam_rl.rollout import quick_capture


class RolloutWorker(Worker):
    """Installs the capture before vLLM builds its own."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        quick_capture.install(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
