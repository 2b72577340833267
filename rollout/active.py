"""Which fast paths of vLLM's Beam a running engine takes, and why it does not take the others.

`Reporter.beam_facts` runs in a worker and reads the engine's own state; `paths` decides from these facts alone what to
say. The conditions are vLLM 0.33's (vllm/models/beam/nvidia, and the files named below).
"""

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Facts = Mapping[str, Any]
ROUTER_KERNELS = ("fp32_router_gemm", "ll_fp32w_gemm", "bf16x3_router_gemm")
"""Kernels for float32 routers (vllm/model_executor/layers/fused_moe/router/gate_linear.py)."""
REPORT_SECONDS = 30.0
"""Longest wait of a server's start for its engine's facts."""


@dataclass(frozen=True)
class FastPath:
    """One thing that makes an engine fast, or a setting that says how it runs."""

    name: str
    active: bool
    detail: str
    """What is used, or why nothing is."""

    def __str__(self) -> str:
        return f"{'on ' if self.active else 'off'} {self.name:<34} {self.detail}"


class Reporter:
    """Extension of vLLM's workers (`worker_extension_cls`): `collective_rpc("beam_facts")`."""

    def beam_facts(self) -> dict[str, Any]:
        """Facts of this worker, as plain values."""
        return gather(self)


def gather(worker: Any) -> dict[str, Any]:
    """Facts of one of vLLM's workers (0.33 on a GPU; 0.32 on a CPU, where there are fewer)."""
    config, runner = worker.vllm_config, worker.model_runner
    model = runner.get_model()
    parallel, cache, scheduler = config.parallel_config, config.cache_config, config.scheduler_config
    facts: dict[str, Any] = {
        "native": type(model).__module__.startswith("vllm.models.beam"),
        "model": f"{type(model).__module__}.{type(model).__name__}",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tp": parallel.tensor_parallel_size,
        "dp": parallel.data_parallel_size,
        "ep": parallel.enable_expert_parallel,
        "kv_dtype": cache.cache_dtype,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "async_scheduling": bool(scheduler.async_scheduling),
        "logprobs_mode": config.model_config.logprobs_mode,
        "capture": bool(config.aux_output_config.enabled),
    }
    facts |= _graphs(config, runner) | _speculation(config, runner)
    return facts | _native(model) if facts["native"] else facts


def paths(facts: Facts) -> list[FastPath]:
    """What to tell of an engine, by its facts."""
    native = [*_attention(facts), *_norms(facts), *_experts(facts)] if facts["native"] else []
    if not facts["native"]:
        native = [FastPath("vLLM's own Beam", False, f"it needs an NVIDIA GPU; {facts['model']} serves instead")]
    batch = f"steps of at most {facts['max_num_batched_tokens']:,} tokens, {facts['max_num_seqs']} sequences"
    return [
        *native,
        _cuda_graphs(facts),
        FastPath("8-bit KV cache", facts["kv_dtype"].startswith("fp8"), _kv(facts)),
        FastPath("prefix caching", facts["prefix_caching"], "" if facts["prefix_caching"] else "turned off"),
        FastPath("chunked prefill", facts["chunked_prefill"], batch),
        FastPath("asynchronous scheduling", facts["async_scheduling"], ""),
        _draft(facts),
        FastPath("routed experts returned (R3)", facts["capture"], f"log-probs: {facts['logprobs_mode']}"),
    ]


def lines(facts: Iterable[Facts]) -> list[str]:
    """The report of an engine's workers; ranks differ in nothing that is told, so it is the first one's."""
    return [str(path).rstrip() for path in paths(next(iter(facts)))]


async def announce(engine: Any) -> None:
    """Print the report of a server's engine. A report that cannot be made is said to be so, and stops nothing."""
    try:
        found = lines(await asyncio.wait_for(engine.collective_rpc("beam_facts"), REPORT_SECONDS))
    except Exception as error:  # a report is not worth a server
        late = isinstance(error, TimeoutError)
        why = f"no answer within {REPORT_SECONDS:g} s" if late else f"{type(error).__name__}: {error}"
        found = [f"which fast paths are active could not be found out: {why}"]
    print("\n".join(f"beam-rl serve: {line}" for line in found), flush=True)


# Facts, from the engine's state


