"""Beam as a Megatron-Core language model."""

from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from beam_rl.model import numerics
from beam_rl.model.batch import PackedBatch
from beam_rl.model.layer import BeamRMSNorm, layer_spec
from beam_rl.model.rows import take_rows
from beam_rl.model.transformer_config import BeamTransformerConfig


class BeamModel(GPTModel):
    """One pipeline chunk of a Beam.

    `model(input_ids, position_ids=None, attention_mask=None, packed_seq_params=batch)` takes input_ids int64
    [1, tokens] and a `PackedBatch`, and returns, on the last stage, logits float32 [1, tokens, vocabulary / tp] after
    the softcap; before it, hidden states.
    """

    config: BeamTransformerConfig

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedBatch,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        """Logits of all tokens, or of those at logit_rows, int64 [rows] without repetitions: then [1, rows, …]."""
        select = None if logit_rows is None else partial(self._logits_at, logit_rows)
        return super().forward(
            input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, output_processor=select
        )

    def _logits_at(self, rows: Tensor, *, hidden_states: Tensor, **_: Any) -> Tensor:
        sequence_parallel = self.output_layer.sequence_parallel
        if sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)
        self.output_layer.sequence_parallel = False  # all tokens are here, and the gather sums their gradients
        logits, _bias = self.output_layer(take_rows(hidden_states, rows))
        self.output_layer.sequence_parallel = sequence_parallel
        return self._scale_logits(logits).transpose(0, 1)

    def _scale_logits(self, logits: Tensor) -> Tensor:
        return numerics.softcap(logits, self.config.beam.final_logit_softcapping)


def build_model(
    config: BeamTransformerConfig, *, pre_process: bool, post_process: bool, vp_stage: int | None = None
) -> BeamModel:
    """Build this rank's chunk. Megatron's parallel state must have been initialised with the config's sizes.

    Args:
        config: from `transformer_config`.
        pre_process: the chunk holds the embedding.
        post_process: the chunk holds the final norm and the output layer.
        vp_stage: index of the chunk on its rank under virtual pipelining.
    """
    hf = config.beam
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    sparse = set(hf.sparse_layers)
    layers = [layer_spec(sparse=layer in sparse) for layer in range(first, first + count)]
    return BeamModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=BeamRMSNorm),
        hf.vocab_size,
        hf.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )
