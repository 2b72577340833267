"""The decoder's forward and backward passes as CUDA graphs: a micro batch costs a handful of launches, not thousands.

A small model's kernels are shorter than their launches from Python, and then the GPU waits. A graph holds the kernels
of one shape: a number of tokens, to which micro batches are padded, room for a number of sequences, and the kind of
routes. It reads inputs and leaves results in memory of its own, and adds gradients to Megatron's buffers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from beam_rl.model.attention import flash_takes_heads
from beam_rl.model.batch import PackedBatch
from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.trainer.gradients import GradientBuffers
from beam_rl.trainer.settings import EngineConfig

MOST = 32
"""Graphs at a time. They share memory for activations, but each also keeps its inputs and outputs."""


def uses_graphs(config: EngineConfig, hf: BeamConfig) -> bool:
    """Whether an engine of this configuration runs this model as graphs.

    Raises:
        BadInput: it is told to, and cannot: there is no GPU, or FlashAttention does not take the model's heads.
    """
    if config.cuda_graphs is False or not config.may_have_graphs:
        return False
    reason = None
    if not flash_takes_heads(hf.head_dim):
        reason = f"head_dim is {hf.head_dim}, and must be a multiple of 8 up to 256"
    elif not torch.cuda.is_available():
        reason = "there is no GPU"
    if config.cuda_graphs and reason is not None:
        raise BadInput(f"cuda_graphs is True: {reason}")
    return reason is None


class DecoderGraphs:
    """Runs a model's decoder as graphs where gradients are wanted, and as it is elsewhere.

    A shape is captured when it occurs for the second time. Attention is FlashAttention's in a graph, also where cuDNN's
    would compute it elsewhere (one sequence, no window) and round differently. Parameters and gradient buffers must
    stay where they are (`clear` after they were moved), and a backward pass must follow its forward pass before the
    next one.

    Args:
        model: wrapped for training; all of its decoder must be on this rank, and nothing be recomputed.
        multiple: tokens of a shape are a multiple of it; other micro batches run as they are.
    """

    def __init__(self, model: GradientBuffers, multiple: int) -> None:
        decoder = model.module.decoder
        self._buffers, self.multiple, self._run = model, multiple, decoder.forward
        self._decoder = decoder
        attentions = [layer.self_attention for layer in decoder.layers]
        self._thetas = {attention.rope_theta for attention in attentions}
        self._head_dim = attentions[0].hidden_size_per_attention_head
        self._stream = torch.cuda.Stream()  # one for all: PyTorch keeps memory of one stream from captures on another
        self.clear()
        decoder.forward = self._forward

    def clear(self) -> None:
        """Forget all graphs, and free their memory."""
        self._graphs: dict[Any, _Graph] = {}
        self._seen: set[Any] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def _forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedBatch, **kwargs: Any) -> Tensor:
        batch = packed_seq_params
        if torch.is_grad_enabled() and not batch.record and len(hidden_states) % self.multiple == 0:
            inputs = _Inputs.of(hidden_states.detach(), batch, self._thetas, self._head_dim)
            if graph := self._graph(inputs):
                anchor = hidden_states.new_empty(0, requires_grad=True)  # the embedding may be frozen
                return _Replay.apply(hidden_states, anchor, graph, inputs)
        return self._run(hidden_states, *args, packed_seq_params=batch, **kwargs)

    def _graph(self, inputs: _Inputs) -> _Graph | None:
        """The graph for inputs of this shape, if there is one by now."""
        shape = inputs.shape
        graph = self._graphs.get(shape)
        if graph is None and shape in self._seen and len(self._graphs) < MOST:
            memory = self._pool, self._stream
            graph = self._graphs[shape] = _Graph(self._run, inputs, self._decoder, self._buffers, memory)
        self._seen.add(shape)
        return graph


@contextmanager
def _stand_ins(decoder: torch.nn.Module) -> Iterator[dict[Tensor, Tensor]]:
    """Let others with the same memory stand for the parameters: autograd hands the gradients of those that were used
    before to the stream they were used on, which a capture on another one forbids."""
    found: dict[Tensor, Tensor] = {}
    for parameter in decoder.parameters():
        found[parameter] = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        found[parameter].__dict__.update(parameter.__dict__)
    places = [
        (module._parameters, name, parameter)
        for module in decoder.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    for place, name, parameter in places:
        place[name] = found[parameter]  # type: ignore[assignment]
    try:
        yield found
    finally:
        for place, name, parameter in places:
            place[name] = parameter


@dataclass
class _Inputs:
    """What changes from micro batch to micro batch: hidden states, and what attention and router read."""

    hidden: Tensor
    starts: Tensor
    """int32 [sequences + 1], padded with the number of tokens: sequences without a token."""
    positions: dict[float | None, tuple[Tensor, ...]]
    """Cosines and sines by theta of RoPE, and under None the factors of SSMax; those that the layers need."""
    routes: Tensor | None
    captured: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, batch: PackedBatch, thetas: set[float | None], head_dim: int) -> _Inputs:
        count = len(batch.cu_seqlens_q)
        room = max(8, 1 << (count - 1).bit_length())
        starts = torch.nn.functional.pad(batch.cu_seqlens_q, (0, room - count), value=len(hidden))
        positions: dict[float | None, tuple[Tensor, ...]]
        positions = {t: (batch.stretch(),) if t is None else batch.rope(t, head_dim) for t in thetas}
        return cls(hidden, starts, positions, batch.routes, batch.captured)

    @property
    def shape(self) -> Any:
        """Equal for inputs that one graph can take."""
        parts = (self.hidden, self.starts, self.routes, self.captured)
        return tuple(None if x is None else (x.shape, x.dtype) for x in parts)

    def tensors(self) -> Iterator[Tensor]:
        """All of them, in one order."""
        parts = (self.hidden, self.starts, *(x for pair in self.positions.values() for x in pair))
        yield from (x for x in (*parts, self.routes, self.captured) if x is not None)

    def clone(self) -> _Inputs:
        """The same in memory of its own."""
        positions = {theta: tuple(x.clone() for x in pair) for theta, pair in self.positions.items()}
        routes, captured = (None if x is None else x.clone() for x in (self.routes, self.captured))
        return _Inputs(self.hidden.clone(), self.starts.clone(), positions, routes, captured)

    def batch(self) -> PackedBatch:
        """A micro batch that reads these tensors; how its tokens are divided only `starts` knows."""
        tokens, room = len(self.hidden), len(self.starts) - 1
        batch = PackedBatch(
            qkv_format="thd",
            cu_seqlens_q=self.starts,
            cu_seqlens_kv=self.starts,
            max_seqlen_q=tokens,
            max_seqlen_kv=tokens,
            lengths=(tokens,) + (0,) * (room - 1),
            routes=self.routes,
            captured=self.captured,
        )
        batch.place(self.positions)
        return batch


class _Graph:
    """Forward and backward pass for one shape of inputs."""

    def __init__(
        self,
        run: Callable[..., Tensor],
        inputs: _Inputs,
        decoder: torch.nn.Module,
        buffers: GradientBuffers,
        memory: tuple[Any, torch.cuda.Stream],
    ) -> None:
        self._run, self._buffers = run, buffers
        self._parameters = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        self._inputs = inputs.clone()
        self._inputs.hidden.requires_grad_()
        self._out_grad = torch.zeros_like(inputs.hidden)
        self._first = torch.zeros(1, dtype=torch.int32, device=inputs.hidden.device)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool, side = memory
        side.wait_stream(torch.cuda.current_stream())
        capture = partial(torch.cuda.graph, pool=pool, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(side), buffers.captured(self._first), _stand_ins(decoder) as leaves:
            self._backward_pass(self._forward_pass(), leaves)  # loads every kernel; a gradient of 0 changes no sum
            torch.cuda.synchronize()
            with capture(self._forward):
                out = self._forward_pass()
            with capture(self._backward):
                self._hidden_grad = self._backward_pass(out, leaves)
        torch.cuda.current_stream().wait_stream(side)
        self._out = out.detach()

    def _forward_pass(self) -> Tensor:
        with torch.enable_grad():
            return self._run(self._inputs.hidden, None, packed_seq_params=self._inputs.batch())

    def _backward_pass(self, out: Tensor, leaves: dict[Tensor, Tensor]) -> Tensor:
        """Add the parameters' gradients to their sums; returns the inputs'."""
        wanted = [self._inputs.hidden, *(leaves[parameter] for parameter in self._parameters)]
        hidden_grad, *grads = torch.autograd.grad(out, wanted, self._out_grad, allow_unused=True)
        for parameter, grad in zip(self._parameters, grads, strict=True):
            if grad is not None:  # or whoever computed it has added it
                self._buffers.add(parameter, grad)
        return hidden_grad

    def forward(self, inputs: _Inputs) -> Tensor:
        """The decoder's output, in memory that the next call overwrites."""
        torch._foreach_copy_(list(self._inputs.tensors()), list(inputs.tensors()))
        self._forward.replay()
        return self._out.detach()

    def backward(self, out_grad: Tensor) -> Tensor:
        """The gradient of the last call's hidden states; the parameters' are added where they belong."""
        self._out_grad.copy_(out_grad)
        self._first.fill_(self._buffers.claim_all(self._parameters))
        self._backward.replay()
        return self._hidden_grad.detach()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, graph: _Graph, inputs: _Inputs) -> Tensor:
        ctx.graph = graph
        return graph.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.graph.backward(grads[0]), None, None, None
