"""Hugging Face names of Beam's tensors, and how they lie in the Megatron modules of one rank.

Every Hugging Face tensor's local part is a view of a Megatron parameter (`Piece`): loading copies a slice of the
checkpoint into the view, exporting gathers the views. Experts have per-expert names everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from beam_rl.model.moe import BeamMoELayer
from beam_rl.model.tensors import hf_tensors, is_float32

__all__ = ["Piece", "export_hf", "hf_tensors", "load_hf", "pieces"]

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}
"""Hugging Face's names of a layer's norms, and Megatron's."""


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

    def load(self, checkpoint: HFCheckpoint) -> None:
        """Copy this part, and only it, from the checkpoint."""
        start = 0
        if self.axis is not None:
            assert self.group is not None
            start = self.group.rank() * self.shape[self.axis]
        part = checkpoint.read(self.name, self.axis or 0, start, self.shape[self.axis or 0])
        self.view.copy_(part.view(self.view.shape))

    def full(self) -> Tensor:
        """The whole tensor, gathered over `group` (a collective); may share memory with the parameter."""
        part = self.view.reshape(self.shape)
        if self.axis is None or self.group is None or self.group.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=self.axis)


def pieces(model: BeamModel) -> Iterator[Piece]:
    """All pieces that one model chunk holds."""
    tp = model.pg_collection.tp
    if model.pre_process:
        yield _split("model.embed_tokens.weight", model.embedding.word_embeddings.weight, 0, tp)
    for layer in model.decoder.layers:
        yield from _layer_pieces(layer)
    if model.post_process:
        yield _whole("model.norm.weight", model.decoder.final_layernorm.weight)
        yield _split("lm_head.weight", model.output_layer.weight, 0, tp)


def _whole(name: str, parameter: Tensor) -> Piece:
    return Piece(name, parameter.data, tuple(parameter.shape))


def _split(name: str, part: Tensor, axis: int, group: dist.ProcessGroup) -> Piece:
    return Piece(name, part.data, tuple(part.shape), axis, group)


def _layer_pieces(layer: BeamTransformerLayer) -> Iterator[Piece]:
    prefix = f"model.layers.{layer.layer_number - 1}."
    for theirs, ours in NORMS.items():
        yield _whole(f"{prefix}{theirs}.weight", getattr(layer, ours).weight)
    yield from _attention_pieces(f"{prefix}self_attn.", layer.self_attention)
    mlp = layer.mlp
    if isinstance(mlp, BeamMoELayer):
        yield _whole(f"{prefix}mlp.gate.weight", mlp.router.weight)
        yield _whole(f"{prefix}mlp.gate.e_score_correction_bias", mlp.router.expert_bias)
        yield from _expert_pieces(f"{prefix}mlp.experts.", mlp.experts, mlp.local_expert_indices)
    else:
        gate, up = mlp.linear_fc1.weight.chunk(2)
        yield _split(f"{prefix}mlp.gate_proj.weight", gate, 0, layer.tp_group)
        yield _split(f"{prefix}mlp.up_proj.weight", up, 0, layer.tp_group)
        yield _split(f"{prefix}mlp.down_proj.weight", mlp.linear_fc2.weight, 1, layer.tp_group)


def _attention_pieces(prefix: str, attention: BeamSelfAttention) -> Iterator[Piece]:
    tp, dim = attention.tp_group, attention.hidden_size_per_attention_head
    groups = attention.num_query_groups_per_partition
    heads = attention.num_attention_heads_per_partition // groups
    # Rows of the fused projection: for every key-value group its q heads, their gates, its k, its v.
    fused = attention.linear_qkv.weight.data.view(groups, 2 * heads + 2, dim, -1)
    for name, part in zip(("q", "gate", "k", "v"), fused.split([heads, heads, 1, 1], dim=1), strict=True):
        rows = part.shape[0] * part.shape[1] * dim
        yield Piece(f"{prefix}{name}_proj.weight", part, (rows, part.shape[3]), 0, tp)
    yield _split(f"{prefix}gate_bias", attention.gate_bias, 0, tp)
    yield _split(f"{prefix}o_proj.weight", attention.linear_proj.weight, 1, tp)
    yield _whole(f"{prefix}q_norm.weight", attention.q_layernorm.weight)
    yield _whole(f"{prefix}k_norm.weight", attention.k_layernorm.weight)


def _expert_pieces(prefix: str, experts: BeamExperts, indices: Sequence[int]) -> Iterator[Piece]:
    etp = experts.tp_group
    for local, index in enumerate(indices):
        gate, up = experts.gate_up_proj[local].chunk(2)
        yield _split(f"{prefix}{index}.gate_proj.weight", gate, 0, etp)
        yield _split(f"{prefix}{index}.up_proj.weight", up, 0, etp)
        yield _split(f"{prefix}{index}.down_proj.weight", experts.down_proj[local], 1, etp)


@torch.no_grad()
def load_hf(model_chunks: Sequence[torch.nn.Module], checkpoint: HFCheckpoint) -> None:
    """Fill this rank's chunks (wrapped or not); only the local shards are read."""
    for chunk in model_chunks:
        for piece in pieces(_unwrap(chunk)):
            piece.load(checkpoint)


@torch.no_grad()
def export_hf(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the model under their Hugging Face names, whole, one after the other, the same on every rank.

    Every rank must exhaust the iterator: each step is a collective over tensor, expert and pipeline ranks. No more
    than one tensor a expert-parallel rank is held at a time. The router and its correction bias come in float32,
    everything else in the parameters' dtype. A tensor may share memory with a parameter: copy it before the next
    update.
    """
    models = [_unwrap(chunk) for chunk in model_chunks]
    config, groups = models[0].config, models[0].pg_collection
    mine = {piece.name: piece for model in models for piece in pieces(model)}
    owners = _owners(mine, groups)
    shapes = hf_tensors(config.beam)
    for names in _export_order(shapes, config.beam, groups.ep.size()):
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
    held: list[list[str] | None] = [None] * groups.pp.size()
    if groups.pp.size() > 1:
        dist.all_gather_object(held, list(mine), group=groups.pp)
    else:
        held = [list(mine)]
    return {name: rank for rank, names in enumerate(held) for name in names or ()}


def _export_order(shapes: dict[str, tuple[int, ...]], config: BeamConfig, ranks: int) -> Iterator[tuple[str, ...]]:
    """Names that travel together: one, or the tensors of one local expert on every expert-parallel rank."""
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
