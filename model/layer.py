"""Beam's transformer layer on Megatron-Core: sandwich norms, depth-scaled residual, SwiGLU in float32."""

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from beam_rl.model import fused
from beam_rl.model.attention import BeamCoreAttention, BeamSelfAttention
from beam_rl.model.batch import PackedBatch
from beam_rl.model.experts import BeamExperts
from beam_rl.model.linear import BeamColumnParallelLinear, BeamRowParallelLinear
from beam_rl.model.moe import BeamMoELayer, BeamRouter
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.model.transformer_config import BeamTransformerConfig


class BeamRMSNorm(torch.nn.Module):
    """RMSNorm with the reference's rounding; its weight's gradient is summed over sequence-parallel ranks."""

    def __init__(self, config: BeamTransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return fused.rms_norm(x, self.weight, self.eps)


class BeamMLP(MLP):
    """The dense layers' MLP."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """SwiGLU MLP of hidden_states [tokens, 1, hidden], same shape out."""
        gate_up, _bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(fused.swiglu(gate_up))


class BeamTransformerLayer(TransformerLayer):
    """Megatron's layer; both residual additions become norm, then depth-scaled sum."""

    config: BeamTransformerConfig

    def __init__(
        self, config: BeamTransformerConfig, submodules: TransformerLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        norm = partial(BeamRMSNorm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_attention_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        # layer_number counts from 1 over all pipeline stages; addition 1 would be the embedding.
        self.self_attn_bda = lambda training, fused: self._add_attention
        self.mlp_bda = lambda training, fused: self._add_mlp
        self._normed: Tensor | None = None
        if config.mxfp8 is not None:
            self._use_mxfp8(config.mxfp8)

    def _use_mxfp8(self, settings: Mxfp8Settings) -> None:
        """Tell the projections that the settings cover, each by one of its Hugging Face names."""
        prefix = f"model.layers.{self.layer_number - 1}."
        attention, mlp = self.self_attention, self.mlp
        linears = {"self_attn.q_proj": attention.linear_qkv, "self_attn.o_proj": attention.linear_proj}
        if isinstance(mlp, BeamMoELayer):
            gate_up, down = (settings.covers(f"{prefix}mlp.experts.0.{name}_proj") for name in ("gate", "down"))
            mlp.experts.mxfp8 = (settings if gate_up else None, settings if down else None)
        else:
            linears |= {"mlp.gate_proj": mlp.linear_fc1, "mlp.down_proj": mlp.linear_fc2}
        for name, linear in linears.items():
            linear.mxfp8 = settings if settings.covers(f"{prefix}{name}") else None

    def _add_attention(self, branch_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        """The residual after attention; the MLP's norm of it is computed along, and waits in `_normed`."""
        total, self._normed = fused.boundary(
            branch_and_bias[0],
            self.post_attention_layernorm.weight,
            residual,
            self.pre_mlp_layernorm.weight,
            self.config.layernorm_epsilon,
            2 * self.layer_number,
        )
        return total

    def _add_mlp(self, branch_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        norm, eps = self.post_feedforward_layernorm, self.config.layernorm_epsilon
        return fused.residual_addition(branch_and_bias[0], norm.weight, residual, eps, 2 * self.layer_number + 1)

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: None = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: PackedBatch | None = None,
    ) -> Tensor:
        """Megatron's, of the norm that `_add_attention` left, handing the micro batch to the experts."""
        normed, self._normed = self._normed, None
        if self.is_moe_layer:
            output = self.mlp(normed, packed_seq_params)
        elif self.recompute_mlp:
            output = tensor_parallel.checkpoint(self.mlp, False, normed)
        else:
            output = self.mlp(normed)
        return self._forward_post_mlp(output, hidden_states)


def layer_spec(*, sparse: bool) -> ModuleSpec:
    """Megatron's description of a layer with (sparse) or without experts."""
    attention = ModuleSpec(
        module=BeamSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=BeamColumnParallelLinear,
            core_attention=BeamCoreAttention,
            linear_proj=BeamRowParallelLinear,
            q_layernorm=BeamRMSNorm,
            k_layernorm=BeamRMSNorm,
        ),
    )
    mlp: Any
    if sparse:
        mlp = partial(BeamMoELayer, submodules=MoESubmodules(router=BeamRouter, experts=BeamExperts))
    else:
        linears = MLPSubmodules(linear_fc1=BeamColumnParallelLinear, linear_fc2=BeamRowParallelLinear)
        mlp = partial(BeamMLP.as_mlp_submodule, submodules=linears)
    return ModuleSpec(
        module=BeamTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=BeamRMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=BeamRMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
