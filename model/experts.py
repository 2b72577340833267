"""The experts that live on one rank, as two 3-D parameters over grouped GEMM."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from beam_rl.model import fused
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.model.rows import ExpertOrder
from beam_rl.model.transformer_config import BeamTransformerConfig


class BeamExperts(MegatronModule):
    """SwiGLU MLPs of the local experts.

    gate_up_proj [experts, 2 * intermediate / etp, hidden] holds this rank's part of the gate above its part of the up
    projection; down_proj is [experts, hidden, intermediate / etp].
    """

    config: BeamTransformerConfig
    adapter: torch.nn.Module | None
    """Computes the MLPs of adapted experts from the rows and the frozen weights, on this rank; None without LoRA."""
    mxfp8: tuple[Mxfp8Settings | None, Mxfp8Settings | None] = (None, None)
    """How the products with gate_up_proj and with down_proj are quantised; None where they are not."""

    def __init__(
        self, num_local_experts: int, config: BeamTransformerConfig, pg_collection: Any = None, name: str | None = None
    ) -> None:
        super().__init__(config=config)
        self.adapter = None
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        hidden = config.beam.hidden_size
        width = config.beam.moe_intermediate_size // self.tp_group.size()
        self.gate_up_proj = self._parameter((num_local_experts, 2 * width, hidden), tp_dim=1)
        self.down_proj = self._parameter((num_local_experts, hidden, width), tp_dim=2)

    def _parameter(self, shape: tuple[int, int, int], tp_dim: int) -> torch.nn.Parameter:
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        if self.config.perform_initialization:
            self.config.init_method(parameter)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=tp_dim, stride=1)
        # Reduced over the expert data-parallel group, which differs from the dense one as soon as ep or etp do;
        # set at ep = 1 too, so that the optimizer groups parameters alike under every layout.
        parameter.allreduce = False  # type: ignore[attr-defined]
        return parameter

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """MLP outputs [rows, hidden] of rows sorted by local expert, before weighting.

        A partial sum if the experts are tensor-parallel.

        Args:
            ends: int32 [local experts], the row after each expert's last.
        """
        if self.adapter is not None:
            return self.adapter(rows, self.gate_up_proj, self.down_proj, ends)
        return fused.experts_mlp(rows, self.gate_up_proj, self.down_proj, ends, self.mxfp8)

    @property
    def plain(self) -> bool:
        """Whether nothing stands between the rows and the weights: no adapters, no quantisation."""
        return self.adapter is None and self.mxfp8 == (None, None)

    def mixture(self, x: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
        """Weighted sums [tokens, hidden] of the experts of tokens x [tokens, hidden]; all experts must be here, whole.

        Args:
            weights: float32 [tokens, topk].
            order: of the tokens' choices.
        """
        scaling = self.config.beam.routed_scaling_factor
        return fused.mixture(x, self.gate_up_proj, self.down_proj, weights, order, scaling)

    def backward_dw(self) -> None:
        """Nothing is deferred: weight gradients come with the backward pass."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Both parameters, saved whole, so that any ep and etp can load what any other has saved."""
        replica = (0, 0, self.dp_group.rank())
        down = [(0, self.ep_group), (2, self.tp_group)]
        return {
            f"{prefix}gate_up_proj": ShardedTensorFactory(
                f"{prefix}gate_up_proj", self.gate_up_proj, self._gates_apart(sharded_offsets), _gates_together, replica
            ),
            f"{prefix}down_proj": ShardedTensor.from_rank_offsets(
                f"{prefix}down_proj",
                self.down_proj,
                *sharded_offsets,
                *_offsets(down, len(sharded_offsets)),
                replica_id=replica,
                prepend_axis_num=len(sharded_offsets),
            ),
        }

    def _gates_apart(self, sharded_offsets: tuple) -> Any:
        """Builder of gate_up_proj as [experts, gate or up, intermediate, hidden], where each axis shards by itself."""
        axes = _offsets([(0, self.ep_group), (2, self.tp_group)], len(sharded_offsets))

        def build(key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> ShardedTensor:
            apart = tensor.view(tensor.shape[0], 2, -1, tensor.shape[2])
            return ShardedTensor.from_rank_offsets(
                key, apart, *sharded_offsets, *axes, replica_id=replica_id, prepend_axis_num=len(sharded_offsets)
            )

        return build


def _offsets(axes: list[tuple[int, Any]], prepended: int) -> list[tuple[int, int, int]]:
    return [(prepended + axis, group.rank(), group.size()) for axis, group in axes]


def _gates_together(apart: Tensor) -> Tensor:
    return apart.flatten(1, 2)
