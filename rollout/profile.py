"""Settings of the rollout engine that follow from what it is for, and the combinations that cannot be right.

How large an engine is (parallelism, batch sizes, memory) is the recipe's, under SkyRL's keys. What is here a recipe has
no reason to change: exact log-probs, captured routes, weights that can be exchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from beam_rl.model.errors import BadInput
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout.transfer import BACKEND, IPC_BACKEND, NCCL_BACKEND

Device = Literal["cpu", "gpu"]
_PLACE = "generator.inference_engine"
MXFP8_KEY = "beam_mxfp8"
"""Key of the MXFP8 settings in vLLM's `additional_config`, through which they reach every process of an engine."""


@dataclass(frozen=True)
class EngineProfile:
    """Arguments of a vLLM engine on one kind of device, by the names of vLLM's `EngineArgs`."""

    weight_transfer: str | None = None
    """Backend that brings the trainer's weights, by its name in vLLM's factories. None: it depends on where the
    trainer is."""
    block_size: int | None = None
    """Tokens of a KV-cache block; only full blocks are shared between prompts. None: vLLM's choice."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache. None: a share of the device's memory, which SkyRL's `gpu_memory_utilization` sets."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """True keeps one kind of KV block for windowed and full layers: more memory, a scheduler three times as fast."""

    def engine_args(self) -> dict[str, Any]:
        """Engine arguments, without those that are left to vLLM."""
        sized = {
            "block_size": self.block_size,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "disable_hybrid_kv_cache_manager": self.disable_hybrid_kv_cache_manager,
            "weight_transfer_config": self.weight_transfer and {"backend": self.weight_transfer},
        }
        return {
            # Log-probs of the distribution that is sampled from, temperature included: what the trainer computes too.
            "logprobs_mode": "processed_logprobs",
        } | {name: value for name, value in sized.items() if value is not None}


PROFILES: dict[Device, EngineProfile] = {
    "cpu": EngineProfile(
        weight_transfer=BACKEND,
        block_size=32,  # the smallest that vLLM's CPU attention takes: short prompts fill a block
        kv_cache_memory_bytes=2**30,
        disable_hybrid_kv_cache_manager=True,
    ),
    "gpu": EngineProfile(),
}

CPU_ENVIRONMENT = {
    # One thread: a second one gains little on small models, and both collapse when the machine is busy.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # With the threads set from outside, the engine's process is its own worker: vLLM is imported once less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Environment of a process that builds a CPU engine, set before vLLM is imported."""


def engine_init_kwargs(device: Device, mxfp8: Mxfp8Settings | None = None, *, separate: bool = False) -> dict[str, Any]:
    """The `generator.inference_engine.engine_init_kwargs` that SkyRL hands to vLLM.

    Args:
        mxfp8: run the projections in MXFP8, as the trainer does. With weights only the engine is a plain one: what it
            loads must be rounded already. The trainer sends such weights (`TrainerEngine.rollout_weights`), for the
            first time before the first rollout (SkyRL's `RayPPOTrainer.train`); a checkpoint for an engine without a
            trainer is written by `trainer.responses.write_served`.
        separate: the trainer's GPUs are others, and weights go over NCCL, not CUDA IPC. Of SkyRL's own receivers, the
            one for NCCL would wait forever at its second transfer under vLLM 0.33, and both reload (`receive_gpu`).

    Raises:
        BadInput: MXFP8 on a GPU, other than of weights only.
    """
    args = PROFILES[device].engine_args()
    # Nobody reads a rollout before it is complete: log-probs and routes need not travel token by token.
    args["scheduler_cls"] = "beam_rl.rollout.pieces.scheduler"
    if device == "gpu":
        args["worker_cls"] = "beam_rl.rollout.gpu_worker.RolloutWorker"
        args["weight_transfer_config"] = {"backend": NCCL_BACKEND if separate else IPC_BACKEND}
    if mxfp8 is not None and mxfp8.activations:
        if device == "gpu":
            raise BadInput(
                "MXFP8 rollouts on a GPU are not done yet: where there are no MX units vLLM quantises the weights only "
                "(Marlin, W8A16), and nobody has shown that its MXFP8 is the trainer's where there are. Log-probs "
                "would be of another model than the one trained. Quantise weights only on both sides "
                "(beam.mxfp8.activations=false), or train in bf16."
            )
        args["additional_config"] = {MXFP8_KEY: mxfp8.to_dict()}
    # SkyRL turns sleep on where trainer and rollout share devices; vLLM's CPU platform has none.
    return args | {"enable_sleep_mode": False} if device == "cpu" else args


