r"""A task: problems with one final answer each, the prompt they are asked with, and how a response is graded.

The same object serves `beam-rl eval` and the evaluation in training.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from beam_rl.evals import answers
from beam_rl.evals.arithmetic import ENV_CLASS
from beam_rl.evals.grader import Grader, Verdict, grade

PLACE = "{problem}"
"""Where a prompt holds the problem's text."""
METHODS = {True: "symbolic", False: "integer"}
"""`reward_spec.method` by `Problem.symbolic`."""


@dataclass(frozen=True)
class Problem:
    """One question and its answer."""

    id: str
    problem: str
    """The text, as the source has it."""
    answer: str
    """The label: an integer in canonical decimal, else LaTeX."""
    symbolic: bool = True
    r"""Whether `\boxed{2^{10}}` may count for 1024; off where boxing the question itself would be rewarded."""

    @property
    def text_hash(self) -> str:
        """SHA-256 over text and label: tells the problem in another run's results, whatever its id there."""
        return hashlib.sha256(json.dumps([self.problem, self.answer]).encode()).hexdigest()


class Graded(NamedTuple):
    """A verdict and what it was given for."""

    verdict: Verdict
    answer: str | None
    """The final answer in a spelling in which equal answers are equal, for majority votes; None without one."""


@dataclass(frozen=True)
class Task:
    """Problems, and how they are asked."""

    name: str
    source: str
    """Where the problems come from: a file, or a data set on the Hub."""
    problems: tuple[Problem, ...]
    prompt: str = PLACE
    """The user's message, with `{problem}` in the problem's place; there is no system message."""

    @cached_property
    def text_hash(self) -> str:
        """SHA-256 over all texts and labels, in order: equal for two runs only if they used the same set."""
        rows = [[problem.problem, problem.answer] for problem in self.problems]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def first(self, limit: int | None) -> "Task":
        """The task with its first `limit` problems; None keeps all."""
        return self if limit is None else replace(self, problems=self.problems[:limit])

    def message(self, problem: Problem) -> str:
        """What the user says."""
        return self.prompt.replace(PLACE, problem.problem)

    def rows(self) -> list[dict[str, Any]]:
        """The problems as SkyRL's PromptDataset reads them; `from_rows` is the way back."""
        return [
            {
                "data_source": self.name,
                "prompt": [{"role": "user", "content": self.message(problem)}],
                "env_class": ENV_CLASS,
                "reward_spec": {"method": METHODS[problem.symbolic], "ground_truth": problem.answer},
                "extra_info": {"id": problem.id},
            }
            for problem in self.problems
        ]


def from_rows(rows: Sequence[dict[str, Any]], name: str, source: str) -> Task:
    """The task that rows of SkyRL's PromptDataset hold: conversations of any length, labels in `reward_spec`.

    Ids that come twice (rows of several files) get the row's number.
    """
    problems = [problem_of_row(row, index) for index, row in enumerate(rows)]
    times = Counter(problem.id for problem in problems)
    unique = [
        problem if times[problem.id] == 1 else replace(problem, id=f"{problem.id}#{index}")
        for index, problem in enumerate(problems)
    ]
    return Task(name, source, tuple(unique))


def problem_of_row(row: dict[str, Any], index: int) -> Problem:
    """The problem in a row of SkyRL's PromptDataset; its text is the user's only message, or the whole conversation."""
    turns, reward = row["prompt"], row["reward_spec"]
    single = len(turns) == 1 and turns[0]["role"] == "user"
    return Problem(
        id=str((row.get("extra_info") or {}).get("id", index)),
        problem=turns[0]["content"] if single else json.dumps(turns, ensure_ascii=False),
        answer=label(reward["ground_truth"]),
        symbolic=reward.get("method") != METHODS[False],
    )


def label(answer: Any) -> str:
    r"""A label in canonical spelling: `336^\circ` and `0336` become `336`; LaTeX that is no integer stays."""
    text = str(answer).strip()
    return answers.integer(text) or text


def grade_response(problem: Problem, response: str, truncated: bool = False, grader: Grader | None = None) -> Graded:
    """The verdict on a response to a problem.

    Args:
        problem: the problem asked.
        response: the text after its reasoning, or with it in `<think>` tags.
        truncated: whether generation stopped at the length limit.
        grader: None takes the grader that the process shares, which training rewards use, too.
    """
    ask = grade if grader is None else grader.grade
    verdict = ask(response, problem.answer, truncated=truncated, symbolic=problem.symbolic)
    return Graded(verdict, vote(problem, answers.extract_answer(response), verdict))


def vote(problem: Problem, given: str | None, verdict: Verdict) -> str | None:
    """An extracted answer as it counts in a majority vote: right answers are one answer, however they are spelled."""
    if given is None:
        return None
    return problem.answer if verdict is Verdict.correct else answers.integer(given) or answers.clean(given)