def _graphs(config: Any, runner: Any) -> dict[str, Any]:
    manager = getattr(runner, "cudagraph_manager", None)  # of Model Runner V2
    mode = manager.cudagraph_mode if manager is not None else config.compilation_config.cudagraph_mode
    return {
        "graphs": mode.name,
        "eager": bool(config.model_config.enforce_eager),
        "largest_graph": config.compilation_config.max_cudagraph_capture_size,
        "breakable": os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1",
    }


def _speculation(config: Any, runner: Any) -> dict[str, Any]:
    speculative = config.speculative_config
    if speculative is None:
        return {"draft": None}
    drafter = getattr(getattr(runner, "speculator", None), "model", None)
    return {
        "draft": speculative.method,
        "draft_tokens": speculative.num_speculative_tokens,
        "drafter": type(drafter).__name__ if drafter is not None else str(speculative.model),
        "adaptive": getattr(runner, "adaptive_verification", None) is not None,
    }


def _native(model: Any) -> dict[str, Any]:
    """Facts of `vllm.models.beam`'s modules."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.platforms import current_platform
    from vllm.utils.flashinfer import has_flashinfer

    inner = model.model
    layers = [layer for layer in inner.layers if hasattr(layer, "self_attn")]
    attention = layers[0].self_attn
    projection = attention.qkv_gate_proj if attention.merged_qkv_gate else attention.qkv_proj
    capability = current_platform.get_device_capability()
    weight = getattr(projection, "weight", None)
    facts = {
        "device": current_platform.get_device_name(),
        "capability": capability.major if capability is not None else 0,
        "hidden": inner.config.hidden_size,
        "kv_heads": inner.config.num_key_value_heads,
        "merged": attention.merged_qkv_gate,
        "projection": list(weight.shape) if weight is not None else None,
        "quantised": not isinstance(projection.quant_method, UnquantizedLinearMethod),
        "low_latency": attention.low_latency_projection,
        "backend": attention.attn.attn_backend.get_name(),
        "kv_fusible": attention.fuse_kv_insert,
        "kv_stored": str(attention.attn.kv_cache.dtype).removeprefix("torch."),
        "flashinfer": bool(has_flashinfer()),
        "reduce_kernel": hasattr(torch.ops._C, "beam_allreduce_norm"),
        "reduce_fused": inner.allreduce_workspace is not None,
    }
    sparse = next((layer.mlp for layer in layers if hasattr(layer.mlp, "experts")), None)
    return facts | (_moe(sparse) if sparse is not None else {"moe": None})


def _moe(block: Any) -> dict[str, Any]:
    """Facts of a layer with experts."""
    import torch

    experts = block.experts.routed_experts
    method = experts.quant_method
    kernel = getattr(method, "experts_cls", None)
    backend = next((value for name, value in vars(method).items() if name.endswith("_backend")), None)
    facts = {
        "moe": kernel.__name__ if kernel is not None else type(method).__name__,
        "moe_backend": str(getattr(backend, "value", None) or type(method).__name__),
        "router": [name for name in ROUTER_KERNELS if getattr(block.gate, f"allow_{name}", False)],
    }
    down = getattr(experts, "w2_weight", None)
    if facts["moe"] != "TritonExperts" or down is None or down.dtype != torch.bfloat16:
        return facts
    count, _, width = down.shape  # [experts of this device, hidden, width of this device's part]
    name, file = config_file(count, width)
    return facts | {"moe_config": name, "moe_config_file": None if file is None else str(file)}


def config_file(experts: int, width: int) -> tuple[str, Path | None]:
    """Name under which vLLM looks for a tuned bfloat16 MoE configuration, and the file that it finds
    (`get_moe_configs` in vllm/model_executor/layers/fused_moe/fused_moe.py)."""
    from vllm import envs
    from vllm.model_executor.layers.fused_moe import fused_moe

    name = fused_moe.get_config_file_name(experts, width, None)
    own = Path(fused_moe.__file__).parent / "configs"
    folders = [Path(envs.VLLM_TUNED_CONFIG_FOLDER)] if envs.VLLM_TUNED_CONFIG_FOLDER else []
    return name, next((folder / name for folder in (*folders, own) if (folder / name).is_file()), None)


# What to say of them


def _attention(facts: Facts) -> Iterable[FastPath]:
    few = f"{facts['kv_heads']} KV heads are fewer than {facts['tp']} devices"
    yield FastPath("merged q, k, v and gate projection", facts["merged"], "one GEMM" if facts["merged"] else few)
    yield FastPath("attention backend", True, facts["backend"])
    fused = facts["kv_fusible"] and facts["kv_stored"] == facts["dtype"] == "bfloat16"
    if fused:
        why = "one kernel with Q/K norm and RoPE or SSMax"
    elif facts["kv_stored"] != "bfloat16":
        why = f"the KV cache is {facts['kv_dtype']}: norm and rotation are one kernel, the write another"
    else:
        why = f"not with {facts['backend']} in {facts['dtype']}"
    yield FastPath("KV written by the norm's kernel", fused, why)
    blackwell = facts["capability"] == 10
    if facts["low_latency"]:
        why = "up to 16 tokens"
    elif facts["quantised"]:
        why = "the projection is quantised"
    elif not blackwell:
        why = f"Blackwell only; this is {facts['device']}"
    else:
        why = f"there is none for {facts['projection']} in {facts['dtype']}, or CuteDSL is missing"
    yield FastPath("low-latency projection GEMM", facts["low_latency"], why)
    dsl = blackwell and facts["dtype"] == "bfloat16"
    yield FastPath("CuteDSL attention kernels", dsl, "" if dsl else "Blackwell and bfloat16 only; Triton's instead")


def _norms(facts: Facts) -> Iterable[FastPath]:
    yield FastPath("norm, residual, norm in one kernel", True, "Triton" if not facts["reduce_fused"] else "CUDA")
    if facts["reduce_fused"]:
        why = "NVLink multicast"
    elif facts["tp"] == 1:
        why = "one device: nothing to reduce"
    elif facts["tp"] not in (2, 4, 8):
        why = f"tensor_parallel_size {facts['tp']} is not 2, 4 or 8"
    elif facts["dtype"] != "bfloat16":
        why = f"bfloat16 only; this is {facts['dtype']}"
    elif facts["hidden"] % 1024 or not 1024 <= facts["hidden"] <= 8192:
        why = f"hidden size {facts['hidden']} is not a multiple of 1,024 up to 8,192"
    elif not facts["reduce_kernel"]:
        why = "this build of vLLM has no kernel for it"
    elif not facts["flashinfer"]:
        why = "FlashInfer is not installed"
    elif facts["capability"] not in (9, 10):
        why = f"Hopper or Blackwell only; this is {facts['device']}"
    else:
        why = "not all ranks have NVLink multicast"
    yield FastPath("all-reduce in the norms' kernel", facts["reduce_fused"], why)


def _experts(facts: Facts) -> Iterable[FastPath]:
    if facts["moe"] is None:
        return
    layout = "whole experts a device" if facts["ep"] and facts["tp"] * facts["dp"] > 1 else "a part of each a device"
    where = layout if facts["tp"] * facts["dp"] > 1 else "one device"
    yield FastPath("MoE backend", True, f"{facts['moe_backend']} ({facts['moe']}), {where}")
    if "moe_config" in facts:
        found = facts["moe_config_file"]
        missing = f"none is named {facts['moe_config']}: make it with beam-rl tune-moe"
        yield FastPath("tuned MoE configuration", found is not None, found or missing)
    router = facts["router"]
    yield FastPath("router GEMM for few tokens", bool(router), ", ".join(router) or "cuBLAS, in float32")


def _cuda_graphs(facts: Facts) -> FastPath:
    active = facts["graphs"] != "NONE"
    if active:
        pieces = ", broken at attention" if facts["breakable"] else ""
        return FastPath("CUDA graphs", True, f"{facts['graphs']}{pieces}, up to {facts['largest_graph']} tokens")
    return FastPath("CUDA graphs", False, "enforce_eager" if facts["eager"] else "the platform or a backend has none")


def _kv(facts: Facts) -> str:
    return facts["kv_dtype"] if facts["kv_dtype"] != "auto" else f"{facts['dtype']}, the model's type"


def _draft(facts: Facts) -> FastPath:
    if facts["draft"] is None:
        return FastPath("speculation", False, "no drafter")
    lengths = "as many verified as pay" if facts["adaptive"] else "all verified"
    return FastPath("speculation", True, f"{facts['drafter']}: {facts['draft_tokens']} draft tokens, {lengths}")
