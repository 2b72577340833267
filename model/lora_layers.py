"""What LoRA computes inside Beam's linears and experts: products with merged weights, and gradients of A and B."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from torch import Tensor

from beam_rl.model import fused, numerics
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.lora_pair import LoraPair


class _MergedProduct(torch.autograd.Function):
    """x [..., in] times a merged weight; only x gets a gradient. The weight is merged again for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, merge: Callable[[Tensor], Tensor], ends: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, ends)
        ctx.merge, ctx.dtype = merge, x.dtype
        merged = merge(weight)
        return torch.matmul(x, merged.t()) if ends is None else numerics.expert_linear(x, merged, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        weight, ends = ctx.saved_tensors
        merged = ctx.merge(weight)
        if ends is None:
            grad = grads[0].matmul(merged)
        else:
            grad = numerics.expert_linear(grads[0].contiguous(), merged.transpose(1, 2), ends)
        return grad.to(ctx.dtype), None, None, None


class _WithGradientOf(torch.autograd.Function):
    """A value that two computations share, of which one is done for the gradient alone."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


class LoraAdapter(torch.nn.Module):
    """The pairs of one Megatron layer. In evaluation mode except while gradients are computed: see `dropout`."""

    def __init__(self, pairs: Mapping[str, LoraPair], lora: LoraConfig) -> None:
        super().__init__()
        self.pairs = torch.nn.ModuleDict(pairs)
        self.scale, self.probability = lora.scale, lora.lora_dropout
        self.eval()

    def pair(self, projection: str) -> LoraPair | None:
        """The pair of a projection ("q_proj", …), if it is a target."""
        pair = self.pairs[projection] if projection in self.pairs else None  # noqa: SIM401 (a ModuleDict has no get)
        assert pair is None or isinstance(pair, LoraPair)
        return pair

    @property
    def dropping(self) -> bool:
        """Whether dropout is on, so that the layer must use the frozen weight and add the adapter's output."""
        return self.training and self.probability > 0

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in] times the merged weight [out, in]; A and B get no gradient from it."""
        return _MergedProduct.apply(x, weight, self.merged, None)

    def merged(self, weight: Tensor) -> Tensor:
        """The layer's frozen weight, merged; a new tensor."""
        raise NotImplementedError

    def join(self, output: Tensor, x: Tensor) -> Tensor:
        """The layer's output from that of its product and from its input x, with A's and B's gradients."""
        if self.dropping:
            return output + self(x)
        return _WithGradientOf.apply(output, self(x.detach())) if torch.is_grad_enabled() else output

    def _matrices(self, matrix: str, projections: Sequence[str]) -> list[Tensor]:
        return [getattr(self.pairs[name], matrix) for name in projections]

    def _dropped(self, x: Tensor, random_state: str | None) -> Tensor:
        """x after dropout, with the random numbers of one of Megatron's states; None: those of all ranks alike."""
        if not self.dropping:
            return x
        with get_cuda_rng_tracker().fork(random_state) if random_state else contextlib.nullcontext():
            return F.dropout(x, self.probability)


_RANKS_DIFFER = "model-parallel-rng"
"""Megatron's name of the random state that differs between tensor-parallel ranks."""


