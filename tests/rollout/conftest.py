"""An offline engine for the rollout tests: the tiny reference model in float32, in this process.

vLLM keeps one engine's process groups in a process, so an engine lives for one module, and whatever needs another one
(`score`) is done before it starts. The engine is small on purpose. Prompts of 96 tokens do not fit one step of 64, so
prefill is always chunked; all sequences of a test together do not fit the KV cache, so some are preempted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import load_config
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout.profile import CPU_ENVIRONMENT, engine_init_kwargs
from beam_rl.rollout.score import score

os.environ.update(CPU_ENVIRONMENT)  # before any test imports vLLM
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

Golden = Callable[[str], Path]


class Engine:
    """An offline engine, with what the tests ask of it; also the control plane that weight transfer talks to."""

    def __init__(self, model: Path, mxfp8: Mxfp8Settings | None = None) -> None:
        from vllm import LLM

        small = {"kv_cache_memory_bytes": 2**24, "num_gpu_blocks_override": 16}
        arguments = engine_init_kwargs("cpu", mxfp8) | small
        self.llm: Any = LLM(
            str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            enable_return_routed_experts=True,
            disable_log_stats=False,
            **arguments,
        )

    @property
    def model(self) -> Any:
        """The module that vLLM runs."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, n: int = 1, temperature: float = 0.0
    ) -> list[Any]:
        """vLLM's outputs for prompts of token ids, with the log-probs of the sampled tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            n=n, max_tokens=tokens, temperature=temperature, logprobs=0, ignore_eos=True, detokenize=False
        )
        return self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)

    def logprobs(self, prompts: Sequence[Sequence[int]], tokens: int = 16) -> list[list[tuple[int, float]]]:
        """Greedy (token, log-prob) pairs, a list a prompt."""
        return [sampled(output.outputs[0]) for output in self.generate(prompts, tokens)]

    def prompt_logprobs(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Log-probs [prompts, tokens - 1] of the prompts' own tokens; prompts of one length."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
        return torch.tensor(
            [
                [at[t].logprob for at, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)]
                for o in outputs
            ]
        )

    def preemptions(self) -> int:
        """Requests preempted so far."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self, reset_running_requests: bool = True) -> None:
        assert self.llm.reset_prefix_cache(reset_running_requests)


def sampled(completion: Any) -> list[tuple[int, float]]:
    """(token, log-prob) pairs of a completion."""
    return [
        (token, position[token].logprob)
        for token, position in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


@pytest.fixture(scope="session")
def start() -> type[Engine]:
    """Starts an engine; for modules that need another one than `engine`."""
    return Engine


@pytest.fixture(scope="module")
def engine(golden: Golden, other_scores: Tensor) -> Iterator[Engine]:
    """The tiny engine, shared: a test that changes its weights puts them back."""
    engine = Engine(golden("tiny"))
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def reference(golden: Golden) -> Callable[[str], dict[str, Tensor]]:
    """The reference values of a golden model."""
    return lambda name: load_file(golden(name) / "reference.safetensors")


@pytest.fixture(scope="session")
def prompts(reference: Callable[[str], dict[str, Tensor]]) -> list[list[int]]:
    """The two prompts of 96 tokens whose routes the tiny reference lists."""
    return reference("tiny")["input_ids"].tolist()


@pytest.fixture(scope="session")
def weights(golden: Golden) -> dict[str, Tensor]:
    """The tiny model's weights, by Hugging Face name."""
    return load_file(golden("tiny") / "model.safetensors")


@pytest.fixture(scope="session")
def other_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights near the tiny model's, as after an optimizer step."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: value + 0.05 * value.abs().mean() * torch.randn(value.shape, generator=generator)
        for name, value in weights.items()
    }


@pytest.fixture(scope="session")
def other_scores(
    golden: Golden, other_weights: dict[str, Tensor], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Tensor:
    """Log-probs of the two prompts under the other weights, by an engine that read them from a checkpoint."""
    folder = tmp_path_factory.mktemp("other") / "model"
    save_hf(folder, load_config(golden("tiny")), other_weights.items())
    return score(folder, torch.tensor(prompts), "float32")["token_logprobs"]


@pytest.fixture
def trainer_scores(
    golden: Golden, prompts: list[list[int]], tmp_path: Path
) -> Callable[[Mxfp8Settings, Any], dict[str, Tensor]]:
    """Scores the prompts under the tiny model by a trainer in MXFP8, given routes [prompts, tokens, layers, topk].

    `replayed` float32 [prompts, tokens - 1] follows the routes; `routes` is what the trainer would have chosen.
    """

    def run(settings: Mxfp8Settings, routes: Any) -> dict[str, Tensor]:
        given, out = tmp_path / "given.safetensors", tmp_path / "scores.safetensors"
        save_file({"tokens": torch.tensor(prompts), "routes": torch.from_numpy(np.ascontiguousarray(routes))}, given)
        script = Path(__file__).with_name("mxfp8_trainer.py")
        arguments = [str(golden("tiny")), json.dumps(settings.to_dict()), str(given), str(out)]
        subprocess.run([sys.executable, str(script), *arguments], check=True)
        return load_file(out)

    return run
