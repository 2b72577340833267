"""Engines on the reference model, and the samples they are fed."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from beam_rl.model.config import load_config
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Sequence, TrainerEngine

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def reference() -> dict[str, Tensor]:
    """Reference values of the tiny model."""
    return load_file(GOLDEN / "tiny" / "reference.safetensors")


@pytest.fixture(scope="session")
def ranks() -> ModuleType:
    """`layouts_ranks.py`, whose functions also run in this process."""
    spec = importlib.util.spec_from_file_location("layouts_ranks", Path(__file__).parent / "layouts_ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine_for(golden: Callable[[str], Path]) -> Callable[..., TrainerEngine]:
    """Build an engine on a reference model: float32, and a learning rate at which steps show."""

    def build(name: str = "tiny", **settings: Any) -> TrainerEngine:
        engine = TrainerEngine(
            EngineConfig(**{"dtype": "float32", "optimizer": OptimizerSettings(lr=1e-3), **settings})
        )
        engine.build(load_config(golden(name)))
        engine.load_hf(golden(name))
        return engine

    return build


@pytest.fixture
def samples(reference: dict[str, Tensor]) -> list[Sequence]:
    """Seven ragged samples with prompts (mask 0) and a field of weights."""
    generator = torch.Generator().manual_seed(3)
    text = reference["input_ids"].flatten()
    result = []
    for length in (11, 40, 2, 25, 17, 33, 29):
        start = int(torch.randint(0, len(text) - length, (1,), generator=generator))
        mask = torch.ones(length - 1)
        mask[: length // 3] = 0
        weights = torch.randn(length - 1, generator=generator)
        result.append(Sequence(tokens=text[start : start + length].clone(), loss_mask=mask, fields={"weight": weights}))
    return result


@pytest.fixture
def with_routes() -> Callable[[TrainerEngine, list[Sequence]], list[Sequence]]:
    """The samples with the routes that the engine itself chooses, as a rollout would deliver them."""

    def record(engine: TrainerEngine, samples: list[Sequence]) -> list[Sequence]:
        routes = engine.score(samples, replay=False, routes=True).routes
        assert routes is not None
        return [
            Sequence(s.tokens, s.loss_mask, routes=r[:-1].clamp(min=0).to(torch.uint8), fields=s.fields)
            for s, r in zip(samples, routes, strict=True)
        ]

    return record


@pytest.fixture
def weighted_loss() -> Callable[..., Any]:
    """A policy-gradient-like token mean over 100 tokens."""

    def loss(logprobs: Tensor, fields: Any, loss_mask: Tensor, entropy: Tensor | None) -> Any:
        total = -(logprobs * fields["weight"] * loss_mask).sum() / 100
        return total, {"tokens": loss_mask.sum(), "logprobs": logprobs.detach().sum()}

    return loss


@pytest.fixture
def gradients() -> Callable[[TrainerEngine], dict[str, Tensor]]:
    """Accumulated gradients under Hugging Face names."""

    def read(engine: TrainerEngine) -> dict[str, Tensor]:
        parameters = [p for model in engine.models for p in model.parameters()]
        kept = [p.data.clone() for p in parameters]
        for parameter in parameters:
            parameter.data.copy_(parameter.main_grad)
        result = {name: tensor.clone() for name, tensor in engine.export()}
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data.copy_(data)
        return result

    return read
