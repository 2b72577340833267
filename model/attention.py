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

from beam_rl.model import fused
from beam_rl.model.batch import PackedBatch
from beam_rl.model.cpu_attention import LONGEST, short_attention
from beam_rl.model.rows import spread_rows, take_rows
from beam_rl.model.transformer_config import BeamTransformerConfig


class BeamCoreAttention(MegatronModule):
    """Scaled dot-product attention of packed sequences. Holds no parameters."""

    def __init__(self, config: BeamTransformerConfig, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        hf = config.beam
        self.window = hf.layer_window(layer_number - 1)
        self.scale = hf.head_dim**-0.5
        self.cp_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        """Attention of query [tokens, heads, d] over key and value [tokens, groups, d]: [tokens, heads, d]."""
        if self.cp_group.size() > 1:
            return self._context_parallel(query, key, value, batch)
        if flash_takes(query) and (self.window is not None or len(batch.lengths) > 1):
            return flash_attention(query, key, value, batch, self.window, self.scale)
        plan = batch.plan
        packed = [query, key, value]
        if plan.identity:
            (shape,) = plan.shapes
            q, k, v = (x.view(*shape, *x.shape[1:]) for x in packed)
            return self._attend(q, k, v, batch).flatten(0, 1)
        packed = [spread_rows(x, plan.gather, plan.restore) for x in packed]
        sizes = [count * width for count, width in plan.shapes]
        outputs = []
        for shape, *qkv in zip(plan.shapes, *(x.split(sizes) for x in packed), strict=True):
            q, k, v = (x.view(*shape, *x.shape[1:]) for x in qkv)
            outputs.append(self._attend(q, k, v, batch).flatten(0, 1))
        return take_rows(torch.cat(outputs), plan.restore)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
        """Causal attention, in the window if there is one, of rectangles [sequences, width, heads, d]."""
        width = q.shape[1]
        if q.device.type == "cpu" and width <= LONGEST:
            return short_attention(q, k, v, self.window, self.scale)
        if self.window is not None and width > self.window:
            dtype = torch.float32 if q.device.type == "cpu" else q.dtype  # `_attention`'s
            mask = batch.window_mask(len(q), width, self.window, dtype)
            return windowed_attention(q, k, v, self.window, mask, self.scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _attention(q, k, v, None, self.scale).transpose(1, 2)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        """Gather keys and values over the context-parallel group; the mask follows global positions."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        device = query.device
        everyone = [context_index(batch.lengths, ranks, r).to(device) for r in range(ranks)]
        mine, theirs = everyone[rank], torch.cat(everyone)
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


def flash_takes(query: Tensor) -> bool:
    """Whether PyTorch's FlashAttention computes attention of such heads."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and flash_takes_heads(query.shape[-1])


def flash_takes_heads(dim: int) -> bool:
    """Whether it computes attention of heads of so many values."""
    return dim % 8 == 0 and dim <= 256


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, window: int | None, scale: float
) -> Tensor:
    """Causal attention of packed sequences as they lie, in the window if there is one, skipping what is hidden.

    `torch.nn.attention.varlen` calls the same function, and before PyTorch 2.12 has neither windows nor groups. For one
    sequence without a window cuDNN, which `F.scaled_dot_product_attention` prefers on Hopper, is faster.
    """
    starts, longest = batch.cu_seqlens_q, batch.max_seqlen_q
    left = None if window is None else window - 1
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=None if left is None else 0,
    )  # fmt: skip
    return found[0]


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int, mask: Tensor, scale: float) -> Tensor:
    """Causal attention of [sequences, width, heads, d] in a window smaller than width, skipping what it hides.

    Queries go in blocks as wide as the window: a block sees itself and the one before, and nothing else is computed.
    mask is `PackedBatch.window_mask`.
    """
    count, width, heads, dim = q.shape
    spare = -width % window
    if spare:
        q = F.pad(q, [0, 0, 0, 0, 0, spare])
    q, k, v = q.reshape(-1, window, heads, dim), _with_before(k, window), _with_before(v, window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [blocks, heads, …, d]
    output = _attention(q, k, v, mask, scale).transpose(1, 2).reshape(count, width + spare, heads, dim)
    return output[:, :width] if spare else output


def _with_before(x: Tensor, window: int) -> Tensor:
    """[sequences, width, groups, d] in blocks as wide as the window, each behind the one before it; 0 outside."""
    padded = F.pad(x, [0, 0, 0, 0, window, -x.shape[1] % window])
    before, own = (part.unflatten(1, (-1, window)) for part in (padded[:, :-window], padded[:, window:]))
    return torch.cat((before, own), dim=2).flatten(0, 1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of [batch, heads, tokens, d]; mask is for `[…, queries, keys]`; None: causal."""
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
        self.rope_theta = self.config.beam.layer_rope_theta(self.layer_number - 1)
        heads = self.num_attention_heads_per_partition
        self.gate_bias = torch.nn.Parameter(torch.zeros(heads, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(self.gate_bias, is_parallel=True, dim=0, stride=1)
        self.gate_bias.allreduce = True  # type: ignore[attr-defined]

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedBatch, **_: Any
    ) -> tuple[Tensor, None]:
        """Attention block of hidden_states [tokens (/ tp if sequence parallel), 1, hidden], same shape out."""
        query, gate, key, value = self._project(hidden_states, packed_seq_params)
        if attention_mask is not None:
            raise TypeError("Beam takes no attention mask")
        output = self.core_attention(query, key, value, packed_seq_params)
        output = fused.output_gate(output, gate, self.gate_bias)
        return self.linear_proj(output.flatten(1).unsqueeze(1))

    def _project(self, hidden_states: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [tokens, heads, d], gate of the same shape, k and v [tokens, groups, d]; q and k normed, with positions."""
        mixed, _ = self.linear_qkv(hidden_states)
        cp, index = self.pg_collection.cp, None
        if cp.size() > 1:
            index = context_index(batch.lengths, cp.size(), cp.rank()).to(mixed.device)
        rotation = stretch = None
        if self.rope_theta is None:
            stretch = batch.stretch(index)
        else:
            rotation = batch.rope(self.rope_theta, self.hidden_size_per_attention_head, index)
        return fused.split_heads(
            mixed,
            self.q_layernorm.weight,
            self.k_layernorm.weight,
            self.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
            rotation=rotation,
            stretch=stretch,
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's, with the gate bias sharded over tensor-parallel ranks."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        bias = {"gate_bias": self.gate_bias}
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return state | make_sharded_tensors_for_checkpoint(bias, prefix, {"gate_bias": 0}, sharded_offsets, **groups)
