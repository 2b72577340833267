"""A sequence's values must not depend on what it is packed with, nor on recomputation."""

from collections.abc import Callable

import pytest
import torch

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


def test_logit_rows_are_those_of_all_logits(build: Callable, small: BeamConfig) -> None:
    model = build(small)
    tokens = torch.randint(0, small.vocab_size, (1, sum(LENGTHS)))
    rows = torch.tensor([0, 5, 60, 61])
    batch = PackedBatch.from_lengths(LENGTHS)
    some = model(tokens, packed_seq_params=batch, logit_rows=rows)
    every = model(tokens, packed_seq_params=batch)
    assert some.shape == (1, 4, small.vocab_size)
    torch.testing.assert_close(some, every[:, rows], atol=1e-6, rtol=0)


def test_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedBatch.from_lengths([3, 0])


def test_plan_covers_every_token_once() -> None:
    batch = PackedBatch.from_lengths(LENGTHS)
    plan = batch.plan
    assert sum(count * width for count, width in plan.shapes) == len(plan.gather)
    assert torch.equal(plan.gather[plan.restore], torch.arange(sum(LENGTHS)))
    assert batch.positions.tolist() == [i for length in LENGTHS for i in range(length)]
