"""Beam's configuration, for stacks whose transformers does not know Beam."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from beam_rl.model.errors import BadInput

ATTENTION_TYPES = ("sliding_attention", "full_attention")
MLP_TYPES = ("dense", "sparse")

_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
}
"""Fields of the reference whose other values no Beam uses; they are refused by name."""


@strict
class BeamConfig(PreTrainedConfig):
    """Fields, defaults and meanings of transformers' `BeamConfig`; unsupported values raise `BadInput` by name."""

    model_type = "beam"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 151936
    hidden_size: int = 5120
    intermediate_size: int = 20480
    """Width of the dense layers' SwiGLU."""
    num_hidden_layers: int = 52
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    """Standard deviation of freshly initialised weights."""
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    """Concerns only transformers' own forward; nothing here reads it."""
    output_router_logits: bool = False
    """Concerns only what transformers' own forward returns; nothing here reads it."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float | int = 0.0

    layer_types: list[str] | None = None
    """Per layer, "sliding_attention" (window) or "full_attention". Default: every sixth and the last are full."""
    sliding_window: int | None = 512
    """Tokens a query of a sliding layer sees, itself included."""
    rope_parameters: dict | None = None
    """Per attention type, {"rope_type": "default", "rope_theta": …}, or None for NoPE with SSMax query scaling."""

    mlp_layer_types: list[str] | None = None
    """Per layer, "dense" or "sparse" (mixture of experts). Default: three dense layers, then sparse ones."""
    moe_intermediate_size: int = 2560
    """Width of one expert's SwiGLU."""
    num_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int | None = 8
    """Groups of consecutive experts; a token uses experts of its best `topk_group` groups only."""
    topk_group: int | None = 4
    norm_topk_prob: bool = True
    """Divide a token's expert weights by their sum."""
    routed_scaling_factor: int | float = 2.5
    """Factor on the weighted sum of a token's experts."""

    final_logit_softcapping: int | float | None = 30.0
    """Logits are cap * tanh(logits / cap); None leaves them as they are."""

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        layers = self.num_hidden_layers
        if self.layer_types is None:
            self.layer_types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)]
            self.layer_types[-1] = "full_attention"
        if self.mlp_layer_types is None:
            dense = min(3, layers)
            self.mlp_layer_types = ["dense"] * dense + ["sparse"] * (layers - dense)
        if self.rope_parameters is None:
            rope = {"rope_type": "default", "rope_theta": self.default_theta}
            self.rope_parameters = {"sliding_attention": rope, "full_attention": None}
        super().__post_init__(**kwargs)
        self.check()

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Leave `rope_parameters` alone: the generic converter assumes one mapping for all layers."""
        return kwargs

    def validate_rope(self) -> None:
        """`check` does it: the generic validation takes the per-type mapping of a uniform model for a flat one."""

    def validate_architecture(self) -> None:
        """`check` does it."""

    def check(self) -> None:
        """Raise `BadInput` naming the first field whose value Beam cannot have or this project cannot honour."""
        for name, only in _FIXED.items():
            if getattr(self, name) != only:
                raise _refused(name, getattr(self, name), f"only {only!r} is supported")
        if getattr(self, "quantization_config", None) is not None:
            raise _refused("quantization_config", "set", "only bfloat16 and float32 checkpoints are supported")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise _refused(name, getattr(self, name), "it must be positive")
        if self.num_attention_heads % self.num_key_value_heads:
            rule = f"it must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            raise _refused("num_attention_heads", self.num_attention_heads, rule)
        if self.head_dim % 2:
            raise _refused("head_dim", self.head_dim, "rotary embedding needs an even number")
        self._check_layers("layer_types", ATTENTION_TYPES)
        self._check_layers("mlp_layer_types", MLP_TYPES)
        self._check_attention()
        if "sparse" in (self.mlp_layer_types or ()):
            self._check_routing()
        cap = self.final_logit_softcapping
        if cap is not None and not (cap > 0 and math.isfinite(cap)):
            raise _refused("final_logit_softcapping", cap, "it must be positive, or null for none")

    def _check_layers(self, name: str, known: tuple[str, ...]) -> None:
        values = getattr(self, name)
        if len(values) != self.num_hidden_layers:
            raise _refused(name, f"{len(values)} entries", f"num_hidden_layers is {self.num_hidden_layers}")
        for value in values:
            if value not in known:
                raise _refused(name, value, f"entries must be one of {', '.join(known)}")

    def _check_attention(self) -> None:
        used = set(self.layer_types or ())
        if "sliding_attention" in used and not (self.sliding_window or 0) > 0:
            raise _refused("sliding_window", self.sliding_window, "sliding layers need a positive window")
        rope_parameters = self.rope_parameters or {}
        for kind in sorted(used):
            if kind not in rope_parameters:
                raise _refused("rope_parameters", sorted(rope_parameters), f"it must have a key {kind} (null for NoPE)")
        for kind, rope in rope_parameters.items():
            if kind not in ATTENTION_TYPES:
                raise _refused("rope_parameters", kind, f"its keys must be among {', '.join(ATTENTION_TYPES)}")
            if rope is None:
                continue
            if rope.get("rope_type", "default") != "default":
                raise _refused(f"rope_parameters.{kind}.rope_type", rope["rope_type"], "only 'default' is supported")
            for key in rope:
                if key not in ("rope_type", "rope_theta"):
                    raise _refused(f"rope_parameters.{kind}.{key}", rope[key], "only rope_type and rope_theta exist")
            theta = rope.get("rope_theta")
            if not isinstance(theta, int | float) or not theta > 0:
                raise _refused(f"rope_parameters.{kind}.rope_theta", theta, "it must be a positive number")

    def _check_routing(self) -> None:
        groups, best, experts, topk = self.n_group, self.topk_group, self.num_experts, self.num_experts_per_tok
        if not groups or groups < 0 or experts % groups or experts // groups < 2:
            rule = f"num_experts ({experts}) must divide into n_group groups of at least two experts"
            raise _refused("n_group", groups, rule)
        if not best or not 1 <= best <= groups:
            raise _refused("topk_group", best, f"it must be between 1 and n_group ({groups})")
        if not 1 <= topk <= best * (experts // groups):
            rule = f"the best {best} groups hold {best * (experts // groups)} experts"
            raise _refused("num_experts_per_tok", topk, rule)
        if not (self.routed_scaling_factor > 0 and math.isfinite(self.routed_scaling_factor)):
            raise _refused("routed_scaling_factor", self.routed_scaling_factor, "it must be positive")

    @property
    def attention_kinds(self) -> tuple[Literal["sliding_attention", "full_attention"], ...]:
        """Attention type of every layer."""
        return tuple(self.layer_types)  # type: ignore[arg-type]

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Absolute indices, counted from 0, of the layers with experts."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types or ()) if kind == "sparse")

    def layer_window(self, layer: int) -> int | None:
        """Tokens that a query of the layer sees, itself included; None for all before it."""
        return self.sliding_window if self.attention_kinds[layer] == "sliding_attention" else None

    def layer_rope_theta(self, layer: int) -> float | None:
        """Base of the layer's rotary embedding; None for NoPE with SSMax."""
        rope = (self.rope_parameters or {})[self.attention_kinds[layer]]
        return None if rope is None else float(rope["rope_theta"])


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)


