"""A and B of one projection's adapter, and this rank's part of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.tensors import runs


class LoraPair(torch.nn.Module):
    """A [r, in] and B [out, r] of one projection; of an expert's projection, those of all local experts, stacked."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        split: int,
        group: dist.ProcessGroup,
        experts: Sequence[int] | None,
        replicas: Mapping[str, Any],
        lora: LoraConfig,
        seed: int,
        like: Tensor,
        sequence_parallel: bool,
    ) -> None:
        """Fresh values, which depend on the seed and the name alone.

        Args:
            name: Hugging Face's name of the module; without the expert's number.
            shape: (out, in) of the whole weight.
            split: the axis of the weight along which `group` splits it: 0 its outputs, 1 its inputs.
            experts: numbers of the local experts; None if this is no expert's.
            replicas: "ep" and "dp", the expert-parallel and expert data-parallel groups, of an expert's.
            like: gives dtype and device.
        """
        super().__init__()
        self.name, self.split, self.group, self.experts, self.replicas = name, split, group, experts, replicas
        self.scale = lora.scale
        out, inner = shape
        width, first = shape[split] // group.size(), shape[split] // group.size() * group.rank()
        names = [name] if experts is None else [name.replace("experts.", f"experts.{e}.") for e in experts]
        a = torch.stack([_initial(each, lora, inner, seed) for each in names])  # [experts, r, in]
        if split == 1:
            a, inner = a[:, :, first : first + width], width
        else:
            out = width
        b = torch.zeros(len(names), out, lora.r)
        if experts is None:
            a, b = a[0], b[0]
        self.lora_A = self._parameter(a.to(like), axis=a.dim() - 1 if split == 1 else None, sp=sequence_parallel)
        self.lora_B = self._parameter(b.to(like), axis=b.dim() - 2 if split == 0 else None, sp=sequence_parallel)

    def _parameter(self, values: Tensor, *, axis: int | None, sp: bool) -> torch.nn.Parameter:
        parameter: Any = torch.nn.Parameter(values.contiguous())
        if axis is not None:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
        parameter.allreduce = self.experts is None
        parameter.sequence_parallel = sp and axis is None and self.experts is None
        return parameter

    def axis(self, matrix: str) -> int | None:
        """Axis along which `group` splits "lora_A" or "lora_B"; None: every rank has all of it."""
        if (matrix == "lora_A") != (self.split == 1):
            return None
        last = self.lora_A.dim() - 1
        return last if matrix == "lora_A" else last - 1

    @torch.no_grad()
    def merged(self, weight: Tensor, expert: int | None = None, out: Tensor | None = None) -> Tensor:
        """This rank's part of the weight with the adapter: summed in float32, one rounding; a new tensor, or `out`.

        Args:
            weight: the frozen part, [out, in]; of an experts' projection [experts, out, in], or one expert's.
            expert: index of that one among the local experts.
            out: where an experts' projection goes; of the weight's shape.
        """
        a, b = (self.lora_A, self.lora_B) if expert is None else (self.lora_A[expert], self.lora_B[expert])
        if weight.dim() == 2:
            return weight.to(torch.float32, copy=True).addmm_(b.float(), a.float(), alpha=self.scale).to(weight.dtype)
        out = torch.empty_like(weight) if out is None else out
        for run in runs(weight):
            part = weight[run].to(torch.float32, copy=True)
            out[run] = part.baddbmm_(b[run].float(), a[run].float(), alpha=self.scale)
        return out

    def full(self, matrix: str) -> Tensor:
        """The whole "lora_A" or "lora_B" ([experts, …] of all experts), on every rank of this pipeline stage.

        A collective over `group`, and over the expert-parallel group for an expert's.
        """
        part, axis = getattr(self, matrix).data, self.axis(matrix)
        if axis is not None:
            part = _gathered(part, axis, self.group)
        return part if self.experts is None else _gathered(part, 0, self.replicas["ep"])

    def load(self, matrix: str, whole: Tensor) -> None:
        """Take this rank's part of a whole "lora_A" or "lora_B" ([experts, …] of all experts)."""
        parameter, axis = getattr(self, matrix).data, self.axis(matrix)
        if axis is not None:
            whole = whole.narrow(axis, self.group.rank() * parameter.shape[axis], parameter.shape[axis])
        if self.experts is not None:
            whole = whole[self.experts[0] : self.experts[-1] + 1]
        parameter.copy_(whole)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Both matrices under their Hugging Face names, so that any layout loads what any other has saved."""
        copies = self.replicas["dp"] if self.experts is not None else (metadata or {})["dp_cp_group"]
        state = {}
        for matrix in ("lora_A", "lora_B"):
            axis = self.axis(matrix)
            splits = [] if self.experts is None else [(0, self.replicas["ep"].rank(), self.replicas["ep"].size())]
            if axis is not None:
                splits.append((axis, self.group.rank(), self.group.size()))
            replica = (0, self.group.rank() if axis is None else 0, copies.rank())
            state[f"{prefix}{matrix}"] = ShardedTensor.from_rank_offsets(
                f"{self.name}.{matrix}", getattr(self, matrix), *splits, replica_id=replica
            )
        return state


def _initial(name: str, lora: LoraConfig, inner: int, seed: int) -> Tensor:
    """A of a module's adapter, float32 [r, in]."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    if lora.init_lora_weights == "gaussian":
        return torch.randn(lora.r, inner, generator=generator) / lora.r
    return (torch.rand(lora.r, inner, generator=generator) * 2 - 1) / math.sqrt(inner)


def _gathered(part: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=axis)
