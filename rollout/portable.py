"""Beam on plain vLLM layers, for platforms where vLLM has no Beam of its own.

vLLM supplies what serving needs (paged attention, tensor parallel linears, fused experts with routed-expert capture,
weight loading); every number that is Beam's own comes from `beam_rl.model.numerics`, which the trainer calls too.
Layouts: hidden states are [tokens, hidden], all running requests packed along `tokens`; positions are [tokens].
"""

from collections.abc import Iterable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from beam_rl.model import numerics
from beam_rl.model.config import BeamConfig
from beam_rl.rollout.mxfp8 import Mxfp8Config, settings_of

Rotations = dict[float, tuple[Tensor, Tensor]]
"""Per rotary base: cosines and sines of this step's positions, shared by all layers."""


class BeamRMSNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return numerics.rms_norm(x, self.weight, self.eps)


class BeamAttention(nn.Module):
    """Grouped-query attention: per-head Q/K norm, RoPE or SSMax by layer type, gated output."""

    def __init__(
        self,
        config: BeamConfig,
        layer: int,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads // tp
        self.kv_heads = max(1, config.num_key_value_heads // tp)
        self.rope_theta = config.layer_rope_theta(layer)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.gate_proj = ColumnParallelLinear(
            config.hidden_size,
            config.num_attention_heads * config.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_proj",
        )
        self.gate_bias = nn.Parameter(torch.zeros(self.heads), requires_grad=False)
        self.gate_bias.weight_loader = sharded_weight_loader(0)  # type: ignore[attr-defined]
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = BeamRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = BeamRMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(
            self.heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=cache_config,
            per_layer_sliding_window=config.layer_window(layer),
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor, positions: Tensor, rotations: Rotations) -> Tensor:
        qkv, _ = self.qkv_proj(x)
        gate, _ = self.gate_proj(x)
        q, k, v = qkv.split([n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        q = self.q_norm(q.reshape(-1, self.heads, self.head_dim))
        k = self.k_norm(k.reshape(-1, self.kv_heads, self.head_dim))
        if self.rope_theta is None:
            q = numerics.apply_ssmax(q, positions)
        else:
            cos, sin = rotations[self.rope_theta]
            q, k = numerics.rotate(q, cos, sin), numerics.rotate(k, cos, sin)
        attention = self.attn(q.flatten(1), k.flatten(1), v).view(-1, self.heads, self.head_dim)
        gated = numerics.output_gate(attention, gate.view(-1, self.heads, self.head_dim), self.gate_bias)
        out, _ = self.o_proj(gated.flatten(1))
        return out


class BeamMLP(nn.Module):
    """SwiGLU of the dense layers."""

    def __init__(self, config: BeamConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(numerics.swiglu(*gate_up.chunk(2, dim=-1)))
        return out


class BeamRouter(nn.Module):
    """Float32 router weight and correction bias, whatever the model's dtype."""

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        experts, hidden = config.num_experts, config.hidden_size
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=torch.float32), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return numerics.router_logits(x, self.weight)


class BeamMoE(nn.Module):
    """Routed experts on vLLM's layer, which also feeds routed-expert capture; the routing itself is Beam's."""

    def __init__(self, config: BeamConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.gate = BeamRouter(config)
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            scoring_func="sigmoid",
            custom_routing_function=self.route,
            router_logits_dtype=torch.float32,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
        )

    def route(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """vLLM's custom routing function: weights float32 and ids [tokens, topk].

        The routed scaling factor goes into the weights, so that the kernel, which sums in float32, rounds once.
        """
        config = self.config
        assert config.n_group is not None  # checked when the config was read, and so is the next
        assert config.topk_group is not None
        bias = self.gate.e_score_correction_bias
        weights, ids = numerics.route(gating_output, bias, topk, config.n_group, config.topk_group, renormalize)
        return weights * config.routed_scaling_factor, ids

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(hidden_states=x, router_logits=self.gate(x))


class BeamDecoderLayer(nn.Module):
    """Attention and MLP, each between two norms, joined to the residual by depth-scaled addition."""

    def __init__(
        self,
        config: BeamConfig,
        layer: int,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.layer = layer
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = BeamAttention(config, layer, cache_config, quant_config, f"{prefix}.self_attn")
        mlp = BeamMoE if layer in config.sparse_layers else BeamMLP
        self.mlp = mlp(config, quant_config, f"{prefix}.mlp")
        self.input_layernorm = BeamRMSNorm(hidden, eps)
        self.post_attention_layernorm = BeamRMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = BeamRMSNorm(hidden, eps)
        self.post_feedforward_layernorm = BeamRMSNorm(hidden, eps)

    def forward(self, x: Tensor, positions: Tensor, rotations: Rotations) -> Tensor:
        n = 2 * (self.layer + 1)
        branch = self.self_attn(self.input_layernorm(x), positions, rotations)
        x = numerics.depth_residual(self.post_attention_layernorm(branch), x, n)
        branch = self.mlp(self.pre_feedforward_layernorm(x))
        return numerics.depth_residual(self.post_feedforward_layernorm(branch), x, n + 1)


class BeamModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(
        self,
        config: BeamConfig,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            BeamDecoderLayer(config, layer, cache_config, quant_config, f"{prefix}.layers.{layer}")
            for layer in range(config.num_hidden_layers)
        )
        self.norm = BeamRMSNorm(config.hidden_size, config.rms_norm_eps)
        thetas = {config.layer_rope_theta(layer) for layer in range(config.num_hidden_layers)} - {None}
        # A plain attribute: as a buffer it would be thrown away by layerwise weight reloading.
        self.inverse_frequencies = {
            theta: numerics.rope_inverse_frequencies(config.head_dim, theta) for theta in thetas if theta is not None
        }

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rotations = {theta: numerics.rope_cos_sin(positions, f) for theta, f in self.inverse_frequencies.items()}
        for layer in self.layers:
            x = layer(x, positions, rotations)
        return self.norm(x)


class BeamForCausalLM(nn.Module):
    """The model class that vLLM instantiates. Pipeline parallelism and LoRA are not supported, and vLLM says so."""

    allow_patterns_overrides = ("model*.safetensors",)
    """Files of the checkpoint folder that hold weights; other safetensors files beside them are not the model's."""
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = cast(BeamConfig, vllm_config.model_config.hf_config)
        self.config = config
        quant_config = None
        if (settings := settings_of(vllm_config)) is not None:
            ranks = get_tensor_model_parallel_world_size()
            settings.check(config, tp=ranks, etp=ranks)
            quant_config = Mxfp8Config(settings)
        self.model = BeamModel(config, vllm_config.cache_config, quant_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm."""
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [tokens, vocabulary] in float32, after the softcap; None on ranks that do not sample."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        return None if logits is None else numerics.softcap(logits, self.config.final_logit_softcapping)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors under their Hugging Face names; returns the names of the parameters that were set."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
