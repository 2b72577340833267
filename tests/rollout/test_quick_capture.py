"""The quick capture stores and returns the routes that vLLM's does."""

from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from beam_rl.rollout import quick_capture

SHAPE, BLOCK = (3, 2), 4
Step = tuple[list[str], list[int], list[int], list[int], list[int], list[int]]
"""Requests, and of each: first token, tokens, tokens sampled, tokens rejected, blocks whose keys are known."""


def routes(name: str, position: int) -> NDArray[np.uint8]:
    return np.random.default_rng((ord(name), position)).integers(0, 250, SHAPE, np.uint8)


def connector(kind: type) -> Any:
    """A worker's connector without a model."""
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
    from vllm.distributed.aux_output_connector.store import BackgroundBlockObjectStore, BlockObjectStore

    made: Any = object.__new__(kind)
    size = BLOCK * int(np.prod(SHAPE))
    made._store = BackgroundBlockObjectStore(
        BlockObjectStore(max_bytes=256 * size, object_nbytes=size), max_pending_batches=64
    )
    made._buffer = RoutedExpertsBuffer(np.dtype(np.uint8), SHAPE, BLOCK, 8, 64, 2)
    made._requests, made._generation, made._pending_outputs, made._lock = {}, 0, [], Lock()
    made._max_concurrent_batches = 2
    return made


def replay(kind: type, steps: list[Step]) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Outputs of the steps, and the blocks stored by key."""
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, PackedBlockHashes
    from vllm.distributed.aux_output_connector.worker import PendingAuxOutput

    made, told, outputs, stored = connector(kind), dict[str, int](), [], dict[str, bytes]()
    put = made._store.put

    def kept(objects: Any, **rest: Any) -> None:
        stored.update((each.key, each.payload) for each in objects)
        put(objects, **rest)

    made._store.put = kept
    for names, starts, lengths, sampled, rejected, known in steps:
        hashes = {}
        for name, blocks in zip(names, known, strict=True):
            if new := range(told.get(name, 0), blocks):
                hashes[name] = PackedBlockHashes(b"".join(f"{name}{block:03}".encode() for block in new), 4)
                told[name] = blocks
        gone = tuple(name for name in made._requests if name not in names)
        made.begin_step(AuxOutputConnectorMetadata(0, dict.fromkeys(names, 0), hashes, gone))
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        pending = PendingAuxOutput(made, names, np.array(starts), bounds, None)  # type: ignore[arg-type]
        pending.routed_experts = np.stack(
            [routes(n, s + i) for n, s, length in zip(names, starts, lengths, strict=True) for i in range(length)]
        )
        pending.num_sampled, pending.num_rejected = np.array(sampled), np.array(rejected)
        made._pending_outputs.append(pending)
        for name in names:
            made._requests[name].pending_outputs += 1
        outputs.append(made.process_output(pending))
    assert stored
    made.close()
    return outputs, stored


def schedule(seed: int) -> list[Step]:
    """Steps with prompts in chunks, single tokens, drafts of which some are rejected, and requests that end."""
    generator = np.random.default_rng(seed)
    prompts = {name: int(generator.integers(1, 14)) for name in "abcdef"}
    at = dict.fromkeys(prompts, 0)
    steps: list[Step] = []
    while at:
        names = list(at)
        known = [max(at[name], prompts[name]) // BLOCK for name in names]  # a prompt's from the start
        starts, lengths, sampled, rejected = [], [], [], []
        for name in names:
            left = prompts[name] - at[name]
            drafts = int(generator.integers(0, 4)) if left <= 0 and generator.random() < 0.3 else 0
            length = min(left, 5) if left > 0 else 1 + drafts
            lost = int(generator.integers(0, drafts + 1))
            starts.append(at[name])
            lengths.append(length)
            rejected.append(lost)
            sampled.append(int(left <= length) * (length - lost if left <= 0 else 1))
            at[name] += length - lost
        steps.append((names, starts, lengths, sampled, rejected, known))
        at = {name: token for name, token in at.items() if token < 40 + prompts[name]}
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_routes_are_vllms(seed: int) -> None:
    stock = quick_capture.QuickWorkerConnector.__base__
    assert stock is not None
    steps = schedule(seed)
    (expected, stored), (found, blocks) = (replay(k, steps) for k in (stock, quick_capture.QuickWorkerConnector))
    for names, one, other in zip((step[0] for step in steps), found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].token_start == other[name].token_start
            assert np.array_equal(one[name].rows, other[name].rows)
            assert name in names
    assert blocks == stored


def test_single_tokens_are_not_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does for every request and step is done for prompts only."""
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer

    taken: list[Any] = []
    capture = RoutedExpertsBuffer.capture

    def noted(self: Any, name: Any, *rest: Any) -> Any:
        taken.append(name)
        return capture(self, name, *rest)

    monkeypatch.setattr(RoutedExpertsBuffer, "capture", noted)
    steps: list[Step] = [(["a", "b"], [0, 0], [3, 3], [1, 1], [0, 0], [0, 0])]
    steps += [(["a", "b"], [at] * 2, [1, 1], [1, 1], [0, 0], [at // BLOCK] * 2) for at in range(3, 30)]
    outputs, _ = replay(quick_capture.QuickWorkerConnector, steps)
    assert taken == ["a", "b"]
    assert all(np.array_equal(each["b"].rows[0], routes("b", at)) for at, each in enumerate(outputs[1:], 3))


def test_a_step_without_news_tells_the_worker_nothing() -> None:
    """But what is new it does tell: requests, hashes, ends."""
    made: Any = object.__new__(quick_capture.QuickSchedulerConnector)
    made._sent_hash_counts, made._finished_requests, made._generation = {"a": 2}, {}, 7
    requests: Any = {"a": SimpleNamespace(block_hashes=[b"0", b"1"])}
    step: Any = SimpleNamespace(num_scheduled_tokens={"a": 1})
    found = made.build_connector_meta(step, requests)
    assert (found.generation, found.requests, found.block_hashes, found.finished_requests) == (7, {}, {}, ())


def test_another_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = quick_capture.QuickWorkerConnector.__base__
    assert owner is not None
    monkeypatch.delattr(owner, "_commit_output")
    quick_capture.install(config(captures=False))
    with pytest.raises(RuntimeError, match="_commit_output"):
        quick_capture.install(config(captures=True))


def config(*, captures: bool) -> Any:
    """What `install` reads of vLLM's configuration."""
    return SimpleNamespace(aux_output_config=SimpleNamespace(enabled=captures))
