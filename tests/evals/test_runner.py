"""Drawing samples: what a server does wrong costs time, and never a verdict."""

import collections
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from beam_rl.evals import runner, sources
from beam_rl.evals.endpoint import Retry
from beam_rl.evals.results import Results, read
from beam_rl.evals.runner import ServerLost
from beam_rl.model.errors import BadInput


def counts(results: Results) -> dict[str, int]:
    return results.summary.verdicts


FAULTS = {
    "HTTP 500": lambda say: (500, {"error": {"message": "out of memory"}}),
    "HTTP 429": lambda say: (429, {"error": "slow down"}, {"retry-after": "0.01"}),
    "HTTP 503 with a date": lambda say: (503, b"", {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}),
    "closed": lambda say: "close",
    "cut short": lambda say: "cut",
    "no choice": lambda say: {"choices": []},
    "null choices": lambda say: {"choices": None, "error": "x"},
    "no message": lambda say: {"choices": [{"finish_reason": "stop"}]},
    "empty": lambda say: say(None, tokens=0),
    "aborted": lambda say: say(r"\boxed{77}", finish="abort"),
    "unfinished": lambda say: say(r"\boxed{77}", finish=None),
    "odd finish": lambda say: say(r"\boxed{77}", finish=["stop"]),
    "not JSON": lambda say: (200, b"<html>bad gateway</html>"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_asked_again_and_changes_no_verdict(
    fault: str, server: Any, evaluate: Any, right: Any, say: Any
) -> None:
    seen: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()

    def answer(body: Any) -> Any:
        with lock:
            seen[body["messages"][-1]["content"]] += 1
            first = seen[body["messages"][-1]["content"]] <= 2
        return FAULTS[fault](say) if first else right(body)

    server.answer = answer
    results = evaluate()
    assert counts(results) == {"correct": 20}
    assert (results.status, results.summary.avg, results.warnings) == ("complete", 1.0, [])
    assert sum(one.attempts for one in results.samples) == len(server.requests) == 40


@pytest.mark.parametrize("fault", ["HTTP 500", "closed", "no choice", "aborted"])
def test_a_lasting_fault_is_an_error_and_not_a_wrong_answer(
    fault: str, server: Any, evaluate: Any, retry: Retry, right: Any, say: Any
) -> None:
    server.answer = lambda body: FAULTS[fault](say) if body["messages"][-1]["content"].endswith("m 3") else right(body)
    results = evaluate()
    assert counts(results) == {"correct": 18, "error": 2}
    assert (results.status, results.summary.avg) == ("incomplete", 1.0), "what was not answered is not wrong"
    assert (results.summary.pass_k, results.summary.maj_k) == (None, None)
    assert results.problems[3].avg is None
    failed = [one for one in results.samples if one.is_error]
    assert all(one.attempts == retry.attempts and one.error for one in failed)
    assert any("2 samples ended in an error" in warning for warning in results.warnings)

    server.requests.clear()
    server.answer = right
    results = evaluate()
    assert (counts(results), results.status) == ({"correct": 20}, "complete")
    assert [text.split()[-1] for text in server.asked()] == ["3", "3"], "only what failed is drawn again"


def test_a_request_that_hangs_is_given_up_and_keeps_nobody_else(server: Any, evaluate: Any, right: Any) -> None:
    server.answer = lambda body: "hang" if body["messages"][-1]["content"].endswith("m 3") else right(body)
    results = evaluate(timeout=3.0)
    assert counts(results) == {"correct": 18, "error": 2}
    assert "no response within 3 s" in next(one.error for one in results.samples if one.is_error)


def test_a_server_that_dies_keeps_what_was_done_and_the_rest_follows(
    server: Any, evaluate: Any, right: Any, tmp_path: Path
) -> None:
    def dying(body: Any) -> Any:
        if len(server.requests) > 12:
            server.stop()  # before anybody can ask again
            return "close"
        return right(body)

    server.answer = dying
    with pytest.raises(ServerLost, match="does not answer"):
        evaluate()
    kept = read(tmp_path / "out")
    assert kept.status == "incomplete"
    assert counts(kept).get("correct", 0) >= 8
    assert "error" not in counts(kept), "a server's death is no sample's fault"
    with pytest.raises(ServerLost, match="does not answer"):
        evaluate()

    server.answer = right
    server.requests.clear()
    server.start()
    results = evaluate()
    assert (counts(results), results.status) == ({"correct": 20}, "complete")
    assert len(server.requests) == 20 - counts(kept)["correct"]
    first = {(one.problem, one.sample): one for one in kept.samples}
    assert all(first.get((one.problem, one.sample), one) == one for one in results.samples)


def test_no_more_requests_at_a_time_than_allowed(server: Any, evaluate: Any, right: Any) -> None:
    server.answer = lambda body: time.sleep(0.3) or right(body)
    evaluate(concurrency=3)
    assert 2 <= server.most <= 3


@pytest.mark.parametrize(("status", "said"), [(400, "refuses"), (401, "refuses"), (404, "refuses"), (422, "refuses")])
def test_a_server_that_refuses_everything_ends_the_run_at_once(
    status: int, said: str, server: Any, evaluate: Any
) -> None:
    server.answer = lambda body: (status, {"error": {"message": "no such parameter"}})
    with pytest.raises(BadInput, match=f"{said}.*{status}.*no such parameter"):
        evaluate()
    assert len(server.requests) <= 4


def test_a_prompt_that_is_too_long_is_an_error_of_its_own(server: Any, evaluate: Any, right: Any) -> None:
    def answer(body: Any) -> Any:
        too_long = body["messages"][-1]["content"].endswith("m 9")
        return (400, {"error": {"message": "too many tokens"}}) if too_long else right(body)

    server.answer = answer
    results = evaluate()
    assert counts(results) == {"correct": 18, "error": 2}
    assert all(one.attempts == 1 for one in results.samples if one.is_error), "it would fail again"


def test_truncated_is_told_from_wrong_and_from_no_answer(server: Any, evaluate: Any, say: Any) -> None:
    answers = [
        say("so far", finish="length"),
        say(r"\boxed{1} and then", finish="length"),
        say("I give up"),
        say(None, reasoning=r"\boxed{3}"),
        say(r"<think>\boxed{4}</think>"),
        say(r"\boxed{5}", reasoning=r"\boxed{6}"),
        say(r"\boxed{99}"),
        say(""),
        say(None, finish="length", reasoning_content="hm"),
        say([{"type": "text", "text": r"\boxed{"}, {"type": "text", "text": "9} \ud800"}]),
    ]
    server.answer = lambda body: answers[int(body["messages"][-1]["content"].split()[-1])]
    results = evaluate(samples=1)
    verdicts = [str(one.verdict) for one in results.samples]
    assert verdicts == [
        *("truncated", "correct", "no_answer", "no_answer", "no_answer"),
        *("correct", "wrong", "no_answer", "truncated", "correct"),
    ]
    assert results.summary.truncated_share == 0.3
    assert results.summary.no_answer_share == 0.4
    assert results.summary.avg == 0.3


def test_avg_is_what_counting_the_file_by_hand_gives(
    server: Any, evaluate: Any, right: Any, say: Any, tmp_path: Path
) -> None:
    turn = iter(range(1000))
    server.answer = lambda body: right(body) if next(turn) % 3 else say(r"\boxed{1000}", tokens=11)
    evaluate(samples=4)
    file = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (file["schema"], file["version"]) == ("beam-rl-eval", 1)
    assert len(file["samples"]) == 40
    by_hand = sum(one["verdict"] == "correct" for one in file["samples"]) / 40
    assert file["summary"]["avg"] == pytest.approx(by_hand)
    assert 0 < by_hand < 1
    tokens = [one["tokens"] for one in file["samples"]]
    assert file["summary"]["tokens"] == sum(tokens)
    assert [row["id"] for row in file["problems"]] == [f"ten-{index}" for index in range(10)]


def test_settings_reach_the_server_and_the_key_stays_out_of_the_folder(
    server: Any, evaluate: Any, tmp_path: Path
) -> None:
    settings = {"reasoning_effort": "minimal", "temperature": 0.5, "top_p": 0.25, "max_tokens": 33}
    evaluate(**settings, api_key="s3cret", prompt="Q {problem}")
    assert len(server.requests) == 20
    for body in server.requests:
        assert (body["model"], body["reasoning_effort"]) == ("m", "minimal")
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.5, 0.25, 33)
        assert "seed" not in body
        assert [message["role"] for message in body["messages"]] == ["user"]
    assert collections.Counter(server.asked()) == {f"Q problem {index}": 2 for index in range(10)}
    assert server.keys == {"Bearer s3cret"}
    assert not any("s3cret" in path.read_text() for path in (tmp_path / "out").iterdir() if path.is_file())


def test_every_sample_has_its_own_seed_which_a_restart_keeps(server: Any, evaluate: Any, right: Any) -> None:
    evaluate(seed=1)
    seeds = {body["seed"] for body in server.requests}
    assert len(seeds) == 20, "with one seed for all, the samples of a problem would be one sample"
    assert all(0 <= seed < 2**31 for seed in seeds)
    problem = runner.seed_of(1, sources.problems([{"problem": "problem 0", "answer": 0}], "x")[0], 1)
    assert problem in seeds


def test_weights_that_change_during_the_run_are_flagged(server: Any, evaluate: Any, right: Any) -> None:
    server.weights = "7"

    def answer(body: Any) -> Any:
        if len(server.requests) > 10:
            server.weights = "8"
        return right(body)

    server.answer = answer
    results = evaluate()
    assert results.model.weight_versions == ["7", "8"]
    assert any("weights changed" in warning for warning in results.warnings)
    server.weights = "8"
    assert any("weights changed" in warning for warning in evaluate().warnings), "also when nothing is left to draw"


def test_a_server_without_weight_versions_raises_no_flag(evaluate: Any) -> None:
    assert evaluate().model.weight_versions == []


def test_several_models_need_a_choice(server: Any, evaluate: Any) -> None:
    server.models = ["a", "b"]
    with pytest.raises(BadInput, match="--served-model"):
        evaluate()


def test_a_limit_beyond_the_context_is_refused_before_anything_is_drawn(server: Any, evaluate: Any) -> None:
    with pytest.raises(BadInput, match="--max-tokens 4096"):
        evaluate(max_tokens=4096)
    assert server.requests == []


def test_odd_numbers_from_a_server_are_unknown_numbers(server: Any, evaluate: Any, right: Any) -> None:
    server.entry = {"max_model_len": "long", "root": 7}
    server.answer = lambda body: right(body) | {"usage": {"completion_tokens": "many", "prompt_tokens": 1.5}}
    results = evaluate()
    assert counts(results) == {"correct": 20}
    assert (results.model.context, results.summary.tokens_mean) == (None, None)
    assert any("does not tell how many tokens" in warning for warning in results.warnings)
