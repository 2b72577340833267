"""What vLLM learns of Beam, in every one of its processes, through its entry points for plugins.

Everything is named by path, so that a process imports only what it comes to use.
"""

ARCHITECTURE = "BeamForCausalLM"


def register() -> None:
    """`vllm.general_plugins`: Beam's configuration, the portable model, weight transports. Idempotent.

    The model is registered only where vLLM has no Beam of its own, or one that cannot run here: vLLM's is for NVIDIA.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    from beam_rl.model import config
    from beam_rl.rollout.transfer import BACKEND, IPC_BACKEND, NCCL_BACKEND

    config.register()
    known = ModelRegistry.models.get(ARCHITECTURE)
    native = getattr(known, "module_name", "").startswith("vllm.")
    if known is None or (native and not current_platform.is_cuda()):
        ModelRegistry.register_model(ARCHITECTURE, "beam_rl.rollout.portable:BeamForCausalLM")
    receivers = {
        BACKEND: ("beam_rl.rollout.receive", "ShmReceiver"),
        IPC_BACKEND: ("beam_rl.rollout.receive_gpu", "IPCReceiver"),
        NCCL_BACKEND: ("beam_rl.rollout.receive_gpu", "NCCLReceiver"),
    }
    for name, (module, receiver) in receivers.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, receiver)
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, "beam_rl.rollout.transfer", "ShmTrainer")


def cpu_platform() -> str | None:
    """`vllm.platform_plugins`: Beam's CPU platform where vLLM would use its plain CPU platform, else nothing."""
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
        return None
    return "beam_rl.rollout.cpu_platform.BeamCpuPlatform"
