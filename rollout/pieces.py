"""A scheduler that hands a request's tokens over in pieces of `PIECE`, not one at a time.

vLLM sends every new token from the engine's process as soon as it is there: with its log-prob, its rank and its routes
(R3) that is four small arrays a request and step to cut, encode, decode and keep. With hundreds of requests it takes
about as long as the model. Whoever waits for a whole response gains nothing by it, so what its tokens bring is kept
where it arises, and goes out together.

What a caller gets in the end is the same, bit by bit. Token by token as before go requests that stream (`DELTA`) or
take their input in parts, and those with stop strings, which only the other process can find. The first token goes at
once, so that the time to it is measured; so do the last one and all that brings more than tokens. A pause of an engine
in a process of its own sends what is kept before it is complete: `weight_versions` stay true. An abort or an error
loses what is kept of its request: at most `PIECE - 1` tokens, with all that belongs to them. Callers that watch a
growing response (`CUMULATIVE`) see it grow by pieces.
"""

from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from beam_rl.rollout import quick_capture

PIECE = 32
"""Tokens handed over together."""
WIDEST = 64
"""Log-probs a token up to which they are kept; in a step that computes more, everything goes out at once."""
_KEPT = {"request_id", "new_token_ids", "new_logprobs", "routed_experts", "trace_headers"}
"""Fields of an output that are kept, or the same for all outputs of a request."""
_SENT = {"finish_reason", "events", "prefill_stats", "new_sampling_mask", "new_prompt_logprobs_tensors"} | {
    "prompt_token_id_logprobs",
    "num_nans_in_logits",
}
"""Fields that send an output at once."""
_WITH_THE_LAST = {"stop_reason", "kv_transfer_params", "ec_transfer_params", "spec_decode_metrics", "error"}
_OF_OTHER_REQUESTS = {"pooling_output", "mm_cache_miss_hashes"}
if _unknown := set(EngineCoreOutput.__struct_fields__) - _KEPT - _SENT - _WITH_THE_LAST - _OF_OTHER_REQUESTS:
    raise RuntimeError(
        f"vLLM's outputs have fields that may not be kept back ({', '.join(sorted(_unknown))}): say in {__name__} what "
        "becomes of them, or leave scheduler_cls to vLLM."
    )


def scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """vLLM's `scheduler_cls`: the scheduler in pieces that suits a configuration."""
    quick_capture.install(vllm_config)
    chosen = AsyncPieceScheduler if vllm_config.scheduler_config.async_scheduling else PieceScheduler
    return chosen(vllm_config=vllm_config, **arguments)


class _Piece:
    """What a request has generated since it last handed something over."""

    __slots__ = ("client", "columns", "ids", "logprobs", "ranks", "routes", "tokens")

    def __init__(self, request: Request) -> None:
        assert request.sampling_params is not None
        wanted = request.sampling_params.num_logprobs
        self.client = request.client_index
        self.columns = 0 if wanted is None else wanted + 1
        self.tokens: list[int] = []
        self.ids: list[int] = []  # [tokens * columns], and so are the log-probs
        self.logprobs: list[float] = []
        self.ranks: list[int] = []  # [tokens]
        self.routes: list[np.ndarray] = []  # of [new tokens, layers, topk]

    def add(self, output: EngineCoreOutput) -> None:
        """Keep an output's tokens and routes."""
        self.tokens += output.new_token_ids
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)

    def take(self, request_id: str, types: LogprobsLists | None) -> EngineCoreOutput:
        """Everything kept, as one output; the arrays have the types of those that they came from."""
        output = EngineCoreOutput(request_id, self.tokens)
        if self.ranks:
            assert types is not None
            output.new_logprobs = LogprobsLists(
                np.array(self.ids, types.logprob_token_ids.dtype).reshape(-1, self.columns),
                np.array(self.logprobs, types.logprobs.dtype).reshape(-1, self.columns),
                np.array(self.ranks, types.sampled_token_ranks.dtype),
            )
        if self.routes:
            output.routed_experts = np.concatenate(self.routes)
        self.tokens, self.ids, self.logprobs, self.ranks, self.routes = [], [], [], [], []
        return output


