"""An engine in MXFP8 computes what the trainer in MXFP8 computes, and takes its quantised weights exactly."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beam_rl.model import mxfp8
from beam_rl.model.errors import BadInput
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout.mxfp8 import Mxfp8ExpertsMethod, Mxfp8LinearMethod
from beam_rl.rollout.profile import engine_init_kwargs
from beam_rl.rollout.transfer import ShmTrainer, ShmTrainerInit

MXFP8 = Mxfp8Settings()
DENSE, SPARSE = (0, 1), (2, 3, 4, 5, 6, 7)

Weights = dict[str, Tensor]


class Source:
    """A trainer's weights as it sends them, to be exchanged between transfers."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return mxfp8.pack(self.weights.items(), MXFP8)


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], golden: Callable[[str], Path]) -> Iterator[Any]:
    """The tiny engine in MXFP8: a test that changes its weights puts them back."""
    engine = start(golden("tiny"), MXFP8)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def source(weights: Weights) -> Source:
    return Source(weights)


@pytest.fixture
def trainer(engine: Any, source: Source, weights: Weights, tmp_path: Path) -> Iterator[ShmTrainer]:
    """The trainer's half, connected to the engine; afterwards the engine has its own weights again."""
    trainer = ShmTrainer.trainer_init(ShmTrainerInit(str(tmp_path), rank=0), client=engine, source=source)
    yield trainer
    source.weights = weights
    trainer.send_weights()


def test_every_projection_has_the_quantised_method_and_nothing_else(engine: Any) -> None:
    found: dict[str, Any] = {
        name: module.quant_method for name, module in engine.model.named_modules() if hasattr(module, "quant_method")
    }
    quantised = {name for name, m in found.items() if isinstance(m, Mxfp8LinearMethod | Mxfp8ExpertsMethod)}
    expected = set()
    for layer in DENSE + SPARSE:
        prefix = f"model.layers.{layer}."
        mlp = ("gate_up_proj", "down_proj") if layer in DENSE else ("experts.routed_experts",)
        expected |= {f"{prefix}self_attn.{name}" for name in ("qkv_proj", "gate_proj", "o_proj")}
        expected |= {f"{prefix}mlp.{name}" for name in mlp}
    assert quantised == expected


def test_scores_and_routes_are_the_trainers(
    engine: Any, prompts: list[list[int]], trainer_scores: Callable[..., dict[str, Tensor]]
) -> None:
    """In float32, so that only the order of sums differs: no difference, until it decides a rounding to E4M3.

    From there on a random model's tokens differ, by far less than MXFP8 itself makes (0.4 on average).
    """
    engine.reset_prefix_cache()
    outputs = engine.generate(prompts, tokens=1)
    routes = np.stack([np.asarray(output.outputs[0].routed_experts) for output in outputs])
    scores = trainer_scores(MXFP8, routes)
    gap = (scores["replayed"] - engine.prompt_logprobs(prompts)).abs()
    assert gap[:, :6].max() < 1e-4
    assert gap.mean() < 0.03
    own, captured = (np.sort(each[:, :, SPARSE].astype(np.int16)) for each in (scores["routes"].numpy(), routes))
    assert (own == captured).all(-1).mean() > 0.95


def test_captured_routes_do_not_depend_on_the_schedule(engine: Any, prompts: list[list[int]]) -> None:
    """Rows computed one by one, many requests at a time, against one pass over the whole sequence."""
    outputs = engine.generate([p[:40] for p in prompts], tokens=50, n=4, temperature=1.0)
    same = []
    for output in outputs:
        for completion in output.outputs:
            engine.reset_prefix_cache()
            (prefilled,) = engine.generate([[*output.prompt_token_ids, *completion.token_ids][:-1]], tokens=1)
            ways = (completion.routed_experts, prefilled.outputs[0].routed_experts)
            one, other = (np.sort(np.asarray(routes)[:, SPARSE]) for routes in ways)
            assert one.shape == other.shape
            same.append((one == other).all(-1).mean())
    assert np.mean(same) > 0.99


def test_every_sync_is_exact_and_gives_the_checkpoints_model(
    engine: Any,
    trainer: ShmTrainer,
    source: Source,
    prompts: list[list[int]],
    weights: Weights,
    other_weights: Weights,
) -> None:
    engine.reset_prefix_cache()
    original = engine.logprobs(prompts)
    seen: dict[str, Any] = {}
    for name, values in 2 * [("original", weights), ("other", other_weights)]:
        source.weights = values
        trainer.send_weights()
        first = engine.logprobs(prompts)
        assert first == seen.setdefault(name, first)
    assert seen["original"] == original, "what was loaded from the checkpoint is what the transfer brings"
    assert seen["other"] != original


def test_plain_tensors_where_quantised_ones_belong_are_refused_and_the_engine_lives_on(
    engine: Any, trainer: ShmTrainer, source: Source, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset_prefix_cache()
    before = engine.logprobs(prompts)
    with monkeypatch.context() as patch:
        patch.setattr(Source, "__iter__", lambda self: iter(self.weights.items()))
        with pytest.raises(ValueError, match=r"missing: .*_scale.*; of another type: .*_proj\.weight"):
            trainer.send_weights()
    packed = dict(source)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    packed[name] = packed[name][:, :1]
    with monkeypatch.context() as patch:
        patch.setattr(Source, "__iter__", lambda self: iter(packed.items()))
        with pytest.raises(ValueError, match=f"wrongly shaped: {name}"):
            trainer.send_weights()
    engine.reset_prefix_cache()
    assert engine.logprobs(prompts) == before


def test_weights_are_quantised_and_exact(engine: Any, weights: Weights) -> None:
    experts: Any = dict(engine.model.named_modules())["model.layers.3.mlp.experts.routed_experts"]
    assert isinstance(experts, nn.Module)
    name = "model.layers.3.mlp.experts.5.down_proj.weight"
    assert torch.equal(experts.w2_weight[5], mxfp8.round_trip(weights[name], "rceil"))
    assert not torch.equal(experts.w2_weight[5], weights[name])


def test_mxfp8_on_a_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(BadInput, match=r"on a GPU.*W8A16.*beam\.mxfp8\.activations=false.*bf16"):
        engine_init_kwargs("gpu", MXFP8)
    assert "additional_config" not in engine_init_kwargs("gpu")
