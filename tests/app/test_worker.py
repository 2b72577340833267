"""SkyRL's batches as the engine's sequences, and SkyRL's loss as sums that do not depend on the split."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config.config import AlgorithmConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors, make_router_padding_mask

from beam_rl.rollout import nccl, transfer
from beam_rl.trainer.batches import padded_logprobs, sequences_from_batch
from beam_rl.trainer.worker import BeamPolicyWorkerBase
from beam_rl.workers import PolicyWorkerBase

PROMPTS = [[1, 2, 3], [4]]
RESPONSES = [[5, 6], [7, 8, 9, 10]]
LAYERS, TOPK = 2, 3


def batch() -> TrainingInputBatch:
    """Two samples of different lengths, made by SkyRL's own conversion."""
    rows = [len(p) + len(r) - 1 for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    routes = [
        np.arange(n * LAYERS * TOPK, dtype=np.uint8).reshape(n, LAYERS, TOPK) + 10 * i for i, n in enumerate(rows)
    ]
    logprobs = [[-0.5, -0.6], [-0.7, -0.8, -0.9, -1.0]]
    rewards = [[0.0, 1.0], [0.0, 0.0, 0.0, -1.0]]
    masks = [[1, 1], [1, 0, 1, 1]]
    sequences, attention, response, _, loss_mask, rollout, indices, _ = convert_prompts_responses_to_batch_tensors(
        0, PROMPTS, RESPONSES, rewards, masks, logprobs, routes
    )
    data = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "loss_mask": loss_mask,
            "rollout_logprobs": rollout,
            "rollout_expert_indices": indices,
            "router_padding_mask": make_router_padding_mask(attention, rows),
        }
    )
    data.metadata = {"response_length": response.shape[1]}
    return data


def test_padding_is_gone_and_fields_stand_at_the_token_that_they_predict() -> None:
    first, second = sequences_from_batch(batch())
    assert first.tokens.tolist() == [1, 2, 3, 5, 6]
    assert second.tokens.tolist() == [4, 7, 8, 9, 10]
    assert first.loss_mask.tolist() == [0, 0, 1, 1]  # entry t is about predicting token t + 1
    assert second.loss_mask.tolist() == [1, 0, 1, 1]
    assert first.fields["rollout_logprobs"].tolist() == pytest.approx([0, 0, -0.5, -0.6])
    assert second.fields["rollout_logprobs"].tolist() == pytest.approx([-0.7, -0.8, -0.9, -1.0])


def test_every_token_keeps_its_own_routes() -> None:
    first, second = sequences_from_batch(batch())
    assert first.captured is None
    assert first.routes is not None
    assert second.routes is not None
    assert first.routes.flatten().tolist() == list(range(4 * LAYERS * TOPK))
    assert second.routes.flatten().tolist() == [value + 10 for value in range(4 * LAYERS * TOPK)]


def test_a_token_whose_route_is_missing_is_marked() -> None:
    data = batch()
    data["router_padding_mask"][1, -2] = True
    assert sequences_from_batch(data)[1].captured.tolist() == [True, True, True, False]  # type: ignore[union-attr]


def test_logprobs_come_back_right_aligned_in_the_response_block() -> None:
    output = padded_logprobs([torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0])], 2)
    assert [row["logprobs"] for row in output.loss_fn_outputs] == [[-2.0, -3.0], [0.0, -4.0]]


def worker(**changes: Any) -> BeamPolicyWorkerBase:
    """A worker without processes: what `loss` reads."""
    algorithm = AlgorithmConfig(
        policy_loss_type="dual_clip", eps_clip_low=0.2, eps_clip_high=0.28, clip_ratio_c=10.0, use_kl_loss=False
    )
    for name, value in changes.items():
        setattr(algorithm, name, value)
    bare = BeamPolicyWorkerBase.__new__(BeamPolicyWorkerBase)
    bare.cfg = SimpleNamespace(algorithm=algorithm)
    bare.policy_loss_fn = PolicyLossRegistry.get("dual_clip")
    return bare


