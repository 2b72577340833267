"""Weights arrive whole and at once, or not at all."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from beam_rl.rollout import receive, transfer
from beam_rl.rollout.transfer import ShmTrainer, ShmTrainerInit

Weights = dict[str, Tensor]


class Source:
    """A trainer's weights, to be exchanged between transfers."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())


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


def test_every_sync_is_exact_though_prompts_are_cached(
    engine: Any,
    trainer: ShmTrainer,
    source: Source,
    prompts: list[list[int]],
    weights: Weights,
    other_weights: Weights,
) -> None:
    original = engine.logprobs(prompts)
    seen: dict[str, Any] = {}
    for name, values in 2 * [("original", weights), ("other", other_weights)]:
        source.weights = values
        trainer.send_weights()
        first = engine.logprobs(prompts)
        assert first == seen.setdefault(name, first)
        engine.generate(prompts, tokens=1)  # so that the next weights find these prompts in the cache
    assert seen["original"] == original
    assert seen["other"] != original
    assert trainer.version == 4
    assert engine.llm.get_weight_version() == "4"


def test_synced_weights_score_as_their_checkpoint(
    engine: Any,
    trainer: ShmTrainer,
    source: Source,
    prompts: list[list[int]],
    other_weights: Weights,
    other_scores: Tensor,
) -> None:
    source.weights = other_weights
    trainer.send_weights()
    torch.testing.assert_close(engine.prompt_logprobs(prompts), other_scores, rtol=0, atol=2e-5)


def test_wrong_tensors_are_refused_by_name_and_the_engine_lives_on(
    engine: Any, trainer: ShmTrainer, source: Source, prompts: list[list[int]], weights: Weights, tmp_path: Path
) -> None:
    engine.reset_prefix_cache()
    before = engine.logprobs(prompts)
    source.weights = weights | {"model.extra.weight": torch.zeros(2), "lm_head.weight": torch.zeros(3, 3)}
    del source.weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.norm.*unknown: model\.extra.*wrongly shaped: lm_head"):
        trainer.send_weights()
    assert trainer.version == 0
    assert not list(tmp_path.iterdir()), "the file outlived its transfer"
    engine.reset_prefix_cache()
    assert engine.logprobs(prompts) == before


def test_vllm_still_needs_its_expert_kernels_dropped(
    engine: Any, trainer: ShmTrainer, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When this fails, vLLM packs reloaded experts itself, and `drop_expert_kernels` has no reason left."""
    engine.reset_prefix_cache()
    before = engine.logprobs(prompts)
    monkeypatch.setattr(receive, "drop_expert_kernels", lambda model: None)
    trainer.send_weights()
    assert engine.logprobs(prompts) != before


def test_weights_that_share_memory_are_sent_whole(
    engine: Any, trainer: ShmTrainer, source: Source, prompts: list[list[int]], weights: Weights
) -> None:
    engine.reset_prefix_cache()
    before = engine.logprobs(prompts)
    packed = torch.cat([value.flatten() for value in weights.values()])
    parts = packed.split([value.numel() for value in weights.values()])
    source.weights = {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
    trainer.send_weights()
    assert engine.logprobs(prompts) == before


def test_files_of_killed_trainers_are_removed_and_of_live_ones_kept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    files = [tmp_path / f"{transfer._prefix()}-run-{pid}-3.safetensors" for pid in (dead.pid, os.getpid())]
    for file in (*files, tmp_path / "notes.txt"):
        file.touch()
    transfer.remove_orphans(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([files[1], tmp_path / "notes.txt"])


def test_a_file_bears_the_runs_name_and_goes_with_a_failed_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(transfer.RUN_VARIABLE, "run-7")
    seen: list[str] = []

    class Unreachable:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

        def start_weight_update(self) -> None:
            seen.extend(path.name for path in tmp_path.iterdir())
            raise ConnectionError

    trainer = ShmTrainer.trainer_init(
        ShmTrainerInit(str(tmp_path), rank=0),
        client=Unreachable(),
        source=Source({"w": torch.zeros(1)}),
    )
    with pytest.raises(ConnectionError):
        trainer.send_weights()
    assert len(seen) == 1
    assert "run-7" in seen[0]
    assert not list(tmp_path.iterdir())
    assert trainer.version == 0


def test_other_ranks_read_the_weights_and_send_nothing(tmp_path: Path) -> None:
    read = []

    def gather() -> Iterator[tuple[str, Tensor]]:
        read.append(True)
        yield "w", torch.zeros(1)

    class Collective:
        __iter__ = staticmethod(gather)

    trainer = ShmTrainer.trainer_init(ShmTrainerInit(str(tmp_path), rank=1), client=None, source=Collective())
    trainer.send_weights()
    assert read == [True], "a rank that leaves out the collectives hangs the others"
    assert not list(tmp_path.iterdir())


def test_the_trainers_half_costs_no_vllm_import() -> None:
    code = "import sys, beam_rl.rollout.transfer; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
