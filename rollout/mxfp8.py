"""MXFP8 in the portable Beam: vLLM's layers, whose weights and inputs pass through the trainer's quantiser.

Weights are quantised and dequantised once, after loading; inputs before every product. What comes out is exact in
bfloat16, so vLLM's own kernels for linears do the rest. Its fused expert kernel cannot quantise between its two
products, so the experts run as in the trainer, as grouped GEMMs.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from beam_rl.model import mxfp8, numerics
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout.profile import MXFP8_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FUSED = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}
"""vLLM's names of fused projections, and the Hugging Face name of one of their parts."""


def settings_of(vllm_config: "VllmConfig") -> Mxfp8Settings | None:
    """The settings that the engine was started with (`profile.engine_init_kwargs`)."""
    additional = vllm_config.additional_config
    chosen = additional.get(MXFP8_KEY) if isinstance(additional, dict) else None
    return None if chosen is None else Mxfp8Settings(**chosen)


class Mxfp8Config(QuantizationConfig):
    """Chooses for every layer of the portable Beam between the quantised method and vLLM's plain one."""

    def __init__(self, settings: Mxfp8Settings) -> None:
        super().__init__()
        self.settings = settings

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear or of a layer's experts, by its name in the model."""
        settings = self.settings
        if isinstance(layer, RoutedExperts):
            gate_up, down = (settings.covers(f"{prefix}.0.{name}_proj") for name in ("gate", "down"))
            return Mxfp8ExpertsMethod(layer.moe_config, settings.scaling, gate_up, down) if gate_up or down else None
        if not isinstance(layer, LinearBase):
            return None
        parent, _, name = prefix.rpartition(".")
        covered = settings.covers(f"{parent}.{FUSED.get(name, name)}")
        return Mxfp8LinearMethod(settings.scaling) if covered else UnquantizedLinearMethod()

    # The rest of the interface is for checkpoints that are quantised on disk.

    def get_name(self) -> Any:
        return "beam_mxfp8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Mxfp8Config":
        return cls(Mxfp8Settings(**config))


@register_weight_loader_v2_supported_method
class Mxfp8LinearMethod(UnquantizedLinearMethod):
    """vLLM's linear on quantised and dequantised operands."""

    def __init__(self, scaling: str) -> None:
        super().__init__()
        self.scaling = scaling

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data = mxfp8.round_trip(layer.weight.data, self.scaling)
        super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().apply(layer, mxfp8.round_trip(x, self.scaling), bias)


class Mxfp8ExpertsMethod(UnquantizedFusedMoEMethod):
    """A layer's experts as grouped GEMMs, quantised before the first product, the second, or both."""

    def __init__(self, moe: Any, scaling: str, gate_up: bool, down: bool) -> None:
        super().__init__(moe)
        self.scaling = scaling
        self.gate_up, self.down = gate_up, down

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.gate_up:
            layer.w13_weight.data = mxfp8.round_trip(layer.w13_weight.data, self.scaling)
        if self.down:
            layer.w2_weight.data = mxfp8.round_trip(layer.w2_weight.data, self.scaling)

    def apply(  # type: ignore[override]  # vLLM's own overrides torch.nn.Module's
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        """Weighted sum of the chosen experts' outputs for x [tokens, hidden]; ids and weights [tokens, topk]."""
        tokens, topk = topk_ids.shape
        ids = topk_ids.flatten()
        order = ids.argsort()
        ends = torch.bincount(ids, minlength=len(layer.w13_weight)).cumsum(0, dtype=torch.int32)
        rows = mxfp8.round_trip(x, self.scaling) if self.gate_up else x
        gate, up = numerics.expert_linear(rows[order // topk], layer.w13_weight, ends).chunk(2, dim=-1)
        hidden = numerics.swiglu(gate, up).to(x.dtype)
        if self.down:
            hidden = mxfp8.round_trip(hidden, self.scaling)
        outputs = numerics.expert_linear(hidden, layer.w2_weight, ends)
        outputs = torch.empty_like(outputs).index_copy_(0, order, outputs)
        return numerics.combine_experts(outputs.view(tokens, topk, -1), topk_weights, 1.0, x.dtype)
