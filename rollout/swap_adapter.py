"""A PEFT adapter merged into full weights.

The sum is made in float32 from the pristine base, every time anew, so nothing accumulates however often adapters come
and go. An adapter is merged completely or refused: vLLM would leave adapters of experts out without a word.

PEFT's file has a pair `lora_A` [r, in], `lora_B` [out, r] a projection. Adapters of the experts' fused parameters have
all experts in one pair: A [experts * r, in] with the experts' rows one after the other, B [out, r * experts] with the
experts' columns interleaved; of gate_up_proj, B's upper half is the gate's. Two such pairs of a layer are told apart by
their shapes, because their names depend on the order in which PEFT wrapped them.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from beam_rl.model.config import BeamConfig
from beam_rl.model.tensors import hf_tensors
from beam_rl.rollout.swap_store import Unfit

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, {}, []),
    "lora_bias": (False, None),
}
"""Settings that change the sum, with the values under which they do not."""


@dataclass(frozen=True)
class Pair:
    """The two matrices of a module, and what their product is multiplied with."""

    a: Tensor
    b: Tensor
    scale: float

    def delta(self) -> Tensor:
        """[out, in], float32."""
        return self.scale * (self.b.float() @ self.a.float())

    def of_expert(self, expert: int, experts: int) -> Tensor:
        """One expert's [out, in], float32, where the pair holds all experts'."""
        a = self.a.float().view(experts, -1, self.a.shape[1])[expert]
        b = self.b.float().view(self.b.shape[0], -1, experts)[:, :, expert]
        return self.scale * (b @ a)


class Adapter:
    """An adapter's folder, checked against the model that it is for."""

    def __init__(self, folder: Path, config: BeamConfig) -> None:
        """Read the adapter. Raises Unfit: naming what cannot be merged."""
        self.config = config
        settings = _settings(folder)
        self.pairs, self.experts = _pairs(folder, settings, config)

    def merged(self, base: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the model with the adapter in them, in the base's types and in the model's order."""
        for name in hf_tensors(self.config):
            tensor = base(name)
            delta = self._delta(name)
            yield name, tensor if delta is None else (tensor.float() + delta).to(tensor.dtype)

    def _delta(self, name: str) -> Tensor | None:
        if (pair := self.pairs.get(name.removesuffix(".weight"))) is not None:
            return pair.delta()
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        fused = "down_proj" if match["projection"] == "down" else "gate_up_proj"
        together = self.experts.get(f"{match['experts']}.{fused}")
        if together is None:
            return None
        delta = together.of_expert(int(match["expert"]), self.config.num_experts)
        return delta if fused == "down_proj" else delta.chunk(2)[int(match["projection"] == "up")]


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if settings["peft_type"] != "LORA" or not settings["r"] > 0:
            raise Unfit(f"{folder / CONFIG}: only LoRA adapters can be merged")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unfit(f"{folder / CONFIG}: not readable as a PEFT adapter's settings ({error!r})") from error
    for name, neutral in _NEUTRAL.items():
        if settings.get(name) not in neutral:
            raise Unfit(f"{folder / CONFIG}: {name} = {settings[name]!r} cannot be merged")
    return settings


def _pairs(folder: Path, settings: dict[str, Any], config: BeamConfig) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """Pairs by module, and those of experts by their fused parameter."""
    shapes = {name.removesuffix(".weight"): shape for name, shape in hf_tensors(config).items()}
    experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    single: dict[str, Pair] = {}
    fused: dict[str, Pair] = {}
    for module, a, b in _matrices(folder):
        if module in shapes:
            if (b.shape[0], a.shape[1]) != shapes[module] or a.shape[0] != b.shape[1]:
                raise Unfit(f"{module}: lora_A {list(a.shape)}, lora_B {list(b.shape)} do not fit the model")
            single[module] = Pair(a, b, _scale(settings, module, a.shape[0]))
            continue
        block = re.sub(r"(\.base_layer)+$", "", module)
        sizes = {(hidden, 2 * width): "gate_up_proj", (width, hidden): "down_proj"}
        parameter = sizes.get((a.shape[1], b.shape[0]))
        if not block.endswith(".mlp.experts") or parameter is None or a.shape[0] != b.shape[1] or a.shape[0] % experts:
            raise Unfit(f"{module}: lora_A {list(a.shape)}, lora_B {list(b.shape)}: no such part of the model")
        name = f"{block}.{parameter}"
        if f"{block}.0.gate_proj" not in shapes or name in fused:
            raise Unfit(f"{module}: the layer has no such experts, or they have two adapters")
        fused[name] = Pair(a, b, _scale(settings, name, a.shape[0] // experts))
    if not single and not fused:
        raise Unfit(f"{folder / WEIGHTS}: holds no adapter")
    return single, fused


def _matrices(folder: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Module, A and B of every pair. Raises Unfit: the file has anything else."""
    try:
        file = safe_open(folder / WEIGHTS, "pt")
    except (OSError, SafetensorError) as error:
        raise Unfit(f"{folder / WEIGHTS}: not a readable safetensors file ({error})") from error
    with file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    for name in sorted(found):
        module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        pair = [f"{_PREFIX}{module}.lora_{matrix}.weight" for matrix in "AB"]
        if name not in pair or not all(one in found and found[one].dim() == 2 for one in pair):
            raise Unfit(f"{folder / WEIGHTS}: {name} is not half of a pair lora_A, lora_B")
        if not bool(torch.isfinite(found[name]).all()):
            raise Unfit(f"{folder / WEIGHTS}: {name} has values that are not finite")
        if name == pair[0]:
            yield module, found[pair[0]], found[pair[1]]


def _scale(settings: dict[str, Any], module: str, rank: int) -> float:
    """What PEFT multiplies B @ A with. Raises Unfit: the file's rank is not the settings'."""
    r, alpha = (
        _setting(settings, pattern, module, settings.get(default))
        for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    if r != rank:
        raise Unfit(f"{module}: rank {rank} in the file, {r} in the settings")
    return float(alpha) / (math.sqrt(r) if settings.get("use_rslora") else r)


def _setting(settings: dict[str, Any], pattern: str, module: str, default: Any) -> Any:
    """A setting that may differ by module; PEFT matches its patterns against the end of the name."""
    for key, value in (settings.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
