"""How Beam is served: parsers, KV cache, parallelism, speculation; and what of it a platform cannot honour."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from beam_rl.model.errors import BadInput
from beam_rl.rollout.profile import PROFILES, Device
from beam_rl.rollout.transfer import BACKEND

REPORTER = "beam_rl.rollout.active.Reporter"
"""What vLLM's workers can be asked about themselves."""
OURS = ("drafter", "draft_tokens", "adaptive_verification", "constrain_output", "moe_configs")
"""Fields that are not vLLM's arguments: `speculation` and `environment` say what becomes of them."""
DRAFT_TOKENS = 7
"""Tokens at a time that a drafter proposes unless told otherwise: as many as the reference's drafters are made for."""


@dataclass(frozen=True)
class ServeProfile:
    """Settings of a server; a YAML file with some of these names changes them. None is vLLM's choice."""

    reasoning_parser: str | None = "beam"
    """vLLM's parser that takes reasoning out of the content; None leaves it there."""
    tool_call_parser: str | None = "beam"
    """vLLM's parser of tool calls; None leaves them in the content."""
    constrain_output: bool = True
    """Every answer follows the checkpoint's response template, enforced by a grammar; False: only tool calls and what a
    request asks for (VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT)."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache; "auto" is the model's, "fp8" half of bfloat16's memory."""
    enable_prefix_caching: bool | None = None
    """Keep the KV of prompts' beginnings for other requests."""
    enable_chunked_prefill: bool | None = None
    """Compute long prompts piece by piece, between the steps of running requests."""
    tensor_parallel_size: int = 1
    """Devices that a layer is split over."""
    data_parallel_size: int = 1
    """Copies of everything that is not an expert, each with its own requests."""
    enable_expert_parallel: bool = False
    """Whole experts a device instead of a part of each."""
    speculative_config: dict[str, Any] | None = None
    """vLLM's speculation, for example {method: dflash, model: PATH, num_speculative_tokens: 7}; the output's
    distribution stays the model's. Instead of `drafter`, for other kinds of speculation."""
    drafter: str | None = None
    """Folder of a DFlash2 drafter of this model."""
    draft_tokens: int = 0
    """Tokens that `drafter` proposes at a time; 0: the profile wants no drafter."""
    adaptive_verification: bool = False
    """Verify as many of `drafter`'s tokens as pay, by the requests' confidences and measured costs. Worth it with
    many requests at a time only: vLLM's published tables have 10 % gained at 128, and 5-8 % lost at 32 and fewer."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's."""
    max_num_seqs: int = 256
    """Requests that run at a time; others wait."""
    max_num_batched_tokens: int | None = None
    """Tokens of a step, of prompts and responses together: more is faster overall, less keeps running requests from
    waiting for others' prompts."""
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    """What vLLM tunes for: "interactivity" captures a CUDA graph of every small batch size."""
    moe_configs: str | None = None
    """Folder of fused-MoE configurations that `beam-rl tune-moe` wrote (VLLM_TUNED_CONFIG_FOLDER)."""

    @classmethod
    def named(cls, name: str) -> Self:
        """One of `NAMED`, or one from a YAML file. Raises BadInput."""
        if name in NAMED:
            return cls(**NAMED[name])
        path = Path(name)
        if not path.is_file():
            raise BadInput(f"--profile {name}: neither {', '.join(map(repr, NAMED))} nor a file.")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadInput(f"--profile {name}: not YAML: {error}") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or content.keys() - known:
            found = ", ".join(sorted(content.keys() - known)) if isinstance(content, dict) else "no mapping"
            raise BadInput(f"--profile {name}: unknown: {found}; known are {', '.join(sorted(known))}.")
        return cls(**content)

    def engine_args(self, device: Device) -> tuple[dict[str, Any], list[str]]:
        """vLLM's arguments, and a line for every setting that is not in effect, because of the platform or for want of
        a drafter.

        Raises:
            BadInput: settings that exclude each other, or that vLLM's Beam refuses.
        """
        self._check()
        if device == "cpu":
            plain = ServeProfile(reasoning_parser=None, tool_call_parser=None)
            kept = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
            honoured = replace(plain, **{name: getattr(self, name) for name in kept})
            lost = [*_lost(self)]
        else:
            honoured = self
            lost = [*_undrafted(self)]
        args: dict[str, Any] = {
            field.name: getattr(honoured, field.name) for field in fields(honoured) if field.name not in OURS
        }
        args["speculative_config"] = honoured.speculation()
        args = {name: value for name, value in args.items() if value is not None}
        if not honoured.enable_expert_parallel:
            del args["enable_expert_parallel"]
        if "tool_call_parser" in args:
            args["enable_auto_tool_choice"] = True
        weights = {"weight_transfer_config": {"backend": BACKEND}, "scheduling_policy": "priority"}
        eager = {"enforce_eager": True} if device == "cpu" else {}
        return PROFILES[device].engine_args() | weights | eager | args | {"worker_extension_cls": REPORTER}, lost

    def speculation(self) -> dict[str, Any] | None:
        """vLLM's `speculative_config`."""
        if self.drafter is None or not self.draft_tokens:
            return self.speculative_config
        return {
            "method": "dflash",
            "model": self.drafter,
            "num_speculative_tokens": self.draft_tokens,
            # Both DFlash2's fused writes and verification of lengths that the device decides want this backend.
            "attention_backend": "FLASH_ATTN",
            "enable_adaptive_verification": self.adaptive_verification,
        }

    def environment(self, device: Device) -> dict[str, str]:
        """Variables of the server that differ from vLLM's defaults."""
        if device == "cpu":
            return {}
        constrain = {} if self.constrain_output else {"VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": "0"}
        return constrain if self.moe_configs is None else constrain | {"VLLM_TUNED_CONFIG_FOLDER": self.moe_configs}

    def _check(self) -> None:
        if self.drafter is not None and self.speculative_config is not None:
            raise BadInput("the profile has drafter and speculative_config: remove one of them.")
        drafters = [name for name in ("draft_tokens", "adaptive_verification") if getattr(self, name)]
        if self.speculative_config is not None and drafters:
            raise BadInput(
                f"the profile has speculative_config and {' and '.join(drafters)}, which do nothing without "
                "drafter: leave that out, and say in speculative_config how vLLM speculates."
            )
        if self.drafter is not None and self.draft_tokens < 1:
            raise BadInput(f"drafter {self.drafter}: draft_tokens must be at least 1, for example {DRAFT_TOKENS}.")
        split = self.tensor_parallel_size > 1 and self.data_parallel_size > 1
        if split and self.enable_expert_parallel:
            raise BadInput(
                "tensor_parallel_size, data_parallel_size and enable_expert_parallel: vLLM's Beam refuses the three "
                "together (its MoE would run sequence-parallel). Set one of the sizes to 1."
            )


