"""Responses that are handed over in pieces are vLLM's own, bit by bit, and nothing is late that must not be."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beam_rl.rollout.profile import engine_init_kwargs


def params(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False} | settings))


def sampled(completion: Any) -> list[tuple[int, float]]:
    """(token, log-prob) pairs of a completion."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, at[token].logprob) for token, at in pairs]


def scheduler(engine: Any) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def vllms_own(engine: Any) -> Iterator[None]:
    """The engine with vLLM's scheduler and capture, for the length of the block."""
    from vllm.v1.core.sched.scheduler import Scheduler

    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    ours = (scheduler(engine), scheduler(engine).aux_output_connector, worker.model_runner._connector)
    classes = [type(each) for each in ours]
    assert [each.__module__ for each in classes] == ["beam_rl.rollout.pieces"] + ["beam_rl.rollout.quick_capture"] * 2
    try:
        for each, stock in zip(ours, (Scheduler, classes[1].__base__, classes[2].__base__), strict=True):
            each.__class__ = stock
        yield
    finally:
        for each, kind in zip(ours, classes, strict=True):
            each.__class__ = kind


def said(output: Any) -> list[Any]:
    """Everything that a caller can read of a request."""
    return [output.prompt_logprobs, output.finished] + [
        (c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason, np.asarray(c.routed_experts))
        for c in output.outputs
    ]


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def answers(engine: Any, prompts: list[list[int]], sampling: list[Any]) -> tuple[list[Any], int]:
    """Outputs of an engine without cached prefixes, and in how many parts they left its scheduler."""
    parts = 0
    update = scheduler(engine).update_from_output

    def counted(*arguments: Any) -> Any:
        nonlocal parts
        found = update(*arguments)
        parts += sum(len(step.outputs) for step in found.values())
        return found

    engine.reset_prefix_cache()
    torch.manual_seed(0)
    scheduler(engine).update_from_output = counted
    try:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return engine.llm.generate(inputs, sampling, use_tqdm=False), parts
    finally:
        del scheduler(engine).update_from_output


