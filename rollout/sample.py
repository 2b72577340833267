"""Rollouts of given prompts by an offline engine, and what the model computed on the way."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from beam_rl.model.config import load_config
from beam_rl.rollout.offline import offline_engine


@dataclass
class Sample:
    """One response and how it came about; arrays are numpy's, to travel between processes."""

    tokens: NDArray[np.int64]
    """[n]: prompt and response."""
    prompt: int
    """Tokens of the prompt."""
    logprobs: NDArray[np.float32]
    """[n - prompt]: of the response's tokens, as sampled."""
    routes: NDArray[Any] | None
    """uint8 or uint16 [n - 1, layers, topk]: the experts used, by absolute layer."""
    batch_seconds: float
    """What the sampling of all samples together took."""
    hidden: NDArray[np.float32] | None = None
    """[layers, n - 1, hidden]: output of every layer, where it was asked for."""


def sample(
    model: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: Literal["bfloat16", "float32"],
    tokens: int,
    temperature: float = 1.0,
    routes: bool = True,
    hidden: int = 0,
    arguments: dict[str, Any] | None = None,
) -> list[Sample]:
    """Sample one response a prompt.

    Args:
        tokens: longest response.
        routes: capture the experts used.
        hidden: of how many samples, the first ones, to keep the layers' outputs (from a pass over the whole sequence).
        arguments: vLLM's engine arguments, over those of the profile.
    """
    from vllm import SamplingParams

    config = load_config(model)
    capture = routes and bool(config.sparse_layers)
    longest = max(len(prompt) for prompt in prompts) + tokens + 1
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, logprobs=0, detokenize=False)
    inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    with offline_engine(model, dtype, longest, capture=capture, **(arguments or {})) as engine:
        start = time.perf_counter()
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = [_sample(output, capture, seconds) for output in outputs]
        for each in samples[:hidden]:
            each.hidden = _hidden(engine, each.tokens[:-1])
    return samples


def _sample(output: Any, capture: bool, seconds: float) -> Sample:
    completion = output.outputs[0]
    picked = zip(completion.token_ids, completion.logprobs, strict=True)
    return Sample(
        tokens=np.array([*output.prompt_token_ids, *completion.token_ids]),
        prompt=len(output.prompt_token_ids),
        logprobs=np.array([position[token].logprob for token, position in picked], dtype=np.float32),
        routes=np.asarray(completion.routed_experts) if capture else None,
        batch_seconds=seconds,
    )


def _stream(output: Any) -> torch.Tensor:
    """The residual stream in a layer's output; vLLM's own Beam adds the next layer's normalised input."""
    return output[0] if isinstance(output, tuple) else output


def _hidden(engine: Any, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Outputs of all layers, [layers, tokens, hidden], in one pass over a sequence without cached prefixes."""
    from vllm import SamplingParams

    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    kept: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: kept.append(_stream(output).float().cpu()))
        for layer in model.model.layers
    ]
    try:
        engine.reset_prefix_cache()
        last = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        engine.generate([{"prompt_token_ids": tokens.tolist()}], last, use_tqdm=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(kept).numpy()[:, : len(tokens)]
