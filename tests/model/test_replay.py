"""Rollout routing replay in the model: the right routes, for the right micro batch, at the right layer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from beam_rl.model.batch import PackedBatch
from beam_rl.model.config import BeamConfig
from beam_rl.model.gpt import BeamModel

LENGTHS = [9, 14]
TOKENS = sum(LENGTHS)


def routes_of(config: BeamConfig, seed: int) -> Tensor:
    """Arbitrary distinct experts, uint8 [tokens, layers, topk]."""
    noise = torch.rand(
        TOKENS, config.num_hidden_layers, config.num_experts, generator=torch.Generator().manual_seed(seed)
    )
    return noise.argsort(-1)[..., : config.num_experts_per_tok].to(torch.uint8)


def batch_of(routes: Tensor | None = None, captured: Tensor | None = None) -> PackedBatch:
    return PackedBatch.from_lengths(LENGTHS, routes=routes, captured=captured, record=True)


@pytest.fixture
def tokens(small: BeamConfig) -> Tensor:
    return torch.randint(0, small.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def test_every_layer_uses_its_own_routes(build: Callable, small: BeamConfig, tokens: Tensor) -> None:
    """Dense first layers must not shift the routes of the sparse ones."""
    model, routes = build(small), routes_of(small, 1)
    batch = batch_of(routes)
    free = batch_of()
    with torch.no_grad():
        replayed, own = model(tokens, packed_seq_params=batch), model(tokens, packed_seq_params=free)
    assert sorted(batch.recorded) == [1, 2]
    for layer, ids in batch.recorded.items():
        assert torch.equal(ids, routes[:, layer].long())
    assert (replayed - own).abs().max() > 1e-3


def test_replaying_the_routers_own_choice_changes_nothing(build: Callable, small: BeamConfig, tokens: Tensor) -> None:
    model, free = build(small), batch_of()
    with torch.no_grad():
        own = model(tokens, packed_seq_params=free)
        routes = torch.zeros(TOKENS, small.num_hidden_layers, small.num_experts_per_tok, dtype=torch.uint8)
        for layer, ids in free.recorded.items():
            routes[:, layer] = ids.to(torch.uint8)
        replayed = model(tokens, packed_seq_params=batch_of(routes))
    assert torch.equal(own, replayed)


def test_rows_not_captured_use_the_routers_choice(build: Callable, small: BeamConfig, tokens: Tensor) -> None:
    model, routes = build(small), routes_of(small, 2)
    captured = torch.arange(TOKENS) % 3 > 0
    free, partly = batch_of(), batch_of(routes, captured)
    with torch.no_grad():
        model(tokens, packed_seq_params=free)
        model(tokens, packed_seq_params=partly)
    first = small.sparse_layers[0]
    assert torch.equal(partly.recorded[first][~captured], free.recorded[first][~captured])
    assert torch.equal(partly.recorded[first][captured], routes[captured, first].long())


def test_gradient_of_replayed_weights_reaches_the_router(build: Callable, small: BeamConfig, tokens: Tensor) -> None:
    """The router's gradient is that of the weights it gives the replayed experts, even where it chose others."""
    model, routes = build(small), routes_of(small, 3)
    weight = model.decoder.layers[2].mlp.router.weight
    expert = int(routes[-1, 2, 0])

    def loss() -> Tensor:
        return model(tokens, packed_seq_params=batch_of(routes))[0, -1].square().sum()

    loss().backward()
    analytic = weight.grad[expert, 0].item()
    with torch.no_grad():
        step = 1e-2
        weight[expert, 0] += step
        above = loss()
        weight[expert, 0] -= 2 * step
        numeric = ((above - loss()) / (2 * step)).item()
    assert analytic != 0
    assert analytic == pytest.approx(numeric, rel=0.05)


def gradients(model: BeamModel, losses: Callable[[], list[Tensor]]) -> list[Tensor]:
    model.zero_grad()
    for loss in reversed(losses()):  # both forwards are done: the micro batches are in flight together
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_recompute_uses_the_micro_batchs_own_routes(build: Callable, small: BeamConfig, tokens: Tensor) -> None:
    """Two micro batches in flight, backward in another order than forward: state outside the batch would mix them."""
    kept, recomputing = build(small), build(small, recompute="full")
    recomputing.load_state_dict(kept.state_dict())
    first, second = routes_of(small, 4), routes_of(small, 5)

    def losses_of(model: BeamModel) -> Callable[[], list[Tensor]]:
        return lambda: [
            model(tokens, packed_seq_params=batch_of(routes)).square().mean() for routes in (first, second, None)
        ]

    expected = gradients(kept, losses_of(kept))
    actual = gradients(recomputing, losses_of(recomputing))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_routes_of_another_length_are_refused(build: Callable, small: BeamConfig, tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="22 rows of routes for 23 tokens"):
        build(small)(tokens, packed_seq_params=batch_of(routes_of(small, 6)[:-1]))


def test_ids_above_127_survive_the_compact_type(build: Callable, small: BeamConfig, tokens: Tensor) -> None:
    """A signed byte would turn expert 200 into -56."""
    wide = type(small)(**{**small.to_dict(), "num_experts": 256, "n_group": 4})
    model = build(wide)
    routes = routes_of(wide, 7)
    assert routes.max() > 127
    batch = batch_of(routes)
    with torch.no_grad():
        model(tokens, packed_seq_params=batch)
    assert torch.equal(batch.recorded[1], routes[:, 1].long())
