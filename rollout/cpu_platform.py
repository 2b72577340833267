"""vLLM's CPU platform, able to serve Beam with routed-expert capture.

vLLM's CPU runner has no routed-expert capture, and its configuration check refuses the option on every platform that
does not bring a runner of its own. This platform brings one (`cpu_worker`), through vLLM's entry point for platforms
(`vllm.platform_plugins`). It changes nothing for models other than Beam, and it is not there on GPUs.
"""

import os
from functools import partial
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "beam_rl.rollout.cpu_worker.BeamCPUWorker"
_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
"""What SkyRL writes where no worker class was chosen."""
_CHECK = "_verify_aux_output_compatibility"
"""vLLM's method that checks a configuration for the capture."""


class BeamCpuPlatform(CpuPlatform):
    """CPU platform whose Beam engines capture routed experts and run in one process."""

    _checking_capture = False

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Choose worker and executor for a Beam engine; called by vLLM while it completes a configuration."""
        parallel = vllm_config.parallel_config
        if not _is_beam(vllm_config):
            super().check_and_update_config(vllm_config)
            return
        if parallel.worker_cls in ("auto", _GPU_WORKER):
            parallel.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        # vLLM keeps the worker in a process of its own so as to set its OpenMP threads. Where the threads are set
        # from outside, the engine's process can be the worker: one import of vLLM fewer, and no copying of outputs.
        if parallel.world_size == 1 and "OMP_NUM_THREADS" in os.environ:
            parallel.distributed_executor_backend = "uni"
        if vllm_config.aux_output_config.enabled and parallel.worker_cls == WORKER:
            vars(vllm_config)[_CHECK] = partial(_verify_capture, vllm_config)

    def is_out_of_tree(self) -> bool:
        """True for the length of vLLM's check of the capture, which exempts platforms with their own runner."""
        return type(self)._checking_capture


def _verify_capture(vllm_config: "VllmConfig") -> None:
    """vLLM's own check of routed-expert capture (parallelism, connectors, prefix caching), less its runner's version.

    It stands in for the method of this one configuration, once, and leaves no trace in what is sent to the engine.
    """
    del vars(vllm_config)[_CHECK]
    if vllm_config.speculative_config is not None:
        raise ValueError("routed-expert capture on the CPU does not support speculative decoding")
    BeamCpuPlatform._checking_capture = True
    try:
        vllm_config._verify_aux_output_compatibility()
    finally:
        BeamCpuPlatform._checking_capture = False


def _is_beam(vllm_config: "VllmConfig") -> bool:
    model = vllm_config.model_config
    return model is not None and model.hf_config.model_type == "beam"
