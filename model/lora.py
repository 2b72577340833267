"""LoRA on a built Beam: one pair (A, B) for every Hugging Face projection, sharded as its base weight is.

The base is frozen and never written. A layer multiplies with the merged weight, base + scale * B @ A, rounded to the
parameters' dtype: exactly the weight that the rollout gets (`names.export_hf`), so that both sides score one policy.
Merging costs r / tokens of the product and is done again in the backward pass, so nothing of a weight's size is kept.
A and B get their gradients through the low-rank product beside it, whose value is not needed. Only dropout, which no
merged weight has, adds that product to the frozen weight's.

How a pair is split, and where its gradient is summed:

| base weight | A | B |
|---|---|---|
| column-parallel (q, gate, k, v, up) | whole on every rank; sees a part of the sequence | split over its outputs |
| row-parallel (o, down) | split over its inputs | whole on every rank; sees a part of the sequence |
| experts' gate, up | whole; summed over expert-tensor ranks | split over its outputs |
| experts' down | split over its inputs | whole; summed over expert-tensor ranks |

What travels between tensor-parallel ranks are rank-r activations. A whole parameter that sees a part of the sequence
is marked `sequence_parallel`, and Megatron sums its gradient over the ranks, as it does for norms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from beam_rl.model.lora_config import ATTENTION, DENSE, EXPERTS, LoraConfig
from beam_rl.model.lora_layers import ColumnAdapter, ExpertAdapter, LoraAdapter, RowAdapter
from beam_rl.model.lora_pair import LoraPair

if TYPE_CHECKING:
    from beam_rl.model.gpt import BeamModel


def attach(model: BeamModel, lora: LoraConfig, seed: int) -> None:
    """Freeze a built model and give it fresh adapters, in the model's dtype: they alone require gradients then.

    The model must be on its device. Values depend on the seed and Hugging Face's names, not on the layout.
    """
    model.requires_grad_(False)
    model.adapted = True
    for layer in model.decoder.layers:
        _adapt_attention(layer, lora, seed)
        if hasattr(layer.mlp, "experts"):
            _adapt_experts(layer, lora, seed)
        else:
            _adapt_mlp(layer, lora, seed)
    if model.pre_process:
        model.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Recomputed layers pass on gradients only if their input wants one, and a frozen embedding's output does not."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _adapt_attention(layer: Any, lora: LoraConfig, seed: int) -> None:
    attention = layer.self_attention
    hf, tp = layer.config.beam, attention.tp_group
    qkv, out = attention.linear_qkv, attention.linear_proj
    heads, groups = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    features = {"q_proj": heads, "gate_proj": heads, "k_proj": groups, "v_proj": groups}
    shapes = {name: (size, hf.hidden_size) for name, size in features.items()}
    targets = [name for name in ATTENTION if name in lora.projections]
    common = {"lora": lora, "seed": seed, "tp": tp, "targets": targets}
    if pairs := _pairs(layer, "self_attn", shapes, split=0, linear=qkv, **common):
        widths = {name: size // tp.size() for name, size in features.items()}
        qkv.adapter = ColumnAdapter(pairs, lora, qkv, widths, attention.num_query_groups_per_partition)
    if pairs := _pairs(layer, "self_attn", {"o_proj": (hf.hidden_size, heads)}, split=1, linear=out, **common):
        out.adapter = RowAdapter(pairs, lora, out)


def _adapt_mlp(layer: Any, lora: LoraConfig, seed: int) -> None:
    hf, tp = layer.config.beam, layer.tp_group
    up, down = layer.mlp.linear_fc1, layer.mlp.linear_fc2
    hidden, width = hf.hidden_size, hf.intermediate_size
    common = {"lora": lora, "seed": seed, "tp": tp, "targets": [name for name in DENSE if name in lora.projections]}
    if pairs := _pairs(layer, "mlp", dict.fromkeys(("gate_proj", "up_proj"), (width, hidden)), 0, up, **common):
        widths = dict.fromkeys(("gate_proj", "up_proj"), width // tp.size())
        up.adapter = ColumnAdapter(pairs, lora, up, widths, groups=1)
    if pairs := _pairs(layer, "mlp", {"down_proj": (hidden, width)}, 1, down, **common):
        down.adapter = RowAdapter(pairs, lora, down)


def _pairs(
    layer: Any,
    block: str,
    shapes: Mapping[str, tuple[int, int]],
    split: int,
    linear: Any,
    *,
    lora: LoraConfig,
    seed: int,
    tp: dist.ProcessGroup,
    targets: Sequence[str],
) -> dict[str, LoraPair]:
    """Pairs of the targeted ones of the projections that a Megatron linear holds."""
    return {
        name: LoraPair(
            f"model.layers.{layer.layer_number - 1}.{block}.{name}",
            shape,
            split=split,
            group=tp,
            experts=None,
            replicas={},
            lora=lora,
            seed=seed,
            like=linear.weight,
            sequence_parallel=linear.sequence_parallel,
        )
        for name, shape in shapes.items()
        if f"{block}.{name}" in targets
    }


def _adapt_experts(layer: Any, lora: LoraConfig, seed: int) -> None:
    hf, experts = layer.config.beam, layer.mlp.experts
    hidden, width = hf.hidden_size, hf.moe_intermediate_size
    pairs = {}
    for target in EXPERTS:
        if target not in lora.projections:
            continue
        name = target.rpartition(".")[2]
        pairs[name] = LoraPair(
            f"model.layers.{layer.layer_number - 1}.{target}",
            (hidden, width) if name == "down_proj" else (width, hidden),
            split=1 if name == "down_proj" else 0,
            group=experts.tp_group,
            experts=tuple(layer.mlp.local_expert_indices),
            replicas={"ep": experts.ep_group, "dp": experts.dp_group},
            lora=lora,
            seed=seed,
            like=experts.down_proj,
            sequence_parallel=False,
        )
    if pairs:
        experts.adapter = ExpertAdapter(pairs, lora, experts)


def pairs(model: torch.nn.Module) -> Iterator[LoraPair]:
    """The pairs that one model chunk holds."""
    return (module for module in model.modules() if isinstance(module, LoraPair))


def adapter_parameters(models: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """A and B of every pair on this rank."""
    return (parameter for model in models for pair in pairs(model) for parameter in (pair.lora_A, pair.lora_B))


def sharded_adapters(model: torch.nn.Module, prefix: str, metadata: dict | None) -> dict[str, ShardedTensor]:
    """Megatron's checkpoint entries of a chunk's adapters, by parameter name."""
    state: dict[str, ShardedTensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraPair):
            state |= module.sharded_state_dict(f"{prefix}{name}.", metadata=metadata)
    return state


@contextlib.contextmanager
def dropout(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """While gradients are computed: the adapters' dropout is on."""
    adapters = [module for model in models for module in model.modules() if isinstance(module, LoraAdapter)]
    for adapter in adapters:
        adapter.train()
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.eval()
