"""Beam's mixture of experts on Megatron-Core: float32 router with replay, token dispatch, grouped expert GEMMs."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from beam_rl.model import fused
from beam_rl.model.batch import PackedBatch
from beam_rl.model.experts import BeamExperts
from beam_rl.model.rows import ExpertOrder
from beam_rl.model.transformer_config import BeamTransformerConfig


class BeamRouter(Router):
    """Sigmoid scores, groups, correction bias; weight and bias stay float32 whatever the model's dtype becomes."""

    config: BeamTransformerConfig
    expert_bias: Tensor

    def __init__(self, config: BeamTransformerConfig, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config, pg_collection, is_mtp_layer)
        self.register_buffer("expert_bias", torch.zeros(config.beam.num_experts, dtype=torch.float32))

    def reset_parameters(self) -> None:
        """Initialise; unlike Megatron's router, keep float32."""
        if self.config.perform_initialization:
            self.config.init_method(self.weight)
        self.weight.sequence_parallel = self.config.sequence_parallel

    def _apply(self, fn: Any, recurse: bool = True) -> "BeamRouter":
        exact = (self.weight.data, self.expert_bias)
        super()._apply(fn, recurse)
        if self.weight.dtype != torch.float32:  # a cast, as of `model.bfloat16()`: undo it without its rounding
            weight, bias = exact
            self.weight.data = weight.to(self.weight.device)
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def routing(
        self, x: Tensor, replay: tuple[Tensor, Tensor | None] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`fused.route` of x [tokens, hidden]: x, weights, ids and counts."""
        hf = self.config.beam
        assert hf.n_group is not None
        assert hf.topk_group is not None
        return fused.route(
            x,
            self.weight,
            self.expert_bias,
            hf.num_experts_per_tok,
            hf.n_group,
            hf.topk_group,
            hf.norm_topk_prob,
            replay,
        )

    def forward(self, input: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Route hidden states [tokens (/ tp if sequence parallel), 1, hidden], with the batch's routes if it has any.

        Replayed experts get the weights that this router gives them, so its gradient is the replayed choice's.

        Returns:
            [tokens, hidden] for the experts, weights, ids and counts, as `fused.route` has them.
        """
        x, layer = input.flatten(0, 1), self.layer_number - 1
        x, weights, ids, counts = self.routing(x, self._replay(batch, layer, len(x)))
        if batch.record:
            split = self._tokens_split
            batch.recorded[layer] = gather_from_sequence_parallel_region(ids, group=self.tp_group) if split else ids
        return x, weights, ids, counts

    @property
    def _tokens_split(self) -> bool:
        return self.config.sequence_parallel and self.tp_group.size() > 1

    def _replay(self, batch: PackedBatch, layer: int, tokens: int) -> tuple[Tensor, Tensor | None] | None:
        """The batch's routes of this rank's tokens, and where they hold."""
        replay = batch.layer_routes(layer)
        if replay is None:
            return None
        ids, captured = replay
        if self._tokens_split:
            ranks, rank = self.tp_group.size(), self.tp_group.rank()
            ids = ids.chunk(ranks)[rank]
            captured = None if captured is None else captured.chunk(ranks)[rank]
        if len(ids) != tokens:
            raise ValueError(f"{len(ids)} rows of routes for {tokens} tokens")
        return ids, captured


class BeamTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, told of routes as ids and weights, [tokens, topk] each.

    Expert outputs come back unweighted, and are weighted and summed at home in float32 in the order of a token's
    experts: one rounding, whatever the layout. (Megatron weights inside the experts and sums in the model's dtype.)
    """

    order: ExpertOrder

    @property
    def alone(self) -> bool:
        """Whether all experts are here, whole."""
        return self.ep_size == self.tp_size == 1

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Sort copies of the rows of hidden_states by expert.

        Args:
            hidden_states: [tokens, hidden].
            routing_map: ids, and probs: weights, [tokens, topk] each.
            counts: [parts, experts], how often each part of the tokens chose each expert.
        """
        self.probs = probs
        self.order = order = fused.sort_by_expert(routing_map, counts)
        if not self.alone:  # what is sent, the CPU must know; else it need not wait for the GPU
            self.tokens_per_expert = self.preprocess(counts)
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        rows = fused.spread_rows(hidden_states, order.tokens, order.places, routing_map.shape[1])
        return rows, None

    def token_dispatch(self, rows: Tensor, probs: Tensor | None) -> tuple[Tensor, None]:
        """Send rows to the ranks of their experts; the weights stay at home."""
        if self.alone:
            return rows, None
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
        return all_to_all(self.ep_group, rows, self.output_splits, self.input_splits), None

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """Bring the rows of each local expert together: rows, and int32 [local experts], the row after each's last."""
        if self.alone:  # they already are
            return rows, self.order.ends, None
        if self.tp_size > 1:
            sizes = None if self.output_splits_tp is None else self.output_splits_tp.tolist()
            rows = gather_from_sequence_parallel_region(rows, group=self.tp_group, output_split_sizes=sizes)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self.num_local_experts > 1:
            chunks = rows.split(self.num_global_tokens_per_local_expert.flatten().tolist())
            rows = torch.cat([chunks[i] for i in self.sort_input_by_local_experts.tolist()])
        rows_per_expert = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        return rows, rows_per_expert.to(rows.device).cumsum(0, dtype=torch.int32), None

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Undo `dispatch_postprocess`."""
        return hidden_states if self.alone else super().combine_preprocess(hidden_states)

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Undo `token_dispatch`."""
        return hidden_states if self.alone else super().token_combine(hidden_states, *args, **kwargs)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Weighted sum of each token's expert outputs, scaled, [tokens, hidden]."""
        scaling, dtype = self.config.beam.routed_scaling_factor, self.config.params_dtype
        rows = permutated_local_input_tokens
        return fused.combine(rows, self.order.places, self.order.choices, self.probs, scaling, dtype)


class BeamMoELayer(MoELayer):
    """Megatron's expert layer with Beam's router, dispatcher and experts; the micro batch is an argument."""

    config: BeamTransformerConfig
    router: BeamRouter
    experts: BeamExperts

    def __init__(self, config: BeamTransformerConfig, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = BeamTokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection
        )

    def forward(self, hidden_states: Tensor, batch: PackedBatch) -> tuple[Tensor, None]:
        """Expert outputs of hidden_states [tokens (/ tp if sequence parallel), 1, hidden], same shape."""
        dispatcher = self.token_dispatcher
        x, weights, ids, counts = self.router(hidden_states, batch)
        if dispatcher.alone and self.experts.plain and x.is_cuda:
            order = fused.sort_by_expert(ids, counts)
            return self.experts.mixture(x, weights, order).view(hidden_states.shape), None
        rows, _ = dispatcher.dispatch_preprocess(x, ids, weights, counts)
        rows, _ = dispatcher.token_dispatch(rows, None)
        rows, ends, _ = dispatcher.dispatch_postprocess(rows, None)
        rows = dispatcher.combine_preprocess(self.experts(rows, ends))
        return dispatcher.combine_postprocess(dispatcher.token_combine(rows)).view(hidden_states.shape), None
