"""Scores of given tokens under a checkpoint, by an offline vLLM engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from beam_rl.model.checkpoint import open_checkpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.rollout.offline import offline_engine

PROGRESS_FROM = 64
"""Sequences from which a progress bar is worth showing."""


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
        replay: refused; a rollout engine chooses its experts itself.

    Returns:
        "token_logprobs" float32 [B, S - 1], temperature 1, and "routes.L" int16 [B, S, topk] for every sparse layer L.

    Raises:
        BadInput: replay is given, input_ids that the model cannot take, or a checkpoint that is not whole.
    """
    if replay is not None:
        raise BadInput("--replay: the rollout side chooses its experts itself. Use --side trainer, or leave it out.")
    config, _ = open_checkpoint(model)
    _check_tokens(input_ids, config)
    batch, length = input_ids.shape
    rows: list[list[int]] = input_ids.tolist()
    prompts: Any = [{"prompt_token_ids": row} for row in rows]
    with offline_engine(model, dtype, length + 1, capture=bool(config.sparse_layers)) as engine:
        from vllm import SamplingParams

        # The one generated token is not looked at: with it comes the route of the last prompt token.
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs: list[Any] = engine.generate(prompts, sampling, use_tqdm=batch >= PROGRESS_FROM)
    logprobs = [
        [position[token].logprob for position, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
        for output, row in zip(outputs, rows, strict=True)
    ]
    result = {"token_logprobs": torch.tensor(logprobs, dtype=torch.float32)}
    if not config.sparse_layers:
        return result
    routes = torch.from_numpy(np.stack([output.outputs[0].routed_experts for output in outputs]).astype(np.int16))
    assert routes.shape[:2] == (batch, length), "vLLM returned routes for another number of tokens"
    return result | {f"routes.{layer}": routes[:, :, layer].contiguous() for layer in config.sparse_layers}


def _check_tokens(input_ids: Tensor, config: BeamConfig) -> None:
    if input_ids.dim() != 2 or min(len(input_ids), input_ids.shape[1] - 1) < 1 or input_ids.dtype.is_floating_point:
        raise BadInput(
            f"input_ids are {input_ids.dtype} {list(input_ids.shape)}: expected integers [B, S] with B >= 1 and S >= 2"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= config.vocab_size:
        raise BadInput(f"input_ids reach from {low} to {high}, vocab_size is {config.vocab_size}")
    longest = config.max_position_embeddings - 1
    if input_ids.shape[1] > longest:
        raise BadInput(
            f"input_ids have {input_ids.shape[1]} tokens a row: with max_position_embeddings "
            f"{config.max_position_embeddings} an engine scores at most {longest}"
        )
