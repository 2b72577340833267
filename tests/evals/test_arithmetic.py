"""The tiny task: reproducible, split without leaks, and its own solutions are right."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from beam_rl.evals.arithmetic import ArithmeticSpec, canonical, generate, parse, row, solution, write_rows
from beam_rl.evals.grader import Verdict, grade
from beam_rl.model.errors import BadInput

SPECS = [
    ArithmeticSpec(),
    ArithmeticSpec(max_operand={"+": 9, "-": 9, "*": 9}, three_term_share=1.0),
    ArithmeticSpec(max_operand={"+": 99, "-": 20}, three_term_share=0.3),
    ArithmeticSpec(max_operand={"*": 99}, min_operand=0, three_term_share=0.0),
]


def _commuted(text: str) -> set[str]:
    """Every way to write the expression with its terms and factors in another order, by brute force."""
    signed: list[tuple[str, str]] = []
    for token in text.removesuffix("=?").replace("-", "+-").split("+"):
        signed.append(("-" if token.startswith("-") else "+", token.lstrip("-")))
    written = set()
    for order in itertools.permutations(signed):
        if order[0][0] == "-":
            continue
        for factors in itertools.product(*(itertools.permutations(term.split("*")) for _, term in order)):
            body = "".join(sign + "*".join(term) for (sign, _), term in zip(order, factors, strict=True))
            written.add(body.removeprefix("+") + "=?")
    return written


@pytest.mark.parametrize("spec", SPECS)
def test_no_held_out_problem_is_in_training_even_commuted(spec: ArithmeticSpec) -> None:
    split = generate(seed=1, train=1000, held_out=256, spec=spec)
    assert (len(split.train), len(split.held_out)) == (1000, 256)
    assert len({problem.id for problem in split.train + split.held_out}) == 1256
    training = {problem.problem for problem in split.train}
    for problem in split.held_out:
        assert not _commuted(problem.problem) & training, problem.problem


@pytest.mark.parametrize("spec", SPECS)
def test_answers_and_supervised_solutions_are_right(spec: ArithmeticSpec) -> None:
    for problem in generate(seed=2, train=500, held_out=64, spec=spec).train:
        expression = problem.problem.removesuffix("=?")
        assert eval(expression) == int(problem.answer), problem
        text = solution(problem)
        assert grade(text, problem.answer, symbolic=False) is Verdict.correct
        working = text.split("\\boxed")[0].removesuffix("=")
        assert not working or eval(working) == int(problem.answer), text
        assert len(text.replace("\\boxed", "B")) <= 16, text


def test_solution_reduces_the_product_first() -> None:
    texts = {
        problem.problem: solution(problem)
        for problem in generate(seed=3, train=2000, held_out=64, spec=ArithmeticSpec(three_term_share=1.0)).train
    }
    for question, text in texts.items():
        numbers, operators = parse(question)
        if operators == ["+", "*"]:
            assert text.startswith(f"{numbers[0]}+{numbers[1] * numbers[2]}=")
            break
    else:
        pytest.fail("no problem of the form a+b*c was drawn")


def test_operands_respect_the_spec() -> None:
    spec = ArithmeticSpec(max_operand={"+": 300, "-": 200, "*": 70}, min_operand=3, three_term_share=0.5)
    split = generate(seed=4, train=3000, held_out=64, spec=spec)
    lengths = []
    for problem in split.train:
        numbers, operators = parse(problem.problem)
        lengths.append(len(numbers))
        for operator, pair in zip(operators, itertools.pairwise(numbers), strict=True):
            assert all(3 <= number <= spec.max_operand[operator] for number in pair)
        assert operators.count("*") <= 1
    assert 0.45 < lengths.count(3) / len(lengths) < 0.6


def test_same_seed_gives_the_same_problems_in_another_process() -> None:
    here = [problem.problem for problem in generate(seed=5, train=200, held_out=64).train]
    script = (
        "import json; from beam_rl.evals.arithmetic import generate; "
        "print(json.dumps([p.problem for p in generate(seed=5, train=200, held_out=64).train]))"
    )
    for hash_seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(there.stdout) == here
    assert here != [problem.problem for problem in generate(seed=6, train=200, held_out=64).train]


def test_held_out_problems_do_not_change_with_the_training_set_or_the_order_of_operators() -> None:
    small = generate(seed=7, train=100, held_out=128)
    large = generate(seed=7, train=900, held_out=128)
    assert small.held_out == large.held_out
    assert large.train[:100] == small.train
    reordered = ArithmeticSpec(max_operand={"*": 12, "-": 50, "+": 50})
    assert generate(seed=7, train=100, held_out=128, spec=reordered) == small


def test_canonical_form_keeps_what_commutation_does_not_reach() -> None:
    def key(text: str) -> object:
        return canonical(*parse(text))

    assert key("3*14+6=?") == key("6+14*3=?")
    assert key("9-4+2=?") == key("2+9-4=?")
    assert key("9-4=?") != key("4-9=?")
    assert key("2*3+4=?") != key("2*4+3=?")


def test_rows_load_in_skyrls_prompt_dataset_format(tmp_path: Path) -> None:
    problems = generate(seed=8, train=10, held_out=64).train
    write_rows(tmp_path / "data" / "train.jsonl", problems)
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert rows == [row(problem) for problem in problems]
    assert rows[0]["prompt"] == [{"role": "user", "content": problems[0].problem}]
    assert rows[0]["env_class"] == "beam_math"
    assert rows[0]["reward_spec"] == {"method": "integer", "ground_truth": problems[0].answer}
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.jsonl"]


def test_asking_for_more_problems_than_there_are_ends_with_a_message() -> None:
    with pytest.raises(BadInput, match="holds only about"):
        generate(seed=1, train=5000, held_out=64, spec=ArithmeticSpec(max_operand={"+": 20}, three_term_share=0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_operand": {"/": 5}}, "one or more of"),
        ({"max_operand": {}}, "one or more of"),
        ({"max_operand": {"+": 1}}, "at least min_operand"),
        ({"three_term_share": 1.5}, "between 0 and 1"),
        ({"max_operand": {"*": 9}}, "at most one product"),
    ],
)
def test_unusable_spec_is_refused_by_field(change: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ArithmeticSpec(**change)


def test_too_few_problems_are_refused() -> None:
    with pytest.raises(BadInput, match="held-out"):
        generate(seed=1, train=10, held_out=8)
    with pytest.raises(BadInput, match="training"):
        generate(seed=1, train=0, held_out=64)