_CACHED: dict[str, Any] = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "draft_tokens": DRAFT_TOKENS}

NAMED: dict[str, dict[str, Any]] = {
    "beam": {},
    # One user and a few more: a bfloat16 KV cache, into which vLLM's kernels write while they normalise and rotate.
    "latency": _CACHED | {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "performance_mode": "interactivity"},
    # As many tokens a second as possible, over all requests.
    "throughput": _CACHED
    | {
        "max_num_seqs": 512,
        "max_num_batched_tokens": 16_384,
        "performance_mode": "throughput",
        "kv_cache_dtype": "fp8",
        "enable_expert_parallel": True,
        "adaptive_verification": True,
    },
}
"""Profiles that need no file: fields that differ from the defaults."""


def _lost(profile: ServeProfile) -> Iterator[str]:
    """What vLLM on a CPU cannot do, and what it costs."""
    if profile.reasoning_parser is not None:
        yield f"reasoning_parser {profile.reasoning_parser}: not in vLLM for CPUs; reasoning stays in the content"
    if profile.tool_call_parser is not None:
        yield f"tool_call_parser {profile.tool_call_parser}: not in vLLM for CPUs; tool calls stay in the content"
        if profile.constrain_output:
            yield "constrain_output: it needs the parser; nothing makes an answer follow the response template"
    if profile.kv_cache_dtype != "auto":
        yield f"kv_cache_dtype {profile.kv_cache_dtype}: the KV cache has the model's type and is larger"
    if profile.enable_chunked_prefill is not None:
        yield "enable_chunked_prefill: left to vLLM"
    if profile.tensor_parallel_size > 1:
        yield f"tensor_parallel_size {profile.tensor_parallel_size}: one process computes everything"
    if profile.data_parallel_size > 1:
        yield f"data_parallel_size {profile.data_parallel_size}: one process computes everything"
    if profile.enable_expert_parallel:
        yield "enable_expert_parallel: one process holds all experts"
    if profile.speculative_config is not None:
        yield "speculative_config: no draft tokens; the same answers, slower"
    if profile.drafter is not None:
        yield f"drafter {profile.drafter}: not read; vLLM's DFlash2 needs a GPU"
    if profile.draft_tokens:
        yield f"draft_tokens {profile.draft_tokens}: no draft tokens; the same answers, slower"
    if profile.adaptive_verification:
        yield "adaptive_verification: there are no draft tokens to verify"
    if profile.performance_mode != "balanced":
        yield f"performance_mode {profile.performance_mode}: the model runs eagerly, without CUDA graphs"
    if profile.moe_configs is not None:
        yield f"moe_configs {profile.moe_configs}: they are of Triton's kernels, which a CPU does not run"


def _undrafted(profile: ServeProfile) -> Iterator[str]:
    """What a profile made for a drafter does without one."""
    if profile.speculation() is not None:
        return
    if profile.draft_tokens:
        yield f"draft_tokens {profile.draft_tokens}: give --drafter PATH; until then the same answers, slower"
    if profile.adaptive_verification:
        yield "adaptive_verification: there are no draft tokens to verify"
