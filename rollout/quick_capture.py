"""vLLM's capture of routed experts (R3) with less work for every request and step.

vLLM takes a step's routes apart request by request, in Python, between two steps of the model. While responses are
generated nearly every request brings one token: here their rows are stored together, and the store is told only of
requests for which something is new. Prompts, rejected drafts and everything else are left to vLLM. What is stored and
returned is the same.
"""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector import worker as worker_side
from vllm.distributed.aux_output_connector.connector import (
    AuxOutputConnectorMetadata,
    AuxOutputSchedulerConnector,
    AuxRequestOutput,
)
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput
from vllm.v1.core.sched import scheduler as scheduler_side
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

_USED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (AuxOutputSchedulerConnector, ("build_connector_meta", "take_output")),
    (AuxOutputWorkerConnector, ("_commit_output", "_publish_blocks")),
    (RoutedExpertsBuffer, ("_tail", "capture")),
)


def install(config: VllmConfig) -> None:
    """Let vLLM build these connectors where it would build its own, in this process, if it captures at all. Idempotent.

    Raises:
        RuntimeError: vLLM's connectors have no longer the methods that these stand in for.
    """
    if not config.aux_output_config.enabled:
        return
    for owner, names in _USED:
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise RuntimeError(
                f"vLLM's {owner.__name__} has no {', '.join(missing)} any more: adapt {__name__}, or turn R3 off "
                "(beam.r3=false)."
            )
    scheduler_side.AuxOutputSchedulerConnector = QuickSchedulerConnector  # type: ignore[misc]
    worker_side.AuxOutputWorkerConnector = QuickWorkerConnector  # type: ignore[misc]


class QuickSchedulerConnector(AuxOutputSchedulerConnector):
    """Tells the worker of requests that are new, or have new block hashes."""

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, requests: dict[str, Request]
    ) -> AuxOutputConnectorMetadata:
        sent, scheduled = self._sent_hash_counts, scheduler_output.num_scheduled_tokens
        news = {
            name: tokens for name, tokens in scheduled.items() if len(requests[name].block_hashes) > sent.get(name, -1)
        }
        # The last two are vLLM 0.33's.
        events = ("_finished_requests", "_retained_hashes", "_released_hashes")
        if not news and len(sent) == len(scheduled) and not any(getattr(self, name, None) for name in events):
            return AuxOutputConnectorMetadata(self._generation, {}, {}, ())
        told = cast(SchedulerOutput, SimpleNamespace(num_scheduled_tokens=news))
        return super().build_connector_meta(told, requests)

    def take_output(self, request: Request, output: dict[str, AuxRequestOutput] | None) -> np.ndarray | None:
        found = None if output is None else output.get(request.request_id)
        if found is not None and found.token_start + len(found.rows) == request.num_tokens - 1:
            return found.rows
        return super().take_output(request, output)


class QuickWorkerConnector(AuxOutputWorkerConnector):
    """Stores the rows of all requests that bring one token at once."""

    def _commit_output(self, pending: PendingAuxOutput) -> dict[str, AuxRequestOutput]:
        buffer, routes = self._buffer, pending.routed_experts
        assert buffer is not None
        assert routes is not None
        assert pending.num_sampled is not None
        assert pending.num_rejected is not None
        bounds = np.asarray(pending.query_start_loc)
        count = len(pending.request_ids)
        one = (np.diff(bounds) == 1) & (pending.num_sampled[:count] > 0) & (pending.num_rejected[:count] == 0)
        size, tails = buffer.block_size, buffer._requests
        outputs: dict[str, AuxRequestOutput] = {}
        batches: list[tuple[Any, list[tuple[int, np.ndarray]]]] = []
        rows: list[int] = []
        slots: list[int] = []
        places: list[int] = []
        rest: list[int] = []
        full: list[tuple[str, Any, Any]] = []
        for index, (name, row, start, is_one) in enumerate(
            zip(
                pending.request_ids,
                bounds[:-1].tolist(),
                np.asarray(pending.token_starts)[:count].tolist(),
                one.tolist(),
                strict=True,
            )
        ):
            state = self._requests[name]
            if not (is_one and state.capture_cursor == start == state.emit_cursor):
                rest.append(index)
                continue
            tail = tails.get(name)
            if tail is None and start % size == 0:
                tail = buffer._tail(name, start)
            if tail is None or tail.block_start + tail.length != start:
                rest.append(index)  # vLLM says what is wrong
                continue
            rows.append(row)
            slots.append(tail.slot)
            places.append(tail.length)
            tail.length += 1
            state.capture_cursor = state.scheduled_cursor = state.emit_cursor = start + 1
            outputs[name] = AuxRequestOutput(start, routes[row : row + 1])
            if tail.length == size:
                full.append((name, state, tail))
            elif state.pending_blocks:
                batches.append((state, []))
        if rows:
            buffer._rows[slots, places] = routes[rows]
        for name, state, tail in full:
            block = buffer._rows[tail.slot]
            del tails[name]
            buffer._owned_slots[id(block)] = tail.slot
            batches.append((state, [(tail.block_start, block)]))
        if batches:
            self._publish_blocks(batches)
        if rest:
            outputs |= super()._commit_output(_part(pending, rest))
        return outputs


def _part(pending: PendingAuxOutput, chosen: list[int]) -> PendingAuxOutput:
    """A step's routes of some of its requests."""
    assert pending.routed_experts is not None
    assert pending.num_sampled is not None
    assert pending.num_rejected is not None
    if len(chosen) == len(pending.request_ids):
        return pending
    bounds = np.asarray(pending.query_start_loc)
    rows = np.concatenate([np.arange(bounds[index], bounds[index + 1]) for index in chosen])
    lengths = np.diff(bounds)[chosen]
    part = PendingAuxOutput(
        connector=pending.connector,
        request_ids=[pending.request_ids[index] for index in chosen],
        token_starts=np.asarray(pending.token_starts)[chosen],
        query_start_loc=np.concatenate(([0], np.cumsum(lengths))),
        routed_experts_gpu=pending.routed_experts_gpu,
    )
    part.routed_experts = pending.routed_experts[rows]
    part.num_sampled = pending.num_sampled[chosen]
    part.num_rejected = pending.num_rejected[chosen]
    return part
