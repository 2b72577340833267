"""A sequence's values must not depend on what it is packed with, nor on recomputation."""

from collections.abc import Callable

import pytest
import torch

from beam_rl.model import head
from beam_rl.model.batch import PackedBatch
from beam_rl.model.config import BeamConfig

LENGTHS = [1, 7, 40, 16, 17, 7, 33]


def test_packed_sequences_do_not_see_each_other(build: Callable, small: BeamConfig) -> None:
    model = build(small)
    tokens = torch.randint(0, small.vocab_size, (1, sum(LENGTHS)))
    with torch.no_grad():
        together = model(tokens, packed_seq_params=PackedBatch.from_lengths(LENGTHS))[0].split(LENGTHS)
        for part, logits in zip(tokens[0].split(LENGTHS), together, strict=True):
            alone = model(part[None], packed_seq_params=PackedBatch.from_lengths([len(part)]))[0]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


def test_gradients_of_padding_inside_attention_do_not_leak(build: Callable, small: BeamConfig) -> None:
    model = build(small)
    tokens = torch.randint(0, small.vocab_size, (1, sum(LENGTHS)))

    def gradient(batches: list[tuple[torch.Tensor, list[int]]]) -> list[torch.Tensor]:
        model.zero_grad()
        for part, lengths in batches:
            model(part[None], packed_seq_params=PackedBatch.from_lengths(lengths)).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    together = gradient([(tokens[0], LENGTHS)])
    apart = gradient([(part, [len(part)]) for part in tokens[0].split(LENGTHS)])
    for a, b in zip(together, apart, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("at_a_time", [2**28, 7])
def test_scores_are_those_of_all_logits(
    at_a_time: int, build: Callable, small: BeamConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, whole or one row at a time; the logits' last copy would be the memory's peak."""
    monkeypatch.setattr(head, "LOGITS", at_a_time)
    model = build(small)
    tokens = torch.randint(0, small.vocab_size, (1, sum(LENGTHS)))
    rows, targets = torch.tensor([0, 5, 60, 61]), torch.tensor([1, 0, 3, 2])
    batch = PackedBatch.from_lengths(LENGTHS)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])

    logits = model(tokens, packed_seq_params=batch)[0, rows] / 0.7
    plain = logits.log_softmax(-1)
    expected = plain.gather(1, targets[:, None])[:, 0]
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    ours, entropies = model(tokens, packed_seq_params=batch, rows=rows, targets=targets, temperature=0.7)[0]
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropies, -(plain.exp() * plain).sum(-1), atol=2e-6, rtol=0)
    (ours * weights).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm(), name


def test_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedBatch.from_lengths([3, 0])


def test_plan_covers_every_token_once() -> None:
    batch = PackedBatch.from_lengths(LENGTHS)
    plan = batch.plan
    assert sum(count * width for count, width in plan.shapes) == len(plan.gather)
    assert torch.equal(plan.gather[plan.restore], torch.arange(sum(LENGTHS)))
    assert batch.positions.tolist() == [i for length in LENGTHS for i in range(length)]
