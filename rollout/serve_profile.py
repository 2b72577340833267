"""How Beam is served: parsers, KV cache, parallelism, speculation; and what of it a platform cannot honour."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import yaml

from beam_rl.model.errors import BadInput
from beam_rl.rollout.profile import PROFILES, Device
from beam_rl.rollout.transfer import BACKEND

BEAM = "beam"
"""Name of the profile that needs no file."""


@dataclass(frozen=True)
class ServeProfile:
    """Settings of a server; a YAML file with some of these names changes them."""

    reasoning_parser: str | None = "beam"
    """vLLM's parser that takes reasoning out of the content; None leaves it there."""
    tool_call_parser: str | None = "beam"
    """vLLM's parser of tool calls; None leaves them in the content."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache; "auto" is the model's, "fp8" half of bfloat16's memory."""
    tensor_parallel_size: int = 1
    """Devices that a layer is split over."""
    enable_expert_parallel: bool = False
    """Whole experts a device instead of a part of each."""
    speculative_config: dict[str, Any] | None = None
    """vLLM's speculation, for example {method: dflash, model: PATH, num_speculative_tokens: 7}; the output's
    distribution stays the model's."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's."""
    max_num_seqs: int = 256
    """Requests that run at a time; others wait."""

    @classmethod
    def named(cls, name: str) -> Self:
        """The profile "beam", or one from a YAML file. Raises BadInput."""
        if name == BEAM:
            return cls()
        path = Path(name)
        if not path.is_file():
            raise BadInput(f"--profile {name}: neither {BEAM!r} nor a file.")
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
        """vLLM's arguments, and a line for every setting that the platform cannot honour."""
        lost = list(_lost(self)) if device == "cpu" else []
        if device == "cpu":
            plain = ServeProfile(reasoning_parser=None, tool_call_parser=None)
            honoured = replace(plain, max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs)
        else:
            honoured = self
        args: dict[str, Any] = {field.name: getattr(honoured, field.name) for field in fields(honoured)}
        args = {name: value for name, value in args.items() if value not in (None, False)}
        if "tool_call_parser" in args:
            args["enable_auto_tool_choice"] = True
        weights = {"weight_transfer_config": {"backend": BACKEND}, "scheduling_policy": "priority"}
        eager = {"enforce_eager": True} if device == "cpu" else {}
        return PROFILES[device].engine_args() | weights | eager | args, lost


def _lost(profile: ServeProfile) -> Iterator[str]:
    """What vLLM on a CPU cannot do, and what it costs."""
    if profile.reasoning_parser is not None:
        yield f"reasoning_parser {profile.reasoning_parser}: not in vLLM for CPUs; reasoning stays in the content"
    if profile.tool_call_parser is not None:
        yield f"tool_call_parser {profile.tool_call_parser}: not in vLLM for CPUs; tool calls stay in the content"
    if profile.kv_cache_dtype != "auto":
        yield f"kv_cache_dtype {profile.kv_cache_dtype}: the KV cache has the model's type and is larger"
    if profile.tensor_parallel_size > 1:
        yield f"tensor_parallel_size {profile.tensor_parallel_size}: one process computes everything"
    if profile.enable_expert_parallel:
        yield "enable_expert_parallel: one process holds all experts"
    if profile.speculative_config is not None:
        yield "speculative_config: no draft tokens; the same answers, slower"
