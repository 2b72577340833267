"""The tiny task: short integer arithmetic that a model of a few million parameters can learn on a laptop.

Problems are sums, differences and products of two or three terms (`12+7-5=?`, `3*14+6=?`), drawn from a seed. No
held-out problem is in the training set, not even rewritten by commutation: `6+14*3` counts as `3*14+6`.
"""

import json
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from beam_rl.model.errors import BadInput

ENV_CLASS = "beam_math"
HELD_OUT_MINIMUM = 64
"""Below this the standard error of avg@8 hides any learning (it is about 5 points at 64 problems)."""

_DRAWS_WITHOUT_NEW_PROBLEM = 10_000


@dataclass(frozen=True)
class ArithmeticSpec:
    """How hard the problems are."""

    max_operand: dict[str, int] = field(default_factory=lambda: {"+": 50, "-": 50, "*": 12})
    """Largest operand of each operator in use, inclusive; leave an operator out to do without it. A number between two
    operators respects both bounds."""
    min_operand: int = 2
    """Smallest operand: 0 and 1 would give trivial products."""
    three_term_share: float = 0.5
    """Share of problems with three terms (at most one of the two operators is a product)."""

    def __post_init__(self) -> None:
        unknown = set(self.max_operand) - set("+-*")
        if unknown or not self.max_operand:
            raise BadInput(f"max_operand names the operators {sorted(self.max_operand)}: use one or more of + - *")
        for operator, largest in self.max_operand.items():
            if not 0 <= self.min_operand <= largest:
                raise BadInput(
                    f"max_operand[{operator!r}] is {largest}: give at least min_operand ({self.min_operand})"
                )
        if not 0.0 <= self.three_term_share <= 1.0:
            raise BadInput(f"three_term_share is {self.three_term_share}: give a share between 0 and 1")
        if self.three_term_share > 0 and set(self.max_operand) == {"*"}:
            raise BadInput("three_term_share needs + or -: a problem has at most one product")


@dataclass(frozen=True)
class Problem:
    """One question and its answer."""

    id: str
    problem: str
    """As the user asks it: `12+7-5=?`."""
    answer: str
    """The integer, in plain decimal."""


class Split(NamedTuple):
    """Training and held-out problems; no problem is in both."""

    train: list[Problem]
    held_out: list[Problem]


def generate(seed: int, train: int, held_out: int, spec: ArithmeticSpec | None = None) -> Split:
    """Draws `train` + `held_out` distinct problems; the same arguments give the same problems in every process.

    A kind of problem that runs out (there are few small products) is made up for by the others. The held-out problems
    depend on the seed and the spec alone: changing the size of the training set leaves them.

    Raises:
        BadInput: a size is too small, or the spec holds fewer distinct problems than asked for.
    """
    spec = spec or ArithmeticSpec()
    if train < 1:
        raise BadInput(f"{train} training problems: ask for at least 1")
    if held_out < HELD_OUT_MINIMUM:
        raise BadInput(f"{held_out} held-out problems: ask for at least {HELD_OUT_MINIMUM}")
    rng = random.Random(seed)
    seen: set[tuple[tuple[int, tuple[int, ...]], ...]] = set()
    problems: list[Problem] = []
    repeats = 0
    while len(problems) < train + held_out:
        numbers, operators = _draw(rng, spec)
        key = canonical(numbers, operators)
        if key in seen:
            repeats += 1
            if repeats > _DRAWS_WITHOUT_NEW_PROBLEM:
                raise BadInput(
                    f"the arithmetic task holds only about {len(problems)} distinct problems, {train + held_out} are "
                    "asked for: raise max_operand or three_term_share, or ask for fewer"
                )
            continue
        repeats = 0
        seen.add(key)
        index = len(problems)
        name = f"arithmetic-held-out-{index}" if index < held_out else f"arithmetic-train-{index - held_out}"
        problems.append(Problem(name, f"{_write(numbers, operators)}=?", str(_value(key))))
    return Split(train=problems[held_out:], held_out=problems[:held_out])


def solution(problem: Problem) -> str:
    r"""The supervised target: one reduction step where there are three terms, then the boxed answer.

    `12+7=?` → `\boxed{19}`; `12+7-5=?` → `19-5=\boxed{14}`; `6+3*14=?` → `6+42=\boxed{48}`.
    """
    numbers, operators = parse(problem.problem)
    boxed = f"\\boxed{{{problem.answer}}}"
    if len(operators) == 1:
        return boxed
    first = operators.index("*") if "*" in operators else 0
    reduced = _value(canonical(numbers[first : first + 2], operators[first : first + 1]))
    numbers[first : first + 2] = [reduced]
    del operators[first]
    return f"{_write(numbers, operators)}={boxed}"


def parse(text: str) -> tuple[list[int], list[str]]:
    """`12+7-5=?` → ([12, 7, 5], ["+", "-"])."""
    expression = text.removesuffix("=?")
    operators = [character for character in expression if character in "+-*"]
    for operator in "-*":
        expression = expression.replace(operator, "+")
    return [int(number) for number in expression.split("+")], operators


def canonical(numbers: list[int], operators: list[str]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The expression as a sorted sum of signed products, equal for expressions that differ by commutation alone."""
    terms: list[tuple[int, list[int]]] = [(1, [numbers[0]])]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1][1].append(number)
        else:
            terms.append((1 if operator == "+" else -1, [number]))
    return tuple(sorted((sign, tuple(sorted(factors))) for sign, factors in terms))


def row(problem: Problem) -> dict[str, Any]:
    """The problem as SkyRL's PromptDataset reads it; `method: integer` makes an unevaluated expression wrong."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": problem.problem}],
        "env_class": ENV_CLASS,
        "reward_spec": {"method": "integer", "ground_truth": problem.answer},
        "extra_info": {"id": problem.id},
    }


def write_rows(path: Path, problems: Iterable[Problem]) -> None:
    """Writes one JSON row a line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text("".join(f"{json.dumps(row(problem))}\n" for problem in problems), encoding="utf-8")
    partial.replace(path)


def _draw(rng: random.Random, spec: ArithmeticSpec) -> tuple[list[int], list[str]]:
    usable = sorted(spec.max_operand)  # a dict's order is the recipe's; the problems must not depend on it
    operators = [rng.choice(usable)]
    if rng.random() < spec.three_term_share:
        additive = [operator for operator in usable if operator != "*"]
        operators.append(rng.choice(additive if operators[0] == "*" else usable))
    bounds = [spec.max_operand[operator] for operator in operators]
    largest = [bounds[0], *map(min, bounds, bounds[1:]), bounds[-1]]
    return [rng.randint(spec.min_operand, bound) for bound in largest], operators


def _value(key: tuple[tuple[int, tuple[int, ...]], ...]) -> int:
    total = 0
    for sign, factors in key:
        product = sign
        for factor in factors:
            product *= factor
        total += product
    return total


def _write(numbers: list[int], operators: list[str]) -> str:
    parts = [str(numbers[0])]
    for operator, number in zip(operators, numbers[1:], strict=True):
        parts += [operator, str(number)]
    return "".join(parts)