def check_engine(engine: Mapping[str, Any], device: Device) -> None:
    """Refuse engine settings under which rollouts would be wrong, or would fail after everything has started.

    Args:
        engine: SkyRL's `generator.inference_engine`, as nested plain values; missing keys have SkyRL's defaults.

    Raises:
        BadInput: names the key, its value and the remedy.
    """
    extra = dict(engine.get("engine_init_kwargs") or {})
    settings = {**engine, **extra}
    where = {name: f"{_PLACE}.engine_init_kwargs.{name}" for name in extra}

    def refuse(name: str, why: str) -> None:
        key = where.get(name, f"{_PLACE}.{name}")
        raise BadInput(f"{key}={settings[name]!r}: {why}")

    if settings.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        refuse("logprobs_mode", "log-probs must be of the distribution sampled from. Remove it.")
    for name in ("quantization", "fp8_weight_sync_mode", "kv_cache_dtype"):
        if settings.get(name) not in (None, "auto"):
            refuse(name, "the trainer's arithmetic has no counterpart of it, so log-probs would differ. Remove it.")
    if settings.get("load_format", "auto") not in ("auto", "safetensors"):
        refuse("load_format", "the first rollouts must come from the checkpoint's weights. Remove it.")
    if device == "cpu":
        _check_cpu(settings, refuse)
    if settings.get("enable_return_routed_experts"):
        _check_capture(settings, device, refuse)


def _check_cpu(settings: Mapping[str, Any], refuse: Any) -> None:
    if settings.get("pipeline_parallel_size", 1) > 1:
        refuse("pipeline_parallel_size", "Beam on the CPU has no pipeline parallelism. Set it to 1.")
    if settings.get("enable_sleep_mode"):
        refuse("enable_sleep_mode", "vLLM's CPU platform cannot sleep. Remove it.")
    if settings.get("enable_lora"):
        refuse("enable_lora", "Beam on the CPU takes merged weights only. Remove it.")
    block = settings.get("block_size")
    if block is not None and block % 32:
        refuse("block_size", "vLLM's CPU attention takes multiples of 32. Set it to 32.")


def _check_capture(settings: Mapping[str, Any], device: Device, refuse: Any) -> None:
    """What returning routed experts (R3) excludes."""
    if not settings.get("enable_prefix_caching", True):
        refuse("enable_prefix_caching", "routes are stored by prefix-cache block, so R3 needs it. Set it to true.")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if settings.get(name, 1) > 1:
            refuse(name, "vLLM captures routes (R3) on one stage only. Set it to 1, or turn R3 off (beam.r3=false).")
    for name in ("kv_transfer_config", "kv_offloading_size"):
        if settings.get(name):
            refuse(name, "prefixes from an external KV cache bring no routes. Remove it, or turn R3 off.")
    speculative = settings.get("speculative_config")
    if speculative and device == "cpu":
        refuse("speculative_config", "the CPU's capture of routes does not follow speculation. Remove it.")
    if speculative and speculative.get("enable_adaptive_verification"):
        refuse("speculative_config", "vLLM captures no routes (R3) under adaptive verification. Turn one of them off.")
    if device == "cpu" and not settings.get("enforce_eager", True):
        refuse("enforce_eager", "on the CPU routes (R3) are captured in eager mode. Set it to true.")