class _Scores:
    """A step's log-probs as flat lists, which are cut much faster than arrays."""

    def __init__(self, lists: LogprobsLists, index: dict[str, int]) -> None:
        self.lists = lists
        self.index = index
        self.starts = lists.cu_num_generated_tokens
        self.columns = lists.logprobs.shape[1]
        self.ids: list[int] = lists.logprob_token_ids.ravel().tolist()
        self.logprobs: list[float] = lists.logprobs.ravel().tolist()
        self.ranks: list[int] = lists.sampled_token_ranks.tolist()

    def add(self, piece: _Piece, request_id: str, tokens: int) -> None:
        """Add a request's first `tokens` rows to what is kept of it, without the columns of other requests."""
        row = self.index[request_id]
        start = row if self.starts is None else self.starts[row]
        piece.ranks += self.ranks[start : start + tokens]
        width = self.columns
        first, end = start * width, (start + tokens) * width
        if piece.columns == width:
            piece.ids += self.ids[first:end]
            piece.logprobs += self.logprobs[first:end]
            return
        for place in range(first, end, width):
            piece.ids += self.ids[place : place + piece.columns]
            piece.logprobs += self.logprobs[place : place + piece.columns]


class _InPieces(Scheduler):
    """The scheduling is vLLM's; what a step brought is kept, or sent, when vLLM has made its outputs of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: dict[str, _Piece] = {}
        self._singles: dict[str, Request] = {}  # requests that go token by token
        self._types: LogprobsLists | None = None  # the latest arrays, for their types

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            if _in_pieces(request):
                self._pieces[request.request_id] = _Piece(request)
            else:
                self._singles[request.request_id] = request
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._forget(request.request_id)
        return finished

    def has_requests(self) -> bool:
        """Also true while a pause has to wait for what is kept."""
        return super().has_requests() or (self._paused and any(piece.tokens for piece in self._pieces.values()))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        lists = model_runner_output.logprobs
        scores, scored = None, set()
        if lists is not None and lists.logprobs.shape[1] <= WIDEST:
            scores = _Scores(lists, model_runner_output.req_id_to_index)
            self._types = lists._replace(cu_num_generated_tokens=None)
            scored = {name for name, request in self._singles.items() if _scored(request)}
            model_runner_output.logprobs = None  # of which vLLM would cut three arrays for every request
        found = super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = lists
        at_once = self._paused or (lists is not None and scores is None)
        for client in list(found):
            step = found[client]
            sent: list[EngineCoreOutput] = []
            for output in step.outputs:
                name = output.request_id
                piece = self._pieces.get(name)
                fits = scores is None or (piece is not None and piece.columns <= scores.columns)
                if piece is not None and fits and not at_once and _only_tokens(output):
                    if scores is not None and piece.columns:
                        scores.add(piece, name, len(output.new_token_ids))
                    piece.add(output)
                    if len(piece.tokens) >= PIECE:
                        sent.append(piece.take(name, self._types))
                    continue
                if piece is not None and piece.tokens:
                    sent.append(piece.take(name, self._types))
                wanted = piece.columns if piece is not None else name in scored
                if scores is not None and wanted and output.new_token_ids:
                    output.new_logprobs = scores.lists.slice_request(scores.index[name], len(output.new_token_ids))
                sent.append(output)
                if output.finish_reason is not None and (piece is not None or name not in self.requests):
                    self._forget(name)
            step.outputs = sent
            if not sent and step.scheduler_stats is None and step.finished_requests is None:
                del found[client]
        if self._paused:
            self._send_all(found)
        return found

    def _send_all(self, found: dict[int, EngineCoreOutputs]) -> None:
        for name, piece in self._pieces.items():
            if piece.tokens:
                step = found.setdefault(piece.client, EngineCoreOutputs())
                step.outputs = [*step.outputs, piece.take(name, self._types)]

    def _forget(self, request_id: str) -> None:
        self._pieces.pop(request_id, None)
        self._singles.pop(request_id, None)

    @property
    def _paused(self) -> bool:
        return self.pause_state != PauseState.UNPAUSED


class PieceScheduler(_InPieces):
    """In pieces, a step at a time."""


class AsyncPieceScheduler(_InPieces, AsyncScheduler):
    """In pieces, scheduling ahead of the device."""


def _in_pieces(request: Request) -> bool:
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind != RequestOutputKind.DELTA
        and not params.stop
        and not request.resumable
        and (params.num_logprobs is None or 0 <= params.num_logprobs < WIDEST)
    )


def _only_tokens(output: EngineCoreOutput) -> bool:
    return (
        output.finish_reason is None
        and output.events is None
        and output.prefill_stats is None
        and output.new_sampling_mask is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and not output.num_nans_in_logits
    )


def _scored(request: Request) -> bool:
    return request.sampling_params is not None and request.sampling_params.num_logprobs is not None
