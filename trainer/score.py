"""`beam-rl score --side trainer`: log-probabilities and routes of given tokens, computed as training computes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from beam_rl.model.config import load_config
from beam_rl.model.errors import BadInput
from beam_rl.trainer.engine import EngineConfig, RoutesError, Sequence, TrainerEngine
from beam_rl.trainer.replay import route_dtype


def score(
    model: str | Path,
    input_ids: Tensor,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    replay: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Score tokens under a Hugging Face checkpoint.

    Args:
        model: checkpoint folder.
        input_ids: int64 [B, S], S >= 2, without padding.
        replay: "routes.L" [B, S, topk] for every sparse layer L, any integer type: experts to use instead of the
            router's choice.

    Returns:
        "token_logprobs" float32 [B, S - 1], temperature 1, and "routes.L" int16 [B, S, topk] for every sparse layer.

    Raises:
        BadInput: input_ids or routes that the model cannot take; what `load_config` and loading raise.
    """
    hf = load_config(model)
    if input_ids.dim() != 2 or min(len(input_ids), input_ids.shape[1] - 1) < 1 or input_ids.dtype.is_floating_point:
        raise BadInput(
            f"input_ids are {input_ids.dtype} {list(input_ids.shape)}: expected integers [B, S] with B >= 1 and S >= 2"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= hf.vocab_size:
        raise BadInput(
            f"input_ids reach from {int(input_ids.min())} to {int(input_ids.max())}, vocab_size is {hf.vocab_size}"
        )
    engine = TrainerEngine(EngineConfig(dtype=dtype, optimizer=None))
    engine.build(hf)
    engine.load_hf(model)
    batch, length = input_ids.shape
    layers = tuple(hf.sparse_layers)
    routes = None
    if replay is not None:
        shape = (batch, length, hf.num_experts_per_tok)
        routes = torch.zeros(batch, length, hf.num_hidden_layers, hf.num_experts_per_tok, dtype=torch.int64)
        for layer in layers:
            given = replay.get(f"routes.{layer}")
            if given is None or given.shape != shape:
                found = "missing" if given is None else f"of shape {list(given.shape)}"
                raise BadInput(
                    f"routes.{layer} is {found}: expected {list(shape)} for every sparse layer {list(layers)}"
                )
            routes[:, :, layer] = given.long()
        if int(routes.min()) < 0 or int(routes.max()) >= hf.num_experts:
            raise BadInput(
                f"routes reach from {int(routes.min())} to {int(routes.max())}: the model has {hf.num_experts} experts"
            )
        routes = routes.to(route_dtype(hf.num_experts))
    samples = [
        Sequence(tokens=row.long(), loss_mask=torch.ones(length - 1), routes=None if routes is None else routes[i])
        for i, row in enumerate(input_ids)
    ]
    try:
        scores = engine.score(samples, replay=routes is not None, routes=True)
    except RoutesError as error:
        raise BadInput(str(error)) from error
    assert scores.routes is not None
    used = torch.stack(scores.routes)  # [B, S, layers, topk]
    result = {"token_logprobs": torch.stack(scores.logprobs)}
    return result | {f"routes.{layer}": used[:, :, layer].contiguous() for layer in layers}
