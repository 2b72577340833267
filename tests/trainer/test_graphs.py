"""CUDA graphs of the decoder, as far as they go without a GPU; the rest is `python -m tests.gpu.run graphs`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from beam_rl.model.batch import PackedBatch
from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.trainer import graphs
from beam_rl.trainer.engine import EngineConfig, Parallel, Sequence, TrainerEngine
from beam_rl.trainer.sequences import pack, unpack

THETAS = {None, 10_000.0}


def inputs(lengths: tuple[int, ...], **batch: Any) -> graphs._Inputs:
    hidden = torch.randn(sum(lengths), 1, 8)
    return graphs._Inputs.of(hidden, PackedBatch.from_lengths(lengths, **batch), THETAS, head_dim=4)


def test_micro_batches_of_one_shape_share_a_graph_however_their_tokens_are_divided() -> None:
    one, other = inputs((30, 34)), inputs((1, 2, 3, 4, 5, 49))
    assert one.shape == other.shape
    assert [x.shape for x in one.tensors()] == [x.shape for x in other.tensors()]
    routes = torch.zeros(64, 2, 3, dtype=torch.uint8)
    shapes = {
        one.shape,
        inputs((30, 35)).shape,
        inputs((8,) * 8).shape,
        inputs((64,), routes=routes).shape,
        inputs((64,), routes=routes.short()).shape,
        inputs((64,), routes=routes, captured=torch.ones(64, dtype=torch.bool)).shape,
    }
    assert len(shapes) == 6


def test_a_graphs_batch_reads_what_was_copied_to_its_inputs() -> None:
    """Padding starts where the tokens end: sequences without a token."""
    routes = torch.randint(0, 9, (64, 2, 3), dtype=torch.uint8)
    own = inputs((64,), routes=torch.zeros_like(routes)).clone()
    batch = own.batch()
    given = PackedBatch.from_lengths((10, 54), routes=routes)
    new = graphs._Inputs.of(torch.randn(64, 1, 8), given, THETAS, head_dim=4)
    torch._foreach_copy_(list(own.tensors()), list(new.tensors()))
    assert batch.cu_seqlens_q.tolist() == [0, 10, 64, 64, 64, 64, 64, 64]
    assert torch.equal(batch.stretch(), given.stretch())
    for own_part, part in zip(batch.rope(10_000.0, 4), given.rope(10_000.0, 4), strict=True):
        assert torch.equal(own_part, part)
    replayed = batch.layer_routes(1)
    assert replayed is not None
    assert torch.equal(replayed[0], routes[:, 1])


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig()}], ids=["bf16", "lora"])
def test_stand_ins_get_the_parameters_gradients_and_leave_nothing_behind(
    settings: dict[str, Any], engine_for: Callable[..., TrainerEngine]
) -> None:
    """Gradients of parameters that were used before would go to the stream of that use, which a capture forbids."""
    engine = engine_for(**settings)
    decoder = engine.models[0].decoder
    before = dict(decoder.named_parameters())
    wanted = [parameter for parameter in before.values() if parameter.requires_grad]
    hidden = torch.randn(24, 1, engine.hf.hidden_size, requires_grad=True)

    def gradients(leaves: list[Tensor]) -> list[Tensor | None]:
        out = decoder(hidden, None, packed_seq_params=PackedBatch.from_lengths((10, 14)))
        return list(torch.autograd.grad(out.square().sum(), leaves, allow_unused=True))

    expected = gradients(wanted)
    with graphs._stand_ins(decoder) as leaves:
        assert all(
            leaves[parameter] is now for parameter, now in zip(before.values(), decoder.parameters(), strict=True)
        )
        found = gradients([leaves[parameter] for parameter in wanted])
        assert not any(
            grad is not None
            for grad in torch.autograd.grad(
                decoder(hidden, None, packed_seq_params=PackedBatch.from_lengths((24,))).sum(),
                wanted,
                allow_unused=True,
            )
        )
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert all(now is before[name] for name, now in decoder.named_parameters())


class Rerun(graphs._Graph):
    """Runs the passes anew instead of replaying them: everything but the capture."""

    def __init__(
        self, run: Callable[..., Tensor], given: graphs._Inputs, decoder: torch.nn.Module, buffers: Any, _: Any
    ) -> None:
        self._run, self._buffers, self._decoder = run, buffers, decoder
        self._parameters = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        self._inputs = given.clone()
        self._inputs.hidden.requires_grad_()
        self._out_grad, self._first = torch.empty_like(given.hidden), torch.zeros(1, dtype=torch.int32)
        self._out = torch.empty_like(given.hidden)
        self._forward, self._backward = SimpleNamespace(replay=lambda: None), SimpleNamespace(replay=self.rerun)

    def forward(self, given: graphs._Inputs) -> Tensor:
        super().forward(given)
        self._whole = self._forward_pass()
        return self._whole.detach()

    def _forward_pass(self) -> Tensor:
        """As a graph's, but for attention, which here must know the lengths."""
        own, lengths = self._inputs, self._inputs.starts.diff()
        batch = PackedBatch.from_lengths(lengths[lengths > 0].tolist(), routes=own.routes, captured=own.captured)
        batch.place(own.positions)
        with torch.enable_grad():
            return self._run(own.hidden, None, packed_seq_params=batch)

    def rerun(self) -> None:
        with self._buffers.captured(self._first):
            self._hidden_grad = self._backward_pass(self._whole, {p: p for p in self._parameters})


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig()}], ids=["bf16", "lora"])
@pytest.mark.parametrize("routes", ["own", "replayed", "missing"])
def test_steps_of_graphs_and_of_other_micro_batches_have_the_gradients_of_none(
    routes: str,
    settings: dict[str, Any],
    engine_for: Callable[..., TrainerEngine],
    samples: list[Sequence],
    weighted_loss: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for(micro_batch_tokens=48, **settings)
    if routes != "own":
        known = engine.score(samples, replay=False, routes=True).routes
        assert known is not None
        for sample, each in zip(samples, known, strict=True):
            sample.routes = each.to(torch.uint8)
            sample.captured = torch.arange(len(each)) % 3 > 0 if routes == "missing" else None
    trained = [(name, p) for name, p in engine.models[0].named_parameters() if p.requires_grad]

    def gradients() -> dict[str, Tensor]:
        engine.forward_backward(samples, weighted_loss, replay=routes != "own")
        found = {name: parameter.main_grad.clone() for name, parameter in trained}
        engine.zero_grad()
        return found

    expected = gradients()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "_Graph", Rerun)
    engine._graphs = graphs.DecoderGraphs(engine.chunks[0], 32)
    for _ in range(3):  # none, some, all
        for name, grad in gradients().items():
            error = float((grad - expected[name]).norm() / (expected[name].norm() + 1e-12))
            assert error < 1e-5, f"{name} is off by {error:.1e} of its norm"
    assert len(engine._graphs._graphs) == len(engine._graphs._seen) > 1


