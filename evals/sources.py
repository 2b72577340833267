r"""Where tasks come from: the AIME sets on the Hub, and local files of problem/answer pairs.

A file (JSON lines, a JSON list or Parquet) has one problem a row:

    {"problem": "text", "answer": 70 or "\\frac{1}{2}", "id": "optional"}

Rows of SkyRL's PromptDataset (`prompt`, `reward_spec.ground_truth`) are understood, too. Labels are checked here, once,
so that a bad one costs a message and not a run.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beam_rl.evals.task import PLACE, Problem, Task, label, problem_of_row
from beam_rl.model.errors import BadInput

FILES = (".jsonl", ".json", ".parquet")

BOXED = r"Put your final answer within \boxed{}."
PLAIN_PROMPT = f"{BOXED}\n\n{PLACE}"
AIME_PROMPT = f"{BOXED}\nThe answer is an integer between 0 and 999 inclusive.\n\n{PLACE}"
"""MathArena's convention."""
AIME_PROBLEMS, AIME_LARGEST = 30, 999
REMEDY = "Give the problems as a file with --data."


@dataclass(frozen=True)
class HubSet:
    """A data set on the Hub: its configurations, in order, and the names of its columns."""

    name: str
    split: str
    configs: tuple[str | None, ...] = (None,)
    problem: str = "problem"
    answer: str = "answer"

    def load(self) -> list[dict[str, Any]]:
        """All rows, with this project's column names. Raises BadInput."""
        import datasets

        rows: list[dict[str, Any]] = []
        for config in self.configs:
            try:
                part = datasets.load_dataset(self.name, config, split=self.split).to_list()
                rows += [{"problem": row[self.problem], "answer": row[self.answer]} for row in part]
            except KeyError as error:
                raise BadInput(
                    f"{self.name}: has no column {error}. Give the problems as a file with --data."
                ) from None
            except (OSError, ValueError) as error:  # not on the Hub, or the Hub cannot be reached
                raise BadInput(f"{self.name} cannot be loaded from the Hub: {error}. {REMEDY}") from error
        return rows


AIME = {
    "aime25": HubSet("opencompass/AIME2025", "test", ("AIME2025-I", "AIME2025-II"), problem="question"),
    "aime24": HubSet("HuggingFaceH4/aime_2024", "train"),
}


def load(name: str, data: Path | None = None, prompt: str | None = None) -> Task:
    """The task called `name` (`aime25`, `aime24`), or the file of that name.

    Args:
        name: a known task or a file.
        data: a local file to read a known task's problems from, in place of the Hub.
        prompt: replaces the task's prompt; must hold `{problem}`.

    Raises:
        BadInput: unknown task, unreadable file, or labels and texts that cannot be right.
    """
    if prompt is not None and PLACE not in prompt:
        raise BadInput(f"--prompt: {prompt!r} has no {PLACE} where the problem goes.")
    if name in AIME:
        rows = AIME[name].load() if data is None else read_rows(data)
        source = AIME[name].name if data is None else str(data)
        task = Task(name, source, problems(rows, name), prompt or AIME_PROMPT)
        check_aime(task)
        return task
    path = Path(name)
    if path.suffix not in FILES:
        raise BadInput(f"{name}: neither a task ({', '.join(AIME)}) nor a file ({', '.join(FILES)}).")
    if data is not None:
        raise BadInput(f"--data: {name} is a file itself. Leave it out.")
    rows = read_rows(path)
    chats = isinstance(rows[0], Mapping) and "prompt" in rows[0]
    return Task(path.stem, name, problems(rows, path.stem), prompt or (PLACE if chats else PLAIN_PROMPT))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl, .json or .parquet file. Raises BadInput."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file.")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise BadInput(f"{path}: not a Parquet file: {error}") from error
    else:
        rows = read_json(path)
    if not rows:
        raise BadInput(f"{path}: empty.")
    return rows


def read_json(path: Path) -> list[Any]:
    """JSON lines, or one JSON list. Raises BadInput with the line's number."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text: {error}") from error
    # Not splitlines(): it also ends lines at characters that JSON may hold in a text, such as U+2028.
    lines = [text] if path.suffix == ".json" else text.split("\n")
    rows: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}: line {number} is not JSON: {error}") from error
        rows += value if isinstance(value, list) else [value]
    return rows


def problems(rows: Sequence[Any], name: str) -> tuple[Problem, ...]:
    """Checked problems. Raises BadInput: a row without text or label, or an id or a text that comes twice."""
    made = tuple(problem(row, index, name) for index, row in enumerate(rows))
    for what, values in (("id", [one.id for one in made]), ("text", [one.problem for one in made])):
        value, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise BadInput(f"{name}: {count} problems have the same {what}: {value[:80]!r}. Remove the duplicates.")
    return made


def problem(row: Any, index: int, name: str) -> Problem:
    """The problem in a row of a file. Raises BadInput."""
    where = f"{name}: row {index + 1}"
    if not isinstance(row, Mapping):
        raise BadInput(f"{where}: is not an object with fields.")
    try:
        if "prompt" in row:
            return problem_of_row(dict(row), index)
        text, answer = row["problem"], row["answer"]
    except (KeyError, TypeError, IndexError):
        raise BadInput(
            f'{where}: needs "problem" and "answer" (or "prompt" and "reward_spec"), has {", ".join(map(str, row))}.'
        ) from None
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f'{where}: "problem" is {text!r}: a text is wanted.')
    if isinstance(answer, bool) or not isinstance(answer, int | float | str) or not str(answer).strip():
        raise BadInput(f'{where}: "answer" is {answer!r}: a number or LaTeX is wanted.')
    return Problem(str(row.get("id", f"{name}-{index}")), text, label(answer))


def check_aime(task: Task) -> None:
    """Raise BadInput unless a task has an AIME year's 30 problems, with answers from 0 to 999."""
    if len(task.problems) != AIME_PROBLEMS:
        raise BadInput(f"{task.source}: {len(task.problems)} problems; {task.name} has {AIME_PROBLEMS}.")
    for one in task.problems:
        if not one.answer.isdecimal() or int(one.answer) > AIME_LARGEST:
            raise BadInput(
                f"{task.source}: {one.id}: the label is {one.answer!r}: an integer from 0 to {AIME_LARGEST} is wanted."
            )
