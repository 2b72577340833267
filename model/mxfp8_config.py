"""What runs in MXFP8 and how its scales are rounded. Needs no torch, so that a recipe is checked in no time."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from beam_rl.model.errors import BadInput

if TYPE_CHECKING:
    from beam_rl.model.config import BeamConfig

BLOCK = 32
"""Consecutive values that share a scale."""
SCALINGS = ("rceil", "floor")
_QUANTISABLE = re.compile(
    r"model\.layers\.\d+\.(self_attn\.(q|k|v|gate|o)_proj|mlp\.(experts\.\d+\.)?(gate|up|down)_proj)(\.weight)?"
)


@dataclass(frozen=True)
class Mxfp8Settings:
    """MXFP8 of both sides: blocks of 32 E4M3 values with an E8M0 scale, of weights, activations and gradients.

    The projections of attention, dense MLP and experts run in it. The router, the norms, the embedding and the LM head
    never do.
    """

    scaling: Literal["rceil", "floor"] = "rceil"
    """How a block's scale follows from its largest magnitude. rceil: the smallest power of two under which it does not
    overflow, as in NVIDIA's libraries. floor: the OCP specification's, under which the largest values saturate."""
    exclude: tuple[str, ...] = ()
    """Projections to leave out as well: parts of their Hugging Face names, such as `self_attn.o_proj`, `layers.0`,
    `layers.7.mlp.experts` or `down_proj`. Projections that are one GEMM (q, k, v and gate; gate and up; all experts of
    a layer) are left out together or not at all."""
    activations: bool = True
    """Also quantise activations and gradients. False: weights only. The products are then the model's own, by weights
    rounded to MXFP8's values, so that any rollout engine which is given the rounded weights computes the same model,
    on a GPU without MX units, too."""

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise BadInput(f"mxfp8.scaling is {self.scaling!r}: it must be one of {', '.join(SCALINGS)}")
        if isinstance(self.exclude, str) or not all(isinstance(part, str) and part for part in self.exclude):
            raise BadInput(f"mxfp8.exclude is {self.exclude!r}: it must be a list of parts of projections' names")
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def covers(self, name: str) -> bool:
        """Whether the projection with this Hugging Face name (of the module, or of its weight) runs in MXFP8."""
        if not _QUANTISABLE.fullmatch(name):
            return False
        return not any(_contains(name.removesuffix(".weight"), part) for part in self.exclude)

    def check(self, config: "BeamConfig", *, tp: int = 1, etp: int = 1) -> None:
        """Raise BadInput where the model, split over tp and etp ranks, cannot run under these settings.

        Args:
            config: the model.
            tp: ranks over which attention and dense MLPs are split.
            etp: ranks over which each expert is split.
        """
        gemms = list(_gemms(config))
        for part in self.exclude:
            if not any(_contains(name, part) for gemm in gemms for name in gemm):
                raise BadInput(
                    f"mxfp8.exclude: {part!r} is in no projection's name. The router, the norms, the embedding and the "
                    "LM head are left out anyway; name others like self_attn.o_proj, mlp.down_proj or layers.0."
                )
        for gemm in gemms:
            kept = [name for name in gemm if self.covers(name)]
            if kept and len(kept) < len(gemm):
                out = next(name for name in gemm if not self.covers(name))
                raise BadInput(
                    f"mxfp8.exclude leaves {out} out, but not {kept[0]}, which is in the same GEMM. "
                    "Leave both out, or neither."
                )
        for name, size, split in self._sizes(config, [gemm[0] for gemm in gemms], tp, etp):
            if size % BLOCK:
                where = "" if split is None else f" on each rank ({split})"
                fewer = "" if split is None else "split over fewer ranks, "
                raise BadInput(
                    f"MXFP8 needs multiples of {BLOCK}, and {name} is {size}{where}: {fewer}"
                    "leave what has this size out (mxfp8.exclude), or train in bf16"
                )

    def _sizes(
        self, config: "BeamConfig", gemms: list[str], tp: int, etp: int
    ) -> Iterator[tuple[str, int, str | None]]:
        """What must be a multiple of the block: name, size on a rank, and the split (None: not split)."""
        used = [name for name in gemms if self.covers(name)]
        by_tp, by_etp = (f"tp = {tp}" if tp > 1 else None), (f"etp = {etp}" if etp > 1 else None)
        if used:
            yield "hidden_size", config.hidden_size, None
        if any(".self_attn." in name for name in used):
            heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
            yield "head_dim", dim, None
            yield "num_attention_heads * head_dim", heads * dim // tp, by_tp
            yield "num_key_value_heads * head_dim", groups * dim // tp, by_tp
        if any(".mlp." in name and ".experts." not in name for name in used):
            yield "intermediate_size", config.intermediate_size // tp, by_tp
        if any(".experts." in name for name in used):
            yield "moe_intermediate_size", config.moe_intermediate_size // etp, by_etp

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which the constructor makes the same settings, for JSON."""
        return asdict(self) | {"exclude": list(self.exclude)}


def _contains(name: str, part: str) -> bool:
    return f".{part}." in f".{name}."


def _gemms(config: "BeamConfig") -> Iterator[tuple[str, ...]]:
    """Hugging Face names of the projections that are computed in one GEMM, for every GEMM that can be in MXFP8."""
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        yield tuple(f"{attention}{name}_proj" for name in ("q", "k", "v", "gate"))
        yield (f"{attention}o_proj",)
        places = [mlp]
        if layer in config.sparse_layers:
            places = [f"{mlp}experts.{expert}." for expert in range(config.num_experts)]
        yield tuple(f"{place}{name}_proj" for place in places for name in ("gate", "up"))
        yield tuple(f"{place}down_proj" for place in places)