@pytest.mark.parametrize("use_kl_loss", [False, True])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(use_kl_loss: bool) -> None:
    """The token mean's denominator is the global batch's (verl#5228, areal#1546, trl#5625)."""
    generator = torch.Generator().manual_seed(0)
    tokens = 40
    old = -torch.rand(tokens, generator=generator)
    fields = {
        "old_logprobs": old,
        "advantages": torch.randn(tokens, generator=generator) / tokens,
        "rollout_logprobs": old,
        "base_logprobs": old + 0.1 * torch.randn(tokens, generator=generator),
    }
    start = old + 0.3 * torch.randn(tokens, generator=generator)
    entropy, mask = torch.rand(tokens, generator=generator), torch.ones(tokens)
    bare = worker(use_kl_loss=use_kl_loss)
    results = []
    for size in (40, 7, 1):
        logprobs = start.clone().requires_grad_()
        sums: dict[str, float] = {}
        for low in range(0, tokens, size):
            part = slice(low, low + size)
            loss, metrics = bare.loss(
                logprobs[part], {k: v[part] for k, v in fields.items()}, mask[part], entropy[part], tokens=tokens
            )
            loss.backward()
            for name, value in {"loss": loss.detach(), **metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        results.append((logprobs.grad, sums))
    for gradient, sums in results[1:]:
        torch.testing.assert_close(gradient, results[0][0])
        assert sums == pytest.approx(results[0][1], rel=1e-5)
    assert 0 < results[0][1]["clipped"] < tokens


def test_clipping_is_higher_above_than_below() -> None:
    """Clip-higher: a good token may gain 28 %, a bad one lose 20 %; and dual clip bounds a bad token's loss."""
    bare = worker()

    def gradient(ratio: float, advantage: float) -> float:
        logprobs = torch.log(torch.tensor([ratio])).requires_grad_()
        fields = {"old_logprobs": torch.zeros(1), "advantages": torch.tensor([advantage])}
        bare.loss(logprobs, fields, torch.ones(1), torch.zeros(1), tokens=1)[0].backward()
        assert logprobs.grad is not None
        return float(logprobs.grad)

    assert gradient(1.25, 1.0) < 0
    assert gradient(1.30, 1.0) == 0
    assert gradient(0.85, -1.0) > 0
    assert gradient(0.75, -1.0) == 0
    assert gradient(9.0, -1.0) > 0
    assert gradient(11.0, -1.0) == 0


@pytest.mark.parametrize("correction", [None, "token"])
def test_a_micro_batch_without_a_trained_token_has_a_loss_of_nothing(correction: str | None) -> None:
    """Expert-parallel ranks fill up with padding; SkyRL's off-policy correction fails on no values, and they hang."""
    algorithm = AlgorithmConfig()
    algorithm.off_policy_correction.tis_ratio_type = correction
    worker: Any = BeamPolicyWorkerBase.__new__(BeamPolicyWorkerBase)
    worker.cfg = SimpleNamespace(algorithm=algorithm)
    worker.policy_loss_fn = PolicyLossRegistry.get("dual_clip")
    none = torch.zeros(0, requires_grad=True)
    fields = dict.fromkeys(("old_logprobs", "advantages", "rollout_logprobs"), torch.zeros(0))
    loss, sums = worker.loss(none, fields, torch.zeros(0), torch.zeros(0), tokens=5.0)
    loss.backward()
    assert float(loss) == 0.0
    assert sums["policy_loss"] == 0.0


@pytest.mark.parametrize(("colocated", "refused"), [(False, True), (True, False)])
def test_a_trainer_that_cannot_use_nccl_does_not_wait_for_engines(
    colocated: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a working NCCL would wait for this process's communicator for ever."""

    async def meet(*_: Any) -> None:
        met.append(True)

    def unusable() -> None:
        raise RuntimeError("no weights would arrive")

    met: list[bool] = []
    monkeypatch.setattr(nccl, "check", unusable)
    monkeypatch.setattr(BeamPolicyWorkerBase, "init_weight_sync_state", meet)
    worker: Any = PolicyWorkerBase.__new__(PolicyWorkerBase)
    worker.cfg = SimpleNamespace(placement=SimpleNamespace(colocate_all=colocated))
    transport = {"weight_transfer_config": {"backend": transfer.NCCL_BACKEND}}
    engines: Any = SimpleNamespace(engine_init_kwargs=transport, weight_sync_backend="nccl")
    if refused:
        with pytest.raises(RuntimeError, match="no weights would arrive"):
            asyncio.run(worker.init_weight_sync_state(None, engines))
    else:
        asyncio.run(worker.init_weight_sync_state(None, engines))
    assert met == ([] if refused else [True])
