"""Hugging Face names of Beam's tensors, and how they lie in the Megatron modules of one rank.

Every Hugging Face tensor's local part is a view of a Megatron parameter (`Piece`): loading copies a slice of the
checkpoint into the view, exporting gathers the views. Experts have per-expert names everywhere.

Under LoRA an export is of merged weights: each part gets its adapter's product on the rank that holds it, from the
pristine base every time, so that nothing accumulates.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from beam_rl.model.attention import BeamSelfAttention
from beam_rl.model.checkpoint import HFCheckpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.experts import BeamExperts
from beam_rl.model.gpt import BeamModel
from beam_rl.model.layer import BeamTransformerLayer
from beam_rl.model.lora import pairs
from beam_rl.model.moe import BeamMoELayer
from beam_rl.model.tensors import hf_tensors, is_float32
from beam_rl.model.transformer_config import BeamTransformerConfig

__all__ = [
    "Piece",
    "adapter_matrices",
    "describe_hf",
    "export_adapter",
    "export_hf",
    "fingerprint",
    "hf_tensors",
    "load_hf",
    "pieces",
]

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}
"""Hugging Face's names of a layer's norms, and Megatron's."""
FUSED_BYTES = 2**30
"""Largest tensor of fused experts: the least size of the buffers in which vLLM and SkyRL send weights."""


@dataclass(frozen=True)
class Piece:
    """This rank's part of one Hugging Face tensor."""

    name: str
    """Hugging Face's name."""
    view: Tensor
    """View of the Megatron parameter or buffer; of any shape with the part's elements in the part's order."""
    shape: tuple[int, ...]
    """Shape of the part, in Hugging Face's layout."""
    axis: int | None = None
    """Axis along which the ranks of `group` hold consecutive parts; None: everyone holds all of it."""
    group: dist.ProcessGroup | None = None
    """Tensor-parallel group of the parts: the experts', or everything else's."""
    merge: Callable[[Tensor], Tensor] | None = None
    """Makes the part with the adapter beside it, a new tensor, of the part."""

    def load(self, checkpoint: HFCheckpoint) -> None:
        """Copy this part, and only it, from the checkpoint."""
        start = 0
        if self.axis is not None:
            assert self.group is not None
            start = self.group.rank() * self.shape[self.axis]
        part = checkpoint.read(self.name, self.axis or 0, start, self.shape[self.axis or 0])
        self.view.copy_(part.view(self.view.shape))

    def full(self) -> Tensor:
        """The whole tensor, merged and gathered over `group` (a collective); may share memory with the parameter."""
        part = self.view.reshape(self.shape)
        if self.merge is not None:
            part = self.merge(part)
        if self.axis is None or self.group is None or self.group.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=self.axis)


def pieces(model: BeamModel, *, fused_experts: bool = False) -> Iterator[Piece]:
    """All pieces that one model chunk holds; `fused_experts` as of `export_hf`."""
    tp = model.pg_collection.tp
    if model.pre_process:
        yield _split("model.embed_tokens.weight", model.embedding.word_embeddings.weight, 0, tp)
    for layer in model.decoder.layers:
        yield from _layer_pieces(layer, fused_experts)
    if model.post_process:
        yield _whole("model.norm.weight", model.decoder.final_layernorm.weight)
        yield _split("lm_head.weight", model.output_layer.weight, 0, tp)


def _whole(name: str, parameter: Tensor, merge: Callable[[Tensor], Tensor] | None = None) -> Piece:
    return Piece(name, parameter.data, tuple(parameter.shape), merge=merge)


def _split(
    name: str,
    part: Tensor,
    axis: int,
    group: dist.ProcessGroup,
    merge: Callable[[Tensor], Tensor] | None = None,
) -> Piece:
    return Piece(name, part.data, tuple(part.shape), axis, group, merge)


def _merge(module: torch.nn.Module, projection: str, expert: int | None = None) -> Callable[[Tensor], Tensor] | None:
    """How the adapter of a projection inside a Megatron module, or of one of its local experts, is merged."""
    adapter: Any = getattr(module, "adapter", None)
    pair = None if adapter is None else adapter.pair(projection)
    return None if pair is None else partial(pair.merged, expert=expert)


