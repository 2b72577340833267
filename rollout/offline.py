"""An offline vLLM engine in this process, set up as a rollout's engine is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from beam_rl.rollout.profile import CPU_ENVIRONMENT, Device, engine_init_kwargs

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def offline_engine(
    model: str | Path, dtype: Literal["bfloat16", "float32"], longest: int, *, capture: bool, **arguments: Any
) -> Iterator[Any]:
    """A `vllm.LLM` for the length of the block; a process has one at a time.

    Args:
        model: checkpoint folder.
        longest: tokens of the longest sequence, the generated ones included.
        capture: return routed experts.
        arguments: vLLM's engine arguments, over those of the profile.
    """
    device: Device = "gpu" if torch.cuda.is_available() else "cpu"
    for name, value in (QUIET | (CPU_ENVIRONMENT if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)

    from vllm import LLM

    settings = engine_init_kwargs(device)
    if device == "gpu":
        del settings["weight_transfer_config"]  # nobody sends here, and its receiver reads the checkpoint
    engine = LLM(
        str(model),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        use_tqdm_on_load=False,
        max_model_len=longest,
        max_num_batched_tokens=max(2048, longest),
        enable_return_routed_experts=capture,
        **(settings | arguments),
    )
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
