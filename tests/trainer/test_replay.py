"""R3: a rollout's routes are checked, replayed exactly, and never outlive their micro batch."""

from dataclasses import replace

import pytest
import torch

from beam_rl.trainer import pipeline
from beam_rl.trainer.engine import OptimizerSettings, RoutesError, Sequence
from beam_rl.trainer.replay import CAPTURE_SETTING, Routing, pack_routes, route_dtype
from beam_rl.trainer.sequences import pack

ROUTING = Routing(layers=8, sparse_layers=(2, 3, 4, 5, 6, 7), topk=4, experts=16)


def routes_for(tokens: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, 8, 16, generator=generator).topk(4, -1).indices.to(dtype)


def sample(tokens: int = 12, routes: torch.Tensor | None = None, captured: torch.Tensor | None = None) -> Sequence:
    ids = torch.arange(3, 3 + tokens)
    return Sequence(ids, torch.ones(tokens - 1), routes=routes, captured=captured)


# Checks


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (None, CAPTURE_SETTING),
        (routes_for(12).long(), "int64"),
        (routes_for(12).to(torch.int8), "int8"),
        (routes_for(12)[:, 1:], "shape"),
        (routes_for(12)[:, :, :3], "shape"),
        (routes_for(10), "10 rows of routes for 12 tokens"),
        (routes_for(13), "13 rows of routes for 12 tokens"),
    ],
)
def test_missing_short_or_misshapen_routes_are_refused(routes, said):
    with pytest.raises(RoutesError, match=said):
        ROUTING.check_shape(routes, None, 12)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: r.zero_(), "captured none: change the rollout engine's moe backend"),
        (lambda r: r[5, 3].fill_(7), "one of them twice"),
        (lambda r: r[5, 3].copy_(torch.tensor([1, 2, 3, 1])), "one of them twice"),
        (lambda r: r[5, 3].copy_(torch.tensor([1, 2, 2, 4])), "one of them twice"),
        (lambda r: r[5, 3, 0].fill_(16), "the model has 16"),
        (lambda r: r[5, 3, 0].fill_(-56), "narrow type"),  # expert 200 that went through int8
    ],
)
def test_rows_that_no_router_chooses_are_refused_at_the_first_one(spoil, said):
    routes = routes_for(12, torch.int16)
    spoil(routes)
    fault = ROUTING.first_fault(routes, None)
    assert fault is not None
    assert said in fault[1]
    assert fault[0] == (0 if not routes.any() else 5)
    samples = [sample(12, routes_for(12, torch.int16)), sample(12, routes)]
    with pytest.raises(RoutesError, match=f"sample 1, token {fault[0]}: in layer"):
        pack(samples, [0, 1], routing=ROUTING)


def test_good_routes_dense_layers_and_gaps_are_not_faults():
    routes = routes_for(12)
    routes[:, :2] = 0  # dense layers
    assert ROUTING.first_fault(routes, None) is None
    routes[4] = 0
    assert ROUTING.first_fault(routes, torch.arange(12) != 4) is None
    assert ROUTING.first_fault(routes, torch.arange(12) != 5) is not None


@pytest.mark.parametrize("experts", [8, 128, 129, 256, 257, 512])
def test_the_type_of_ids_holds_every_expert(experts):
    """Ids 128 to 255 through int8 come back negative (verl#7880), and 512 experts overflow uint8 (prime-rl#3051)."""
    ids = torch.arange(experts)
    assert torch.equal(ids.to(route_dtype(experts)).long(), ids)


# Packing


def test_packed_routes_stay_as_small_as_they_came():
    """Widening to int64 when packing costs eight times the memory (xtuner#2046, SkyRL#1910)."""
    parts = [routes_for(30), routes_for(11)[:-1], None]
    ids, captured = pack_routes(parts, [None, None, None], [30, 11, 6])
    assert ids.shape == (47, 8, 4)
    assert ids.nbytes == 47 * 8 * 4
    assert captured is None
    wide, _ = pack_routes([routes_for(30, torch.int16)], [None], [30])
    assert wide.dtype == torch.int16


def test_rows_that_nothing_reads_name_distinct_experts():
    """The dispatcher counts tokens x topk: a repeated expert in padding breaks it (slime#1052)."""
    ids, _ = pack_routes([routes_for(11)[:-1], None], [None, None], [11, 5])
    assert torch.equal(ids[10:], torch.arange(4, dtype=torch.uint8).expand(6, 8, 4))
    assert torch.equal(ids[:10], routes_for(11)[:-1])


def test_gaps_keep_their_place():
    there = torch.arange(10) != 3
    _, captured = pack_routes([routes_for(6), routes_for(11)[:-1]], [None, there], [6, 11])
    assert captured is not None
    assert (~captured).nonzero().tolist() == [[9]]


