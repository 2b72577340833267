"""What vLLM learns of Beam, in every one of its processes (entry point `vllm.general_plugins`)."""

ARCHITECTURE = "BeamForCausalLM"


def register() -> None:
    """Tell vLLM about Beam's configuration, the portable model and the weight-transfer backend. Idempotent.

    Names its classes by path, so that a process imports only what it uses.
    """
    from vllm.model_executor.models import ModelRegistry

    from beam_rl.model import config

    config.register()
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "beam_rl.rollout.portable:BeamForCausalLM")


def cpu_platform() -> str | None:
    """vLLM platform plugin: Beam's CPU platform where vLLM would use its plain CPU platform, else nothing."""
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
        return None
    return "beam_rl.rollout.cpu_platform.BeamCpuPlatform"