def _layer_pieces(layer: BeamTransformerLayer, fused_experts: bool) -> Iterator[Piece]:
    prefix = f"model.layers.{layer.layer_number - 1}."
    for theirs, ours in NORMS.items():
        yield _whole(f"{prefix}{theirs}.weight", getattr(layer, ours).weight)
    yield from _attention_pieces(f"{prefix}self_attn.", layer.self_attention)
    mlp = layer.mlp
    if isinstance(mlp, BeamMoELayer):
        yield _whole(f"{prefix}mlp.gate.weight", mlp.router.weight)
        yield _whole(f"{prefix}mlp.gate.e_score_correction_bias", mlp.router.expert_bias)
        if fused_experts:
            yield from _stacked_pieces(f"{prefix}mlp.experts.", mlp.experts)
        else:
            yield from _expert_pieces(f"{prefix}mlp.experts.", mlp.experts, mlp.local_expert_indices)
    else:
        tp, gate_up, down = layer.tp_group, mlp.linear_fc1, mlp.linear_fc2
        gate, up = gate_up.weight.chunk(2)
        yield _split(f"{prefix}mlp.gate_proj.weight", gate, 0, tp, _merge(gate_up, "gate_proj"))
        yield _split(f"{prefix}mlp.up_proj.weight", up, 0, tp, _merge(gate_up, "up_proj"))
        yield _split(f"{prefix}mlp.down_proj.weight", down.weight, 1, tp, _merge(down, "down_proj"))


def _attention_pieces(prefix: str, attention: BeamSelfAttention) -> Iterator[Piece]:
    tp, dim = attention.tp_group, attention.hidden_size_per_attention_head
    groups = attention.num_query_groups_per_partition
    heads = attention.num_attention_heads_per_partition // groups
    # Rows of the fused projection: for every key-value group its q heads, their gates, its k, its v.
    fused = attention.linear_qkv.weight.data.view(groups, 2 * heads + 2, dim, -1)
    for name, part in zip(("q", "gate", "k", "v"), fused.split([heads, heads, 1, 1], dim=1), strict=True):
        rows = part.shape[0] * part.shape[1] * dim
        merge = _merge(attention.linear_qkv, f"{name}_proj")
        yield Piece(f"{prefix}{name}_proj.weight", part, (rows, part.shape[3]), 0, tp, merge)
    yield _split(f"{prefix}gate_bias", attention.gate_bias, 0, tp)
    out = attention.linear_proj
    yield _split(f"{prefix}o_proj.weight", out.weight, 1, tp, _merge(out, "o_proj"))
    yield _whole(f"{prefix}q_norm.weight", attention.q_layernorm.weight)
    yield _whole(f"{prefix}k_norm.weight", attention.k_layernorm.weight)


def _expert_pieces(prefix: str, experts: BeamExperts, indices: Sequence[int]) -> Iterator[Piece]:
    etp = experts.tp_group
    for local, index in enumerate(indices):
        gate, up = experts.gate_up_proj[local].chunk(2)
        down = experts.down_proj[local]
        yield _split(f"{prefix}{index}.gate_proj.weight", gate, 0, etp, _merge(experts, "gate_proj", local))
        yield _split(f"{prefix}{index}.up_proj.weight", up, 0, etp, _merge(experts, "up_proj", local))
        yield _split(f"{prefix}{index}.down_proj.weight", down, 1, etp, _merge(experts, "down_proj", local))


def _stacked_pieces(prefix: str, experts: BeamExperts) -> Iterator[Piece]:
    adapter: Any = experts.adapter
    adapted = adapter is not None and (adapter.pair("gate_proj") or adapter.pair("up_proj"))
    yield _whole(f"{prefix}gate_up_proj", experts.gate_up_proj, adapter.merged_gate_up if adapted else None)
    yield _whole(f"{prefix}down_proj", experts.down_proj, _merge(experts, "down_proj"))


@torch.no_grad()
def load_hf(model_chunks: Sequence[torch.nn.Module], checkpoint: HFCheckpoint) -> None:
    """Fill this rank's chunks (wrapped or not); only the local shards are read."""
    for chunk in model_chunks:
        for piece in pieces(_unwrap(chunk)):
            piece.load(checkpoint)


