"""SkyRL's padded batches as the engine's unpadded sequences, and log-probs back.

Layout of a batch, with B samples, T the longest sequence and R the longest response: `sequences` [B, T] are
left-padded, response fields [B, R] are right-aligned, `rollout_expert_indices` holds one row for each real token
(PackedTensor [sum, layers, topk]).
"""

from __future__ import annotations

import torch
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from torch import Tensor

from beam_rl.trainer.sequences import Sequence

FIELDS = {
    "advantages": "advantages",
    "action_log_probs": "old_logprobs",
    "rollout_logprobs": "rollout_logprobs",
    "base_action_log_probs": "base_logprobs",
}
"""SkyRL's names of per-token response fields, and the engine's."""


def sequences_from_batch(data: TrainingInputBatch) -> list[Sequence]:
    """Unpad a batch: a sample has its n real tokens, and n - 1 loss weights, field values and rows of routes.

    Without a `loss_mask` (the forward pass for log-probs) every position of the response block is wanted.
    """
    lengths = data["attention_mask"].sum(dim=1).tolist()
    routes, uncaptured = data.get("rollout_expert_indices"), data.get("router_padding_mask")
    loss_mask = data.get("loss_mask")
    if loss_mask is None:
        loss_mask = torch.ones(len(lengths), data.metadata["response_length"])
    present = {ours: data[theirs] for theirs, ours in FIELDS.items() if data.get(theirs) is not None}
    result = []
    for row, length in enumerate(lengths):
        sample_routes = captured = None
        if routes is not None and uncaptured is not None:
            start = int(routes.cu_seqlens[row])
            sample_routes = routes.values[start : start + length - 1]  # the last token was never an input
            captured = ~uncaptured[row, -length:-1]
            captured = None if bool(captured.all()) else captured
        result.append(
            Sequence(
                tokens=data["sequences"][row, -length:],
                loss_mask=right_aligned(loss_mask[row], length - 1),
                routes=sample_routes,
                captured=captured,
                fields={name: right_aligned(values[row], length - 1) for name, values in present.items()},
            )
        )
    return result


def right_aligned(values: Tensor, length: int) -> Tensor:
    """The last `length` entries of a right-aligned row, zeros in front where it is shorter: float32 [length]."""
    values = values[-length:].float()
    return torch.nn.functional.pad(values, (length - len(values), 0))


def padded_logprobs(values: list[Tensor], width: int) -> WorkerOutput:
    """Per-sample log-probs [n - 1] as SkyRL's output: the right-aligned response block, `width` values a sample."""
    return WorkerOutput(loss_fn_outputs=[{"logprobs": right_aligned(row, width).tolist()} for row in values])