def test_padding_to_a_multiple_is_a_sequence_of_its_own(samples: list[Sequence]) -> None:
    batch = pack(samples, range(len(samples)), multiple=128)
    assert batch.total == 256
    assert batch.batch.lengths == (*(len(sample.tokens) for sample in samples), 256 - 157)
    assert not (batch.rows >= 157).any()
    for tokens, sample in zip(unpack([batch.tokens[0]], [batch], len(samples)), samples, strict=True):
        assert torch.equal(tokens, sample.tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"recompute": "full"},
        {"parallel": Parallel(ep=2)},
        {"mxfp8": Mxfp8Settings()},
        {"lora": LoraConfig(lora_dropout=0.1)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_an_engine_refuses_graphs_where_they_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="cuda_graphs is True: it needs bfloat16"):
        EngineConfig(cuda_graphs=True, **settings)


def test_shapes_that_occur_once_keep_no_other_from_being_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Graph", lambda *_: "captured")
    shapes = [inputs((n,)) for n in range(1, graphs.MOST + 3)]
    bare = graphs.DecoderGraphs.__new__(graphs.DecoderGraphs)
    bare._graphs, bare._seen = {}, set()
    bare._run = bare._decoder = bare._buffers = bare._pool = bare._stream = None  # type: ignore[assignment]
    assert not any(bare._graph(shape) for shape in shapes)
    found = [bare._graph(shape) for shape in reversed(shapes)]
    assert found == ["captured"] * graphs.MOST + [None] * 2


def test_heads_that_flash_attention_does_not_take_are_refused() -> None:
    """The batch of a graph has no plan for any other attention."""
    with pytest.raises(BadInput, match="head_dim is 36"):
        graphs.uses_graphs(EngineConfig(cuda_graphs=True), BeamConfig(head_dim=36))


@pytest.mark.parametrize(
    ("settings", "head_dim", "gpu", "expected"),
    [
        ({}, 128, True, True),
        ({"lora": LoraConfig()}, 128, True, True),
        ({"cuda_graphs": False}, 128, True, False),
        ({}, 128, False, False),
        ({}, 36, True, False),
        ({"recompute": "full"}, 128, True, False),
        ({"parallel": Parallel(ep=2)}, 128, True, False),
        ({"mxfp8": Mxfp8Settings()}, 128, True, False),
    ],
    ids=str,
)
def test_graphs_are_used_where_they_can_be(
    settings: dict[str, Any], head_dim: int, gpu: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert graphs.uses_graphs(EngineConfig(**settings), BeamConfig(head_dim=head_dim)) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_refuses_graphs_without_a_gpu(engine_for: Callable[..., TrainerEngine]) -> None:
    with pytest.raises(BadInput, match="there is no GPU"):
        engine_for(dtype="bfloat16", cuda_graphs=True)
