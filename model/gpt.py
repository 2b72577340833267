"""Beam as a Megatron-Core language model."""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from beam_rl.model import head, numerics
from beam_rl.model.batch import PackedBatch
from beam_rl.model.layer import BeamRMSNorm, layer_spec
from beam_rl.model.lora import sharded_adapters
from beam_rl.model.rows import take_rows
from beam_rl.model.transformer_config import BeamTransformerConfig


class BeamModel(GPTModel):
    """One pipeline stage of a Beam.

    `model(input_ids, position_ids=None, attention_mask=None, packed_seq_params=batch)` takes input_ids int64
    [1, tokens] and a `PackedBatch`, and returns, on the last stage, logits float32 [1, tokens, vocabulary / tp] after
    the softcap; before it, hidden states.
    """

    config: BeamTransformerConfig
    adapted: bool = False
    """Whether the base is frozen under LoRA adapters (`lora.attach`)."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedBatch,
        rows: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Logits of all tokens; or, given rows, scores: log-probabilities and entropies, float32 [1, 2, rows].

        Args:
            rows: int64 [rows], without repetitions: positions whose predictions are wanted.
            targets: int64 [rows]: the tokens predicted there. Entropies, in nats, have no gradient.
        """
        score = None
        if rows is not None:
            if targets is None:
                raise TypeError("rows without targets: there is nothing to score")
            score = partial(self._scores, rows, targets, temperature)
        return super().forward(
            input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, output_processor=score
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's; under LoRA the adapters' alone: the base is frozen and comes from its own checkpoint."""
        if self.adapted:
            return sharded_adapters(self, prefix, metadata)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """torch's; under LoRA of a state that holds the adapters alone."""
        return super().load_state_dict(state_dict, strict=strict and not self.adapted, assign=assign)

    def _scores(self, rows: Tensor, targets: Tensor, temperature: float, *, hidden_states: Tensor, **_: Any) -> Tensor:
        group = self.pg_collection.tp
        if self.output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        elif group.size() > 1:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        cap = self.config.beam.final_logit_softcapping
        hidden = take_rows(hidden_states.squeeze(1), rows)
        scores = head.token_logprobs(hidden, self.output_layer.weight, targets, temperature, cap, group)
        return torch.stack(scores)[None]

    def _scale_logits(self, logits: Tensor) -> Tensor:
        return numerics.softcap(logits, self.config.beam.final_logit_softcapping)


def build_model(config: BeamTransformerConfig, *, pre_process: bool, post_process: bool) -> BeamModel:
    """Build this rank's pipeline stage. Megatron's parallel state must have been initialised with the config's sizes.

    Args:
        config: from `transformer_config`.
        pre_process: the stage holds the embedding.
        post_process: the stage holds the final norm and the output layer.
    """
    hf = config.beam
    first = get_transformer_layer_offset(config)
    count = get_num_layers_to_build(config)
    sparse = set(hf.sparse_layers)
    layers = [layer_spec(sparse=layer in sparse) for layer in range(first, first + count)]
    model = BeamModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=BeamRMSNorm),
        hf.vocab_size,
        hf.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )
    if config.recompute_granularity != "full":  # which keeps what passes between layers: twice as much
        for layer, following in pairwise(model.decoder.layers):
            layer.next_norm = (following.input_layernorm,)
    return model