# Replay


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replaying_the_routers_own_choice_changes_nothing(dtype, engine_for, samples):
    """With a row for each sample's last token, too: how many rows an expert has moves the last bit of all of them."""
    engine = engine_for(dtype=dtype)
    free = engine.score(samples, replay=False, routes=True)
    assert free.routes is not None
    own = [replace(s, routes=r.clamp(min=0).to(torch.uint8)) for s, r in zip(samples, free.routes, strict=True)]
    for one, other in zip(free.logprobs, engine.forward_logprobs(own), strict=True):
        assert torch.equal(one, other)


def test_other_routes_change_the_scores_and_are_the_ones_used(engine_for, samples):
    engine = engine_for()
    others = [replace(s, routes=routes_for(len(s.tokens))) for s in samples]
    free = engine.forward_logprobs(samples, replay=False)
    scores = engine.score(others, routes=True)
    assert scores.routes is not None
    for i, other in enumerate(others):
        assert torch.equal(scores.routes[i][:, 2:], other.routes[:, 2:].to(torch.int16))
        assert not torch.equal(scores.logprobs[i], free[i])


def test_tokens_without_a_captured_route_use_the_routers_choice(engine_for, samples, with_routes):
    engine = engine_for()
    own = with_routes(engine, samples)
    gaps = []
    for s in own:
        routes, there = s.routes.clone(), torch.ones(len(s.routes), dtype=torch.bool)
        routes[::3], there[::3] = 0, False
        gaps.append(replace(s, routes=routes, captured=there))
    for one, other in zip(engine.forward_logprobs(own), engine.forward_logprobs(gaps), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_gradient_reaches_the_router_through_replayed_experts(engine_for, samples, weighted_loss, gradients):
    """Weights are gathered from the full scores, so drifted experts still teach (Megatron-LM#79): finite difference."""
    engine = engine_for()
    foreign = [replace(s, routes=routes_for(len(s.tokens))) for s in samples]
    engine.forward_backward(foreign, weighted_loss)
    router = engine.models[0].decoder.layers[4].mlp.router.weight
    analytic = router.main_grad.clone()
    row, column = divmod(int(analytic.abs().argmax()), analytic.shape[1])
    losses = []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            router[row, column] += step
        engine.zero_grad()
        losses.append(engine.forward_backward(foreign, weighted_loss)["loss"])
        with torch.no_grad():
            router[row, column] -= step
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(analytic[row, column]), rel=1e-2)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_two_micro_batches_in_flight_keep_their_own_routes(recompute, engine_for, samples, gradients, weighted_loss):
    """Both forwards run before both backwards, as in a pipeline; recomputation must see each batch's own routes."""
    engine = engine_for(recompute=recompute)
    foreign = [replace(s, routes=routes_for(len(s.tokens))) for s in samples]
    engine.forward_backward(foreign, weighted_loss)
    expected = gradients(engine)
    engine.zero_grad()
    losses = []
    for members in ([0, 1, 2], [3, 4, 5, 6]):
        batch = pack(foreign, members, routing=ROUTING)
        where = {"rows": batch.rows, "targets": batch.targets}
        scores = engine.chunks[0](batch.tokens, packed_seq_params=batch.batch, **where)
        losses.append(pipeline.loss(batch, scores[0], weighted_loss, False)[0])
    for loss in losses:
        loss.backward()
    engine.chunks[0].settle()  # the schedule's last reductions would
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_nothing_of_a_replay_stays_behind(engine_for, samples, weighted_loss, gradients):
    """A forward-only pass, or an exception in the middle of a step, leaves no routes for the next one (SkyRL#1908)."""
    engine = engine_for(micro_batch_tokens=60)
    engine.forward_backward(samples, weighted_loss, replay=False)
    expected = gradients(engine)
    engine.zero_grad()
    foreign = [replace(s, routes=routes_for(len(s.tokens))) for s in samples]
    engine.forward_logprobs(foreign)
    calls = 0

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("in the second micro batch")
        return weighted_loss(*args)

    with pytest.raises(KeyError):
        engine.forward_backward(foreign, failing)
    engine.forward_backward(samples, weighted_loss, replay=False)
    for name, gradient in gradients(engine).items():
        assert torch.equal(gradient, expected[name]), name


def test_a_sample_without_routes_stops_the_step_before_it_begins(engine_for, samples, weighted_loss):
    engine = engine_for(optimizer=OptimizerSettings(lr=1e-3))
    half = [replace(s, routes=routes_for(len(s.tokens)) if i < 4 else None) for i, s in enumerate(samples)]
    with pytest.raises(RoutesError, match=f"sample 4: .*{CAPTURE_SETTING}"):
        engine.forward_backward(half, weighted_loss)
    assert not engine.chunks[0].buffers[0].grad_data.any()