@torch.no_grad()
def export_hf(model_chunks: Sequence[torch.nn.Module], *, fused_experts: bool = False) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the model under their Hugging Face names, whole, one after the other, the same on every rank.

    Every rank must exhaust the iterator: each step is a collective over tensor, expert and pipeline ranks. No more
    than one tensor a expert-parallel rank is held at a time. The router and its correction bias come in float32,
    everything else in the parameters' dtype. Under LoRA the weights are merged. A tensor may share memory with a
    parameter: copy it before the next update.

    Args:
        fused_experts: a layer's experts in two tensors, by transformers' names in memory (`mlp.experts.gate_up_proj`,
            `mlp.experts.down_proj`), unless they are larger than FUSED_BYTES. Only with ep = etp = 1.
    """
    models = [_unwrap(chunk) for chunk in model_chunks]
    config, groups = models[0].config, models[0].pg_collection
    shapes, fused = _exported(config, fused_experts)
    mine = {piece.name: piece for model in models for piece in pieces(model, fused_experts=fused)}
    owners = _owners(mine, groups)
    for names in _export_order(shapes, config.beam, 0 if fused else groups.ep.size()):
        own = names[groups.ep.rank()] if len(names) > 1 else names[0]
        owner = owners[own]
        if groups.pp.rank() == owner:
            tensors = _gather(mine[own], len(names), groups)
        else:
            dtype = torch.float32 if is_float32(names[0]) else config.params_dtype
            device = next(iter(mine.values())).view.device
            tensors = [torch.empty(shapes[name], dtype=dtype, device=device) for name in names]
        if groups.pp.size() > 1:
            source = dist.get_global_rank(groups.pp, owner)
            tensors = [tensor.contiguous() for tensor in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, source, group=groups.pp)
        yield from zip(names, tensors, strict=True)


def describe_hf(
    model_chunks: Sequence[torch.nn.Module], *, fused_experts: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Names, shapes and types of what `export_hf` gives, in its order, as tensors on the meta device."""
    model = _unwrap(model_chunks[0])
    shapes, fused = _exported(model.config, fused_experts)
    for names in _export_order(shapes, model.config.beam, 0 if fused else model.pg_collection.ep.size()):
        for name in names:
            dtype = torch.float32 if is_float32(name) else model.config.params_dtype
            yield name, torch.empty(shapes[name], dtype=dtype, device="meta")


@torch.no_grad()
def adapter_matrices(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, str, Tensor]]:
    """All adapters, whole, one matrix after the other, the same on every rank: (module, "lora_A" or "lora_B", matrix).

    An expert projection's module goes without the expert's number, and its matrix is [experts, …]. Every rank must
    exhaust the iterator, as with `export_hf`; nothing comes without LoRA.
    """
    models = [_unwrap(chunk) for chunk in model_chunks]
    config, pp = models[0].config, models[0].pg_collection.pp
    mine = {pair.name: pair for model in models for pair in pairs(model)}
    device = next(models[0].parameters()).device
    for owner, names in enumerate(_held(list(mine), pp)):
        for name in names:
            for matrix in ("lora_A", "lora_B"):
                if pp.rank() == owner:
                    tensor = mine[name].full(matrix)
                else:
                    tensor = torch.empty(0, dtype=config.params_dtype, device=device)
                yield name, matrix, _from_owner(tensor, owner, pp)


