"""The problems to train on and to evaluate with, and the order in which training sees them."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_rl.evals import sources
from beam_rl.evals.arithmetic import ENV_CLASS
from beam_rl.evals.task import Task, from_rows
from beam_rl.model.errors import BadInput

if TYPE_CHECKING:
    from beam_rl.recipe import Recipe

PROMPT = "prompt"
REWARD = "reward_spec"


class Problems:
    """Rows in the shape of SkyRL's PromptDataset: an item is (conversation, env class or None, other fields, uid)."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[dict[str, str]], str | None, dict[str, Any], str]:
        row = self.rows[index]
        others = {key: value for key, value in row.items() if key not in (PROMPT, "env_class")}
        return row[PROMPT], row.get("env_class"), others, str(index)

    def task(self, name: str) -> Task:
        """The problems as an evaluation's task."""
        return from_rows(self.rows, name, name)

    def collate_fn(self, items: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Items as SkyRL's generator input wants them."""
        return [dict(zip(("prompt", "env_class", "env_extras", "uid"), item, strict=True)) for item in items]


@dataclass
class Position:
    """How far training has come in the problems: `drawn` problems of the endless shuffled stream."""

    drawn: int = 0


class ProblemStream:
    """Batches of problems for ever, in an order that only the seed decides; stands in for SkyRL's data loader.

    Pass `k` over the problems has its own permutation, seeded by (seed, k); batches run on across passes, so that no
    problem is lost at their ends. How many problems a batch has is `wanted` at the time it is drawn: dynamic sampling
    asks for as many groups as are missing. The whole state is the number of problems drawn.

    `len()` is the number of training steps: SkyRL takes it as the steps of an epoch, and the run has one epoch.
    """

    def __init__(self, problems: Problems, batch: int, steps: int, seed: int) -> None:
        self.problems = problems
        self.steps = steps
        self.seed = seed
        self.wanted = batch
        self.position = Position()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            start = self.position.drawn
            self.position.drawn += self.wanted
            items = [self.problems[self.index(place)] for place in range(start, self.position.drawn)]
            batch = self.problems.collate_fn(items)
            for place, item in enumerate(batch, start):
                item["uid"] = str(place)  # groups are told apart by it, and a problem comes again in the next pass
            yield batch

    def index(self, place: int) -> int:
        """Which problem stands at a place of the stream."""
        number, offset = divmod(place, len(self.problems))
        return permutation(len(self.problems), self.seed, number)[offset]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.position.drawn, "problems": len(self.problems), "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after `state`. Raises BadInput when the data or the seed are not the ones it belongs to."""
        for key, value in (("problems", len(self.problems)), ("seed", self.seed)):
            if state[key] != value:
                raise BadInput(f"the checkpoint was made with {key}={state[key]}, the recipe now has {key}={value}.")
        self.position = Position(state["drawn"])


_permutations: dict[tuple[int, int, int], list[int]] = {}


def permutation(size: int, seed: int, number: int) -> list[int]:
    """The order of pass `number` over `size` problems; the last two passes are remembered."""
    key = (size, seed, number)
    if key not in _permutations:
        for old in list(_permutations)[:-1]:
            del _permutations[old]
        order = list(range(size))
        random.Random(f"{seed}/{number}").shuffle(order)
        _permutations[key] = order
    return _permutations[key]


def load_problems(
    sources: Sequence[str],
    key: str,
    tokenizer: Any,
    recipe: "Recipe",
    drop_long: bool,
    report: Callable[[str], None],
) -> Problems:
    """Read all `sources`, check every row and measure every prompt. Raises BadInput; `key` names the recipe's key."""
    limit = recipe.trainer.max_prompt_length
    kept: list[dict[str, Any]] = []
    for source in sources:
        rows = read_rows(source, key)
        for number, row in enumerate(rows, 1):
            check_row(row, f"{key}: {source}: row {number}")
        lengths = prompt_lengths(rows, tokenizer, recipe.generator.chat_template_kwargs, f"{key}: {source}")
        long = [index for index, length in enumerate(lengths) if length > limit]
        if long:
            worst = max(long, key=lengths.__getitem__)
            found = (
                f"{key}: {source}: {len(long)} of {len(rows)} prompts are longer than trainer.max_prompt_length={limit}"
                f" tokens (the longest, row {worst + 1}, has {lengths[worst]})"
            )
            if not drop_long:
                raise BadInput(f"{found}. Raise the limit, or set beam.long_prompts=drop.")
            report(f"{found}; dropped.")
        dropped = set(long)
        kept += [row for index, row in enumerate(rows) if index not in dropped]
    if not kept:
        raise BadInput(f"{key}: no problem is left in {', '.join(sources)}.")
    return Problems(kept)


def read_rows(source: str, key: str) -> list[dict[str, Any]]:
    """The rows of a .jsonl, .json or .parquet file, of a task (`aime25`), or of `name:split` on the Hub.

    Raises BadInput. A file may also hold problem/answer pairs, as `beam-rl eval` takes them, and with its prompt.
    """
    if source in sources.AIME:
        return task_rows(source, key)
    path = Path(source)
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        return hub_rows(source, key)
    try:
        rows = sources.read_rows(path)
    except BadInput as error:
        raise BadInput(f"{key}: {error}") from error
    pairs = isinstance(rows[0], dict) and PROMPT not in rows[0] and "problem" in rows[0]
    return task_rows(source, key) if pairs else rows


def task_rows(source: str, key: str) -> list[dict[str, Any]]:
    """The rows of an evaluation's task. Raises BadInput."""
    try:
        return sources.load(source).rows()
    except BadInput as error:
        raise BadInput(f"{key}: {error}") from error


def hub_rows(source: str, key: str) -> list[dict[str, Any]]:
    """A split of a data set on the Hub (or in the local cache). Raises BadInput."""
    import datasets

    name, _, split = source.partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train").to_list()
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise BadInput(f"{key}: {source}: neither a data file nor a data set that can be loaded: {error}") from error


def known_environments() -> tuple[str, ...]:
    """Names that `environment.env_class`, or a row's "env_class", may have: Beam's and those of skyrl_gym."""
    from skyrl_gym.envs.registration import registry

    return tuple(dict.fromkeys((ENV_CLASS, *registry)))


def check_row(row: Any, where: str) -> None:
    """Raise BadInput unless a row has a conversation and a reference answer."""
    if not isinstance(row, dict):
        raise BadInput(f"{where}: is not an object with fields.")
    conversation = row.get(PROMPT)
    turns = conversation if isinstance(conversation, list) else []
    if not turns or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    ):
        raise BadInput(f'{where}: needs "{PROMPT}", a list of {{"role": ..., "content": ...}} with texts.')
    environment = row.get("env_class")
    if environment is not None and environment not in known_environments():
        raise BadInput(f'{where}: "env_class" is {environment!r}: known are {", ".join(known_environments())}.')
    reward = row.get(REWARD)
    if not isinstance(reward, dict) or reward.get("ground_truth") in (None, ""):
        raise BadInput(f'{where}: needs "{REWARD}": {{"ground_truth": ...}}, the reference answer.')


def prompt_lengths(rows: Sequence[dict[str, Any]], tokenizer: Any, template: dict[str, Any], where: str) -> list[int]:
    """Tokens of every row's prompt after the chat template. Raises BadInput for a row that the template refuses."""
    from jinja2 import TemplateError

    texts = []
    for number, row in enumerate(rows, 1):
        try:
            texts.append(
                tokenizer.apply_chat_template(row[PROMPT], add_generation_prompt=True, tokenize=False, **template)
            )
        except (TemplateError, TypeError) as error:  # TypeError: arguments that the template's operations cannot take
            raise BadInput(f"{where}: row {number}: the model's chat template fails: {error}") from error
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
