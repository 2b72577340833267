"""Beam's transformer layer on Megatron-Core: sandwich norms, depth-scaled residual, SwiGLU in float32."""

from functools import partial
from typing import Any

import torch
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
from beam_rl.model.forget import forget_norm
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

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """SwiGLU MLP of hidden_states [tokens, 1, hidden], same shape out."""
        gate_up, _bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(fused.swiglu(gate_up))


class BeamTransformerLayer(TransformerLayer):
    """Megatron's layer with a forward pass of its own: both residual additions are norm, then depth-scaled sum."""

    config: BeamTransformerConfig
    next_norm: tuple[BeamRMSNorm] | None = None
    """The next layer's first norm, which then is computed here, with the sum that it norms; a tuple, lest it be taken
    for a part of this layer. None: the next layer computes it."""

    def __init__(
        self, config: BeamTransformerConfig, submodules: TransformerLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        norm = partial(BeamRMSNorm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_attention_layernorm = norm()
        self.post_feedforward_layernorm = norm()
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

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        packed_seq_params: PackedBatch,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [tokens (/ tp if sequence parallel), 1, hidden] after this layer, and `context` for the next.

        Args:
            context: the first norm of hidden_states, where the layer before has computed it (`next_norm`). Megatron
                hands a layer's second output to the next under this name.
        """
        batch, eps = packed_seq_params, self.config.layernorm_epsilon
        addition = 2 * self.layer_number  # layer_number counts from 1 over all pipeline stages; 1 is the embedding's
        normed = self.input_layernorm(hidden_states) if context is None else context
        branch, _ = self.self_attention(normed, attention_mask, packed_seq_params=batch)
        self._forget(normed, hidden_states, self.input_layernorm, branch)
        weights = self.post_attention_layernorm.weight, self.pre_mlp_layernorm.weight
        hidden_states, normed = fused.boundary(branch, weights[0], hidden_states, weights[1], eps, addition)
        branch, _ = self.mlp(normed, batch)
        self._forget(normed, hidden_states, self.pre_mlp_layernorm, branch)
        weight = self.post_feedforward_layernorm.weight
        if self.next_norm is None:
            return fused.residual_addition(branch, weight, hidden_states, eps, addition + 1), None
        (norm,) = self.next_norm
        return fused.boundary(branch, weight, hidden_states, norm.weight, eps, addition + 1)

    def _forget(self, normed: Tensor, x: Tensor, norm: BeamRMSNorm, branch: Tensor) -> None:
        """Do not keep the norm of x that the branch was computed from, unless the whole layer is recomputed anyway."""
        if self.config.recompute_granularity != "full":
            forget_norm(normed, x, norm.weight, norm.eps, branch)


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
            pre_mlp_layernorm=BeamRMSNorm,
            mlp=mlp,
        ),
    )