def export_adapter(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """All adapters as `adapter_matrices` gives them, under PEFT's names, which number the experts."""
    for name, matrix, tensor in adapter_matrices(model_chunks):
        block, numbered, projection = name.rpartition("experts.")
        if not numbered:
            yield f"base_model.model.{name}.{matrix}.weight", tensor
            continue
        for expert, part in enumerate(tensor):
            yield f"base_model.model.{block}experts.{expert}.{projection}.{matrix}.weight", part


def _from_owner(tensor: Tensor, owner: int, group: dist.ProcessGroup) -> Tensor:
    """The tensor of one rank of the group, whose shape the others do not know."""
    if group.size() == 1:
        return tensor
    source = dist.get_global_rank(group, owner)
    shape = [tuple(tensor.shape)]
    dist.broadcast_object_list(shape, source, group=group)
    tensor = tensor.contiguous() if group.rank() == owner else tensor.new_empty(shape[0])
    dist.broadcast(tensor, source, group=group)
    return tensor


@torch.no_grad()
def fingerprint(model_chunks: Sequence[torch.nn.Module]) -> str:
    """A number that tells one base model's weights from another's, the same under every layout, on every rank.

    It is the sum of each tensor's bits read as integers, weighted by its name: exact in any order, one pass over the
    weights. (It does not see elements that changed places inside a tensor.) Adapters do not count.
    """
    models = [_unwrap(chunk) for chunk in model_chunks]
    groups = models[0].pg_collection
    device = next(models[0].parameters()).device
    sums = {kind: torch.zeros((), dtype=torch.int64, device=device) for kind in ("whole", "tp", "experts")}
    for piece in (piece for model in models for piece in pieces(model)):
        bits = piece.view.view(torch.int32 if piece.view.dtype == torch.float32 else torch.int16)
        weight = int.from_bytes(hashlib.sha256(piece.name.encode()).digest()[:4], "big")
        kind = "experts" if ".experts." in piece.name else "whole" if piece.axis is None else "tp"
        sums[kind] += bits.sum(dtype=torch.int64) * weight
    dist.all_reduce(sums["tp"], group=groups.tp)
    dist.all_reduce(sums["experts"], group=groups.expt_tp)
    dist.all_reduce(sums["experts"], group=groups.ep)
    total = sums["whole"] + sums["tp"] + sums["experts"]
    dist.all_reduce(total, group=groups.pp)
    return f"{int(total) & (2**64 - 1):016x}"


def _gather(piece: Piece, ranks: int, groups: ProcessGroupCollection) -> list[Tensor]:
    """The piece's whole tensor, and for an expert those of its counterparts on the other expert-parallel ranks."""
    full = piece.full()
    if ranks == 1:
        return [full]
    tensors = [torch.empty_like(full) for _ in range(ranks)]
    dist.all_gather(tensors, full.contiguous(), group=groups.ep)
    return tensors


def _owners(mine: dict[str, Piece], groups: ProcessGroupCollection) -> dict[str, int]:
    """Pipeline rank that holds each tensor's pieces; of the experts, only this expert-parallel rank's are known."""
    return {name: rank for rank, names in enumerate(_held(list(mine), groups.pp)) for name in names}


def _held(names: list[str], group: dist.ProcessGroup) -> list[list[str]]:
    """The names that each rank of the group has."""
    if group.size() == 1:
        return [names]
    held: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(held, names, group=group)
    return held


def _exported(config: BeamTransformerConfig, fused_experts: bool) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Name and shape of every tensor of an export, and whether experts are fused in it."""
    shapes, beam = hf_tensors(config.beam), config.beam
    largest = 2 * beam.num_experts * beam.moe_intermediate_size * beam.hidden_size * config.params_dtype.itemsize
    if not fused_experts or largest > FUSED_BYTES:
        return shapes, False
    shapes = {name: shape for name, shape in shapes.items() if ".mlp.experts." not in name}
    for layer in beam.sparse_layers:
        experts, hidden, width = beam.num_experts, beam.hidden_size, beam.moe_intermediate_size
        shapes[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        shapes[f"model.layers.{layer}.mlp.experts.down_proj"] = (experts, hidden, width)
    return shapes, True


def _export_order(shapes: dict[str, tuple[int, ...]], config: BeamConfig, ranks: int) -> Iterator[tuple[str, ...]]:
    """Names that travel together: one, or the tensors of one local expert on every expert-parallel rank.

    With no `ranks` experts are fused.
    """
    if not ranks:
        yield from ((name,) for name in shapes)
        return
    yield from ((name,) for name in shapes if ".mlp.experts." not in name)
    per_rank = config.num_experts // ranks
    for layer in config.sparse_layers:
        for local in range(per_rank):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                experts = (rank * per_rank + local for rank in range(ranks))
                yield tuple(f"model.layers.{layer}.mlp.experts.{e}.{projection}.weight" for e in experts)


def _unwrap(model: torch.nn.Module) -> BeamModel:
    while not isinstance(model, BeamModel):
        model = model.module  # type: ignore[assignment]
    return model