def test_responses_are_vllms(engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all lengths around a piece's, with few log-probs, none, and more than are kept, side by side."""
    from beam_rl.rollout import pieces

    monkeypatch.setattr(pieces, "WIDEST", 5)
    short = [prompts[0][:20], prompts[1][:9], prompts[0][30:36], prompts[1][40:77]]
    with vllms_own(engine):
        stop = engine.generate(short[:1], tokens=50)[0].outputs[0].token_ids[40]
    kinds = [
        params(max_tokens=70),
        params(max_tokens=33, n=2, temperature=1.0),
        params(max_tokens=34, logprobs=None),
        params(max_tokens=60, logprobs=3, prompt_logprobs=1),
    ] + [params(max_tokens=tokens) for tokens in (1, 2, 32, 65)]
    stops = [params(max_tokens=60, stop_token_ids=[stop]), params(max_tokens=20, logprobs=7), params(max_tokens=60)]
    # One request's chosen columns narrow a step of vLLM's CPU runner for all; the other then must not be kept.
    narrow = [params(max_tokens=5, logprobs=None, logprob_token_ids=[3]), params(max_tokens=8, logprobs=3)]
    for sampling in (kinds, narrow, stops):
        given = (short * 2)[: len(sampling)]
        with vllms_own(engine):
            expected, tokens = answers(engine, given, sampling)
        found, parts = answers(engine, given, sampling)
        for one, other in zip(found, expected, strict=True):
            for mine, vllms in zip(said(one), said(other), strict=True):
                assert equal(mine, vllms) if isinstance(mine, tuple) else mine == vllms
        assert parts < tokens
    assert expected[0].outputs[0].finish_reason == "stop"


def test_whole_responses_leave_the_engine_in_few_pieces(engine: Any, prompts: list[list[int]]) -> None:
    short = [prompt[:8] for prompt in prompts] * 2
    with vllms_own(engine):
        _, tokens = answers(engine, short, [params(max_tokens=66)] * 4)
    _, parts = answers(engine, short, [params(max_tokens=66)] * 4)
    assert tokens == 4 * 66
    assert parts == 4 * 4, "the first token, twice 32, the last"


def steps(engine: Any, prompt: list[int], sampling: Any, count: int) -> list[Any]:
    """Outputs of the first steps of a request."""
    llm = engine.llm.llm_engine
    llm.add_request("request", {"prompt_token_ids": prompt}, sampling)
    return [output for _ in range(count) for output in llm.step()]


def test_streams_are_not_held_up(engine: Any, prompts: list[list[int]]) -> None:
    from vllm.sampling_params import RequestOutputKind

    engine.reset_prefix_cache()
    expected = engine.logprobs(prompts[:1], tokens=5)[0]
    engine.reset_prefix_cache()
    streamed = steps(engine, prompts[0], params(max_tokens=5, output_kind=RequestOutputKind.DELTA), count=8)
    assert [len(output.outputs[0].token_ids) for output in streamed] == [1] * 5
    assert [pair for output in streamed for pair in sampled(output.outputs[0])] == expected


def test_stop_strings_are_looked_for_in_every_token(engine: Any, prompts: list[list[int]]) -> None:
    from vllm.v1.request import Request

    from beam_rl.rollout.pieces import _in_pieces

    def request(**settings: Any) -> Any:
        return Request("request", prompts[0], params(**settings), None)

    assert _in_pieces(request())
    assert not _in_pieces(request(stop=["\n"], detokenize=True))


def test_a_pause_leaves_nothing_behind(engine: Any, prompts: list[list[int]]) -> None:
    """Else tokens would be told to come from the weights of after the pause."""
    from vllm.v1.core.sched.interface import PauseState

    expected = engine.logprobs(prompts[:1], tokens=20)[0]
    ours = scheduler(engine)
    before = steps(engine, prompts[0], params(max_tokens=20), count=10)
    assert max(len(output.outputs[0].token_ids) for output in before) == 1
    ours.set_pause_state(PauseState.PAUSED_ALL)
    assert ours.has_requests(), "the engine must go on until it has sent what it kept"
    (output,) = engine.llm.llm_engine.step()
    known = len(output.outputs[0].token_ids)
    assert known >= 8
    assert not ours.has_requests()
    ours.set_pause_state(PauseState.UNPAUSED)
    while not output.finished:
        for output in engine.llm.llm_engine.step():
            assert len(output.outputs[0].token_ids) > known or output.finished
    tokens = output.outputs[0].token_ids
    assert list(tokens) == [token for token, _ in expected]


def test_aborted_requests_are_forgotten(engine: Any, prompts: list[list[int]]) -> None:
    steps(engine, prompts[0], params(max_tokens=20), count=5)
    assert list(scheduler(engine)._pieces)
    engine.llm.llm_engine.abort_request(["request"])
    assert not scheduler(engine)._pieces
    assert not scheduler(engine)._singles
    again = engine.logprobs(prompts[:1], tokens=20)[0]
    assert len(again) == 20
    assert not scheduler(engine)._pieces


@pytest.mark.parametrize("columns", [1, 3])
def test_several_tokens_a_step_keep_their_log_probs(columns: int) -> None:
    """As after speculation; the step computed three columns, because another request wants them."""
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request

    from beam_rl.rollout.pieces import _Piece, _Scores

    ids = np.arange(18).reshape(6, 3)
    lists = LogprobsLists(ids, ids.astype(np.float32) / 7, np.arange(6), [0, 3, 4])
    piece = _Piece(Request("a", [1], params(logprobs=columns - 1), None))
    for _ in range(2):
        _Scores(lists, {"a": 1, "b": 0}).add(piece, "a", 1)
        _Scores(lists, {"a": 0, "b": 1}).add(piece, "a", 2)
        piece.tokens += [0, 0, 0]
    found = piece.take("a", lists).new_logprobs
    assert found is not None
    rows = [3, 0, 1] * 2
    for mine, vllms in zip(found[:2], lists[:2], strict=True):
        assert np.array_equal(mine, vllms[rows, :columns])
        assert mine.dtype == vllms.dtype
    assert np.array_equal(found.sampled_token_ranks, lists.sampled_token_ranks[rows])


def test_a_server_pauses_updates_and_aborts(golden: Callable[[str], Path], prompts: list[list[int]]) -> None:
    """Another process runs the engine; requests are SkyRL's, which read the last state of a growing response."""
    asyncio.run(serve(golden("tiny"), prompts[0][:20]))


async def serve(model: Path, prompt: list[int]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_init_kwargs("cpu") | {"kv_cache_memory_bytes": 2**24, "weight_transfer_config": None}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            enable_return_routed_experts=True,
            **arguments,
        )
    )
    seen: dict[str, Any] = {}

    async def ask(name: str) -> Any:
        async for output in engine.generate({"prompt_token_ids": prompt}, params(max_tokens=300), name):
            seen[name] = output
        return seen[name]

    try:
        whole = (await ask("whole")).outputs[0]
        asked = []
        for name in ("first", "second", "third", "fourth"):
            asked.append(asyncio.ensure_future(ask(name)))
            while name not in seen:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await engine.pause_generation(mode="keep", clear_cache=False)
        await asyncio.sleep(0.05)
        known = [len(seen[name].outputs[0].token_ids) for name in ("first", "second", "third")]
        await engine.update_weight_version("new")
        await engine.abort("fourth")
        await engine.resume_generation()
        outputs = [(await task).outputs[0] for task in asked]
    finally:
        engine.shutdown()
    *others, aborted = outputs
    for output, told in zip(others, known, strict=True):
        assert list(output.token_ids) == list(whole.token_ids)
        assert [p for _, p in sampled(output)] == pytest.approx(
            [p for _, p in sampled(whole)], abs=1e-5
        )  # other requests ran beside it
        assert np.array_equal(output.routed_experts, whole.routed_experts)
        assert [(s.version, s.start, s.end) for s in output.weight_versions] == [
            ("default", 0, told),
            ("new", told, 300),
        ]
    assert any(tokens % 32 != 1 for tokens in known), "what was kept was not sent before the pause was complete"
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.logprobs) == len(aborted.routed_experts) - len(prompt) + 1


def test_whatever_sends_an_output_at_once_is_looked_at() -> None:
    """The list of vLLM's fields, and what is asked of every output."""
    from vllm.v1.engine import EngineCoreOutput

    from beam_rl.rollout.pieces import _SENT, _only_tokens

    assert _only_tokens(EngineCoreOutput("a", [1]))
    for name in _SENT:
        output = EngineCoreOutput("a", [1])
        setattr(output, name, 1)
        assert not _only_tokens(output), name
