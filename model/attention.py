"""Beam's attention on Megatron-Core: window or NoPE with SSMax, per-head norms, output gate; packed, TP, CP."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from beam_rl.model import fused, numerics
from beam_rl.model.batch import PackedBatch
from beam_rl.model.cpu_attention import LONGEST, short_attention
from beam_rl.model.rows import spread_rows, take_rows
from beam_rl.model.transformer_config import BeamTransformerConfig


class BeamCoreAttention(MegatronModule):
    """Position encoding and scaled dot-product attention of packed sequences. Holds no parameters."""

    def __init__(self, config: BeamTransformerConfig, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        hf = config.beam
        self.window = hf.layer_window(layer_number - 1)
        self.rope_theta = hf.layer_rope_theta(layer_number - 1)
        self.head_dim = hf.head_dim
        self.scale = hf.head_dim**-0.5
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedBatch | None = None,
    ) -> Tensor:
        """Attention of query [tokens, heads, d] over key and value [tokens, groups, d]: [tokens, heads, d]."""
        batch = packed_seq_params
        if not isinstance(batch, PackedBatch) or attention_mask is not None:
            raise TypeError("Beam takes its sequences as a PackedBatch, and no attention mask")
        if self.cp_group.size() > 1:
            return self._context_parallel(query, key, value, batch)
        query, key = self._encode_positions(query, key, batch)
        plan = batch.plan
        packed = [spread_rows(x, plan.gather, plan.restore) for x in (query, key, value)]
        sizes = [count * width for count, width in plan.shapes]
        outputs = []
        for (count, width), *qkv in zip(plan.shapes, *(x.split(sizes) for x in packed), strict=True):
            q, k, v = (x.view(count, width, *x.shape[1:]) for x in qkv)
            outputs.append(self._attend(q, k, v).flatten(0, 1))
        return take_rows(torch.cat(outputs), plan.restore)

    def _encode_positions(
        self, query: Tensor, key: Tensor, batch: PackedBatch, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.rope_theta is None:
            positions = batch.positions if index is None else batch.positions[index]
            return numerics.apply_ssmax(query, positions), key
        cos, sin = batch.rope(self.rope_theta, self.head_dim, index)
        return fused.rotate(query, cos, sin), fused.rotate(key, cos, sin)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, in the window if there is one, of rectangles [sequences, width, heads, d]."""
        width = q.shape[1]
        if q.device.type == "cpu" and width <= LONGEST:
            return short_attention(q, k, v, self.window, self.scale)
        mask = None
        if self.window is not None and width > self.window:
            position = torch.arange(width, device=q.device)
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < self.window)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _attention(q, k, v, mask, self.scale).transpose(1, 2)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        """Gather keys and values over the context-parallel group; the mask follows global positions."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        device = query.device
        everyone = [context_index(batch.lengths, ranks, r).to(device) for r in range(ranks)]
        mine, theirs = everyone[rank], torch.cat(everyone)
        query, key = self._encode_positions(query, key, batch, mine)
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group)
            for x in (key, value)
        )
        distance = batch.positions[mine][:, None] - batch.positions[theirs]
        mask = (batch.documents[mine][:, None] == batch.documents[theirs]) & (distance >= 0)
        if self.window is not None:
            mask &= distance < self.window
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return _attention(q, k, v, mask, self.scale)[0].transpose(0, 1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of [batch, heads, tokens, d]; mask is bool [queries, keys], or None for causal."""
    dtype = q.dtype
    if q.device.type == "cpu":  # no slower than PyTorch's bfloat16 kernel there, and one rounding
        q, k, v = q.float(), k.float(), v.float()
    causal = mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.to(dtype)


def context_index(lengths: tuple[int, ...], ranks: int, rank: int) -> Tensor:
    """Packed tokens, int64, that a context-parallel rank holds: chunks rank and 2 * ranks - 1 - rank of each sequence.

    Every sequence's length must be a multiple of 2 * ranks; the pairing gives all ranks the same causal work.
    """
    parts, start = [], 0
    for length in lengths:
        if length % (2 * ranks):
            raise ValueError(f"a sequence of {length} tokens does not split into 2 x {ranks} equal chunks")
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        parts += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return torch.cat(parts)


class BeamSelfAttention(SelfAttention):
    """Fused q, gate, k, v projection (laid out per key-value group), norms per head, gated output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads = self.num_attention_heads_per_partition
        self.gate_bias = torch.nn.Parameter(torch.zeros(heads, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(self.gate_bias, is_parallel=True, dim=0, stride=1)
        self.gate_bias.allreduce = True  # type: ignore[attr-defined]

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedBatch, **_: Any
    ) -> tuple[Tensor, None]:
        """Attention block of hidden_states [tokens (/ tp if sequence parallel), 1, hidden], same shape out."""
        query, gate, key, value = self._project(hidden_states)
        attend = self._checkpointed_attention_forward if self.checkpoint_core_attention else self._run_core_attention
        output = attend(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        output = numerics.output_gate(output, gate, self.gate_bias)
        return self.linear_proj(output.flatten(1)[:, None])

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [tokens, heads, d], gate of the same shape, k and v [tokens, groups, d]; q and k normalised."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = self.num_attention_heads_per_partition // groups
        query, gate, key, value = mixed.view(mixed.shape[0], groups, -1, dim).split([heads, heads, 1, 1], dim=2)
        query, gate, key, value = (x.flatten(1, 2) for x in (query, gate, key, value))
        return self.q_layernorm(query), gate, self.k_layernorm(key), value

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's, with the gate bias sharded over tensor-parallel ranks."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        bias = {"gate_bias": self.gate_bias}
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return state | make_sharded_tensors_for_checkpoint(bias, prefix, {"gate_bias": 0}, sharded_offsets, **groups)
