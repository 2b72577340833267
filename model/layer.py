"""Beam's transformer layer on Megatron-Core: sandwich norms, depth-scaled residual, SwiGLU in float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from beam_rl.model import fused, numerics
from beam_rl.model.attention import BeamCoreAttention, BeamSelfAttention
from beam_rl.model.batch import PackedBatch
from beam_rl.model.experts import BeamExperts
from beam_rl.model.moe import BeamMoELayer, BeamRouter
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
        n = 2 * self.layer_number
        self.self_attn_bda = self._residual_addition("post_attention_layernorm", n)
        self.mlp_bda = self._residual_addition("post_feedforward_layernorm", n + 1)

    def _residual_addition(self, norm: str, n: int) -> Callable:
        def add(branch_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            return numerics.depth_residual(getattr(self, norm)(branch_and_bias[0]), residual, n)

        return lambda training, fused: add

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: None = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: PackedBatch | None = None,
    ) -> Tensor:
        """Megatron's, handing the micro batch to the experts; no chunking, no inference."""
        normed = self._forward_pre_mlp_layernorm(hidden_states)
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
            linear_qkv=ColumnParallelLinear,
            core_attention=BeamCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=BeamRMSNorm,
            k_layernorm=BeamRMSNorm,
        ),
    )
    mlp: Any
    if sparse:
        mlp = partial(BeamMoELayer, submodules=MoESubmodules(router=BeamRouter, experts=BeamExperts))
    else:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
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
