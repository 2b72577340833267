"""Grades responses to problems with one final answer, for training rewards and for evaluation alike.

Integers are compared as integers, in the calling thread, without a subprocess. Anything else falls back to math-verify
in processes that can be killed (`evals.symbolic`), so grading works on any thread, in a Ray actor and under any signal
setting, and one pathological answer costs at most its own timeout.
"""

import atexit
import os
from enum import StrEnum

from beam_rl.evals import answers
from beam_rl.evals.symbolic import SymbolicPool


class Verdict(StrEnum):
    """What became of one response."""

    correct = "correct"
    wrong = "wrong"
    no_answer = "no_answer"
    """The response ended without a final answer in a box."""
    truncated = "truncated"
    """The response ran into its length limit before it gave an answer."""
    timeout = "timeout"
    """The symbolic comparison did not finish: neither right nor wrong."""


class Grader:
    """A grader with its own bounds on symbolic comparison; `grade` below shares one a process."""

    def __init__(self, *, workers: int | None = None, timeout: float = 5.0) -> None:
        """`workers`: processes at most (default: the cores this process may use); `timeout`: seconds an answer."""
        self._symbolic = SymbolicPool(workers or len(os.sched_getaffinity(0)), timeout)

    def grade(self, response: str, answer: str | int, *, truncated: bool = False, symbolic: bool = True) -> Verdict:
        r"""The verdict on a response.

        Args:
            response: the generated text, with or without its reasoning.
            answer: the label; LaTeX or an integer.
            truncated: whether generation stopped at the length limit. An answer boxed before that still counts.
            symbolic: whether a spelling that is not an integer literal may count for an integer (`\boxed{2^{10}}`
                for 1024). Off where writing the unevaluated question into the box would be rewarded.
        """
        given = answers.extract_answer(response)
        if given is None:
            return Verdict.truncated if truncated else Verdict.no_answer
        return self.compare(given, str(answer), symbolic=symbolic)

    def compare(self, given: str, answer: str, *, symbolic: bool = True) -> Verdict:
        """The verdict on an extracted answer: correct, wrong or timeout."""
        expected_integer = answers.integer(answer)
        if expected_integer is not None:
            given_integer = answers.integer(given)
            if given_integer is not None:
                return Verdict.correct if given_integer == expected_integer else Verdict.wrong
            # A decimal fraction is no integer, however near: math-verify would round it to six places.
            if not symbolic or answers.is_decimal(given):
                return Verdict.wrong
        given, answer = answers.clean(given), answers.clean(answer)
        if given == answer:
            return Verdict.correct
        if not symbolic:
            return Verdict.wrong
        outcome = self._symbolic.compare(gold=answer, answer=given)
        return {"equal": Verdict.correct, "different": Verdict.wrong, "timeout": Verdict.timeout}[outcome]

    def close(self) -> None:
        """Ends the grader's processes, if any were started."""
        self._symbolic.close()


_shared = Grader()
atexit.register(lambda: _shared.close())


def grade(response: str, answer: str | int, *, truncated: bool = False, symbolic: bool = True) -> Verdict:
    """`Grader.grade` of the grader that this process shares."""
    return _shared.grade(response, answer, truncated=truncated, symbolic=symbolic)


def _renew() -> None:
    global _shared
    _shared = Grader()  # a fork must not talk to its parent's processes


os.register_at_fork(after_in_child=_renew)