def _refused(name: str, value: object, rule: str) -> BadInput:
    return BadInput(f"Beam config: {name} = {value!r} cannot be used: {rule}")


def register() -> None:
    """Make `AutoConfig` know `model_type: beam`. Idempotent; does nothing where transformers has its own Beam."""
    if BeamConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(BeamConfig.model_type, BeamConfig)


def load_config(path: str | Path) -> BeamConfig:
    """Read and check the `config.json` of a local checkpoint folder.

    Raises:
        BadInput: the folder or its config.json is missing or unreadable, is not a Beam's, or has a field that is
            unknown, of the wrong type, or of an unsupported value; the message names the file and the field.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; give a folder with a Beam checkpoint in Hugging Face format")
    file = folder / "config.json"
    if not file.is_file():
        raise BadInput(f"{folder}: no config.json; give a folder with a Beam checkpoint in Hugging Face format")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{file}: not valid JSON ({error})") from error
    if not isinstance(values, dict) or values.get("model_type") != BeamConfig.model_type:
        found = values.get("model_type") if isinstance(values, dict) else type(values).__name__
        raise BadInput(f"{file}: model_type is {found!r}, not 'beam'; only Beam checkpoints can be used")
    unknown = sorted(set(values) - _known_fields())
    if unknown:
        raise BadInput(f"{file}: unknown field {', '.join(unknown)}; remove it if the model does not depend on it")
    try:
        return BeamConfig.from_dict(values)
    except (BadInput, StrictDataclassError) as error:
        raise BadInput(f"{file}: {' '.join(str(error).split())}") from error


def _known_fields() -> set[str]:
    """Names that a Beam's config.json may hold: Beam's own, transformers' common ones, generation settings."""
    generation = set(GenerationConfig._get_default_generation_params())
    return {field.name for field in fields(BeamConfig)} | generation | {"model_type", "torch_dtype", "_name_or_path"}