class ColumnAdapter(LoraAdapter):
    """Of q, gate, k, v (fused, laid out per key-value group), or of gate and up."""

    def __init__(
        self, pairs: Mapping[str, LoraPair], lora: LoraConfig, linear: Any, widths: Mapping[str, int], groups: int
    ) -> None:
        """widths: this rank's output features of every fused projection, targeted or not, in their order."""
        super().__init__(pairs, lora)
        self.widths, self.groups = dict(widths), groups
        self.tp_group, self.sequence_parallel = linear.tp_group, linear.sequence_parallel

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The layer's frozen weight [out / tp, in], merged; a new tensor."""
        result = weight.detach().clone()
        parts = result.view(self.groups, -1, weight.shape[1])
        sizes = [width // self.groups for width in self.widths.values()]
        for name, part in zip(self.widths, parts.split(sizes, dim=1), strict=True):
            if pair := self.pair(name):
                part.copy_(pair.merged(part.flatten(0, 1)).view_as(part))
        return result

    def forward(self, x: Tensor) -> Tensor:
        """The low-rank product, [tokens, 1, out / tp], of x [tokens (/ tp), 1, in]."""
        names = list(self.pairs)
        x = self._dropped(x, _RANKS_DIFFER if self.sequence_parallel else None)
        low = F.linear(x, torch.cat(self._matrices("lora_A", names))) * self.scale  # [tokens (/ tp), 1, pairs * r]
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        elif self.tp_group.size() > 1:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        inputs = dict(zip(names, low.chunk(len(names), dim=-1), strict=True))
        outputs = []
        for name, width in self.widths.items():
            if pair := self.pair(name):
                output = F.linear(inputs[name], pair.lora_B)
            else:
                output = low.new_zeros(*low.shape[:-1], width)
            outputs.append(output.unflatten(-1, (self.groups, -1)))
        return torch.cat(outputs, dim=-1).flatten(-2)


class RowAdapter(LoraAdapter):
    """Of the attention's output or the MLP's down projection."""

    def __init__(self, pairs: Mapping[str, LoraPair], lora: LoraConfig, linear: Any) -> None:
        super().__init__(pairs, lora)
        self.tp_group, self.sequence_parallel = linear.tp_group, linear.sequence_parallel

    def merged(self, weight: Tensor) -> Tensor:
        """The layer's frozen weight [out, in / tp], merged; a new tensor."""
        (pair,) = self.pairs.values()
        return pair.merged(weight)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """The low-rank product, [tokens (/ tp), 1, out], of x [tokens, 1, in / tp]."""
        (name,) = self.pairs
        (a,), (b,) = self._matrices("lora_A", [name]), self._matrices("lora_B", [name])
        low = F.linear(self._dropped(x, _RANKS_DIFFER), a) * self.scale  # [tokens, 1, r], a partial sum
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return F.linear(reduce(low, group=self.tp_group), b)


class ExpertAdapter(LoraAdapter):
    """Of the local experts, over grouped GEMM."""

    def __init__(self, pairs: Mapping[str, LoraPair], lora: LoraConfig, experts: Any) -> None:
        super().__init__(pairs, lora)
        self.etp_group = experts.tp_group

    def forward(self, rows: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
        """`numerics.experts_mlp` of adapted experts; a partial sum if they are tensor-parallel."""
        first = [name for name in ("gate_proj", "up_proj") if name in self.pairs]
        mixed = self._linear(rows, gate_up, ends, self.merged_gate_up if first else None)
        if first and (self.dropping or torch.is_grad_enabled()):
            mixed = self._join(mixed, self._gate_up(self._source(rows), first, mixed.shape[-1] // 2, ends))
        hidden = fused.swiglu(mixed, rows.dtype)
        pair = self.pair("down_proj")
        output = self._linear(hidden, down, ends, pair.merged if pair else None)
        if pair and (self.dropping or torch.is_grad_enabled()):
            output = self._join(output, self._down(self._source(hidden), pair, ends))
        return output

    def _linear(self, x: Tensor, weight: Tensor, ends: Tensor, merge: Callable[[Tensor], Tensor] | None) -> Tensor:
        if merge is None or self.dropping:
            return numerics.expert_linear(x, weight, ends)
        return _MergedProduct.apply(x, weight, merge, ends)

    def _source(self, x: Tensor) -> Tensor:
        return x if self.dropping else x.detach()

    def _join(self, output: Tensor, low_rank: Tensor) -> Tensor:
        return output + low_rank if self.dropping else _WithGradientOf.apply(output, low_rank)

    @torch.no_grad()
    def merged_gate_up(self, weight: Tensor) -> Tensor:
        """The frozen gates and ups [experts, 2 * intermediate / etp, hidden], merged; a new tensor."""
        result = torch.empty_like(weight)
        halves = zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), result.chunk(2, dim=1), strict=True)
        for name, frozen, half in halves:
            if pair := self.pair(name):
                pair.merged(frozen, out=half)
            else:
                half.copy_(frozen)
        return result

    def _gate_up(self, rows: Tensor, names: list[str], width: int, ends: Tensor) -> Tensor:
        # Expert-tensor ranks see the same rows, and must drop the same elements of them.
        rows = self._dropped(rows, get_data_parallel_rng_tracker_name())
        a = self._summed(torch.cat(self._matrices("lora_A", names), dim=1))  # [experts, names * r, hidden]
        low = numerics.expert_linear(rows, a, ends) * self.scale
        inputs = dict(zip(names, low.chunk(len(names), dim=-1), strict=True))
        outputs = []
        for name in ("gate_proj", "up_proj"):
            if pair := self.pair(name):
                outputs.append(numerics.expert_linear(inputs[name].contiguous(), pair.lora_B, ends))
            else:
                outputs.append(low.new_zeros(len(low), width))
        return torch.cat(outputs, dim=-1)

    def _down(self, hidden: Tensor, pair: LoraPair, ends: Tensor) -> Tensor:
        hidden = self._dropped(hidden, get_expert_parallel_rng_tracker_name())
        low = numerics.expert_linear(hidden, pair.lora_A, ends) * self.scale
        return numerics.expert_linear(low, self._summed(pair.lora_B), ends)

    def _summed(self, whole: Tensor) -> Tensor:
        """A parameter that every expert-tensor rank has: each computes a part of its gradient."""
        return copy_to_tensor_model_parallel_region(whole, group=self.etp_group) if self.etp_group.size() > 1 else whole
