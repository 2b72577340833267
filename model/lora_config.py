"""LoRA's settings, under the names of PEFT's `LoraConfig`, and what they mean for a Beam."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from beam_rl.model.errors import BadInput

if TYPE_CHECKING:
    from beam_rl.model.config import BeamConfig

ATTENTION = tuple(f"self_attn.{name}_proj" for name in ("q", "gate", "k", "v", "o"))
DENSE = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
EXPERTS = tuple(f"mlp.experts.{name}_proj" for name in ("gate", "up", "down"))
PROJECTIONS = ATTENTION + DENSE + EXPERTS
"""Every projection that can have an adapter: names inside a layer, an expert's without the expert's number."""

_REFUSED = {
    "gate": "the router chooses experts in float32 and stays as it is; the projections are called gate_proj",
    "e_score_correction_bias": "the router's correction bias is no weight matrix",
    "embed_tokens": "the embedding stays as it is",
    "lm_head": "the output layer stays as it is",
    "gate_bias": "the output gate's bias is no weight matrix; its projection is self_attn.gate_proj",
}
_NAMES = ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj", "up_proj", "down_proj")
_MULTIPLE = 8
"""Grouped GEMM takes rows of whole 16 bytes: 8 numbers in bfloat16."""


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter beside every targeted projection: its weight gains scale * B @ A."""

    r: int = 8
    """Rank. On experts a multiple of 8."""
    lora_alpha: float = 8
    """The scale is lora_alpha / r."""
    lora_dropout: float = 0.0
    """Probability with which an element of an adapter's input is dropped, in training only."""
    target_modules: tuple[str, ...] = _NAMES
    """Projections with an adapter. A name stands for every module whose name ends in it, as in PEFT: `gate_proj` means
    the attention's output gate, the dense layers' gate and the experts' gates. Longer names say which:
    `self_attn.gate_proj`, `mlp.gate_proj` (dense layers only), `experts.gate_proj` (all experts of all layers)."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """How A begins: True is Kaiming-uniform (within ±1 / sqrt(inputs)), "gaussian" is normal with deviation 1 / r.
    B begins at zero, so that an untrained adapter changes nothing."""
    use_rslora: bool = False
    """Rank-stabilised: the scale is lora_alpha / sqrt(r)."""

    def __post_init__(self) -> None:
        whole = isinstance(self.r, int) and not isinstance(self.r, bool)
        _require(whole and self.r >= 1, "r", self.r, "the rank must be a whole number of at least 1")
        alpha = self.lora_alpha
        _require(_is_number(alpha) and 0 < alpha < math.inf, "lora_alpha", alpha, "it must be a positive number")
        drop = self.lora_dropout
        _require(_is_number(drop) and 0 <= drop < 1, "lora_dropout", drop, "it must lie in [0, 1)")
        known = self.init_lora_weights is True or self.init_lora_weights == "gaussian"
        _require(known, "init_lora_weights", self.init_lora_weights, 'it must be true or "gaussian"')
        _require(isinstance(self.use_rslora, bool), "use_rslora", self.use_rslora, "it must be true or false")
        targets = self.target_modules
        listed = isinstance(targets, list | tuple | set) and bool(targets)
        _require(listed, "target_modules", targets, f"give a list with some of {', '.join(_NAMES)}")
        for name in targets:
            _check_target(name)
        object.__setattr__(self, "target_modules", tuple(targets))

    @property
    def scale(self) -> float:
        """Factor on B @ A."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def projections(self) -> tuple[str, ...]:
        """The targeted members of `PROJECTIONS`, in their order."""
        return tuple(name for name in PROJECTIONS if any(_matches(target, name) for target in self.target_modules))

    def check(self, model: BeamConfig) -> None:
        """Raise `BadInput` naming the field if these settings cannot work with a model."""
        has = set(ATTENTION)
        if len(model.sparse_layers) < model.num_hidden_layers:
            has |= set(DENSE)
        if model.sparse_layers:
            has |= set(EXPERTS)
        for target in self.target_modules:
            if not any(_matches(target, name) for name in has):
                kind = "dense MLP" if _matches(target, f"mlp.{target.rpartition('.')[2]}") else "experts"
                _require(False, "target_modules", target, f"the model has no layer with {kind}; leave it out")
        if has & set(self.projections) & set(EXPERTS):
            rule = f"on experts it must be a multiple of {_MULTIPLE}; take one, or target no experts"
            _require(self.r % _MULTIPLE == 0, "r", self.r, rule)

    def identity(self) -> dict[str, Any]:
        """What must be the same where trained adapters are continued."""
        return {
            "r": self.r,
            "lora_alpha": float(self.lora_alpha),
            "lora_dropout": float(self.lora_dropout),
            "use_rslora": self.use_rslora,
            "projections": list(self.projections),
        }


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_target(target: object) -> None:
    if isinstance(target, str) and any(_matches(target, name) for name in PROJECTIONS):
        return
    leaf = str(target).removesuffix(".weight").rpartition(".")[2]
    if reason := _REFUSED.get(leaf) or ("norms are no weight matrices" if "norm" in leaf else None):
        _require(False, "target_modules", target, f"it cannot have an adapter: {reason}")
    near = difflib.get_close_matches(str(target), [*_NAMES, *PROJECTIONS], n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_NAMES)}, and longer endings of their names"
    _require(False, "target_modules", target, f"no such projection; {hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise BadInput(f"lora.{name} is {value!r}: {rule}")
