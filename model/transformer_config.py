"""Beam's shape and arithmetic as a Megatron-Core configuration."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.model.mxfp8_config import Mxfp8Settings

UNSUPPORTED = {
    "virtual_pipeline_model_parallel_size": "virtual pipelining is not supported; use pp alone",
    "num_layers_in_first_pipeline_stage": "pipeline stages have equal numbers of layers; choose a pp that divides them",
    "num_layers_in_last_pipeline_stage": "pipeline stages have equal numbers of layers; choose a pp that divides them",
    "pipeline_model_parallel_layout": "pipeline stages have equal numbers of layers; choose a pp that divides them",
    "hierarchical_context_parallel_sizes": "context parallelism has one level; use cp alone",
    "moe_router_fusion": "it would bypass the replay of routes (R3)",
}
"""Megatron's options that Beam's modules do not have, by field, with the reason and the remedy."""


@dataclass
class BeamTransformerConfig(TransformerConfig):
    """Megatron's configuration together with the Beam that it was made from, which the Beam modules read."""

    hf: BeamConfig | None = None
    mxfp8: Mxfp8Settings | None = None
    """Which projections run in MXFP8, and how; None: none."""

    @property
    def beam(self) -> BeamConfig:
        """The Beam configuration (never None after `transformer_config`)."""
        assert self.hf is not None
        return self.hf


def transformer_config(
    hf: BeamConfig,
    *,
    params_dtype: torch.dtype,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    sequence_parallel: bool | None = None,
    recompute: Literal["full"] | None = None,
    mxfp8: Mxfp8Settings | None = None,
    **overrides: Any,
) -> BeamTransformerConfig:
    """Megatron configuration of a Beam under a parallel layout.

    Args:
        hf: the model.
        params_dtype: of the weights and activations; router weights and biases are float32 always.
        tp, pp, ep, etp, cp: sizes of tensor, pipeline, expert, expert-tensor and context parallelism.
        sequence_parallel: default is tp > 1, which experts need.
        recompute: "full" recomputes whole layers in the backward pass.
        mxfp8: run projections in MXFP8.
        overrides: any other `TransformerConfig` field.

    Raises:
        BadInput: a layout that does not divide the model, or that Megatron or the Beam modules cannot run;
            a size on a rank that does not suit MXFP8.
    """
    if sequence_parallel is None:
        sequence_parallel = tp > 1
    _check_layout(hf, tp=tp, pp=pp, ep=ep, etp=etp, cp=cp)
    _check_features(tp, sequence_parallel, overrides)
    if mxfp8 is not None:
        mxfp8.check(hf, tp=tp, etp=etp)
    sparse = bool(hf.sparse_layers)
    fields: dict[str, Any] = {
        "hf": hf,
        "mxfp8": mxfp8,
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": hf.initializer_range,
        # Fused kernels that need Apex or Transformer Engine, or that round elsewhere than `numerics`.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "sequence_parallel": sequence_parallel,
        "variable_seq_lengths": pp > 1,  # packed micro batches differ in length
    }
    if sparse:
        fields |= {
            "num_moe_experts": hf.num_experts,
            "moe_layer_freq": [int(kind == "sparse") for kind in hf.mlp_layer_types or ()],
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_score_function": "sigmoid",
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
        }
    if recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return BeamTransformerConfig(**(fields | overrides))


def _check_layout(hf: BeamConfig, *, tp: int, pp: int, ep: int, etp: int, cp: int) -> None:
    rules = [
        ("tp", tp, "num_attention_heads", hf.num_attention_heads),
        ("tp", tp, "num_key_value_heads", hf.num_key_value_heads),
        ("tp", tp, "intermediate_size", hf.intermediate_size),
        ("tp", tp, "vocab_size", hf.vocab_size),
        ("pp", pp, "num_hidden_layers", hf.num_hidden_layers),
        ("ep", ep, "num_experts", hf.num_experts),
        ("etp", etp, "moe_intermediate_size", hf.moe_intermediate_size),
    ]
    for axis, size, name, whole in rules:
        if size < 1 or whole % size:
            raise BadInput(f"{axis} = {size} does not divide the model's {name} ({whole})")
    if cp < 1:
        raise BadInput(f"cp = {cp}: it must be at least 1")
    if not hf.sparse_layers and ep > 1:
        raise BadInput(f"ep = {ep}: the model has no experts to distribute; set ep to 1")


def _check_features(tp: int, sequence_parallel: bool, overrides: dict[str, Any]) -> None:
    if sequence_parallel and tp == 1:
        raise BadInput("sequence_parallel = True with tp = 1: it splits tokens over tensor-parallel ranks; set tp > 1")
    for name, why in UNSUPPORTED.items():
        if overrides.get(name):
            raise BadInput(f"{name} = {overrides[name]!r}: {why}")
