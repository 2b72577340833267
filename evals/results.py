"""`results.json`: one evaluation, whole, in a versioned schema. Every field says what it means and its unit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from beam_rl.evals.files import write_atomically
from beam_rl.evals.grader import Verdict
from beam_rl.model.errors import BadInput

SCHEMA = "beam-rl-eval"
VERSION = 1
"""Raised whenever a reader of the former version would misread a file."""
SCHEMA_KEY = "schema"


class Record(BaseModel):
    """A part of the file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="null")


class Sampling(Record):
    """How responses are drawn."""

    samples: int = Field(ge=1)
    """Responses a problem: the k of avg@k."""
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    max_tokens: int = Field(ge=1)
    """Longest response, in tokens, reasoning included."""
    reasoning_effort: str | None = None
    """Handed to the chat template; None leaves it to the template."""
    seed: int | None = None
    """None: the server draws. A number: sample j of problem i has a seed of its own, made of (seed, problem, j)."""

    @property
    def seed_policy(self) -> str:
        """What a reader should know about repeating the run."""
        if self.temperature == 0:
            return "greedy: no randomness is asked for"
        if self.seed is None:
            return "no seed: every sample is an independent draw of the server, and another run draws others"
        return f"seed {self.seed}: each sample has its own, made of (seed, problem, sample), also after a restart"


class Identity(Record):
    """Which model answered."""

    model: str
    """Its name at the server."""
    path: str | None = None
    """The checkpoint's folder, where this run started the server; else what the server says it serves."""
    config_hash: str | None = None
    """SHA-256 of the checkpoint's config.json."""
    weights_hash: str | None = None
    """SHA-256 over names, sizes, first and last bytes of the weight files: a fingerprint, not a proof."""
    server: str | None = None
    """The server's software and version, where it tells."""
    context: int | None = None
    """Longest prompt and response together, in tokens, where the server tells."""
    weight_versions: list[str] = []
    """All weight versions that the server named during the run, in order of appearance."""


class Sample(Record):
    """One response, or the failure to get one."""

    problem: str
    """The problem's id."""
    sample: int = Field(ge=0)
    """0 to samples - 1."""
    verdict: Verdict | Literal["error"]
    """`error`: no whole response came, after all retries. Never counted as wrong."""
    answer: str | None = None
    """The final answer in canonical spelling; None without one."""
    response: str = ""
    """The text after its reasoning, as graded."""
    reasoning: str | None = None
    """The reasoning, where the server separates it."""
    tokens: int | None = None
    """Response tokens, reasoning included; None where the server does not tell."""
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    """The server's: `stop`, `length`, ..."""
    seconds: float = 0.0
    """Request to response, of the attempt that succeeded."""
    attempts: int = 1
    """Requests made, retries included."""
    weight_version: str | None = None
    """The server's weight version while it answered; `a..b` where it changed meanwhile, None where it has none."""
    error: str | None = None
    """Why there is no response."""
    finished: float = 0.0
    """Unix time."""

    @property
    def is_error(self) -> bool:
        return self.verdict == "error"


class Session(Record):
    """One stretch of work: an interrupted run has several."""

    started: float
    """Unix time."""
    ended: float
    """Unix time; of the last finished sample, where the process was killed."""


class Summary(Record):
    """The numbers. Shares are of samples that have a response; None means that it cannot be told."""

    avg: float | None
    """avg@k: mean correctness over problems and samples."""
    se: float | None
    """Its standard error, clustered by problem."""
    pass_k: float | None
    """pass@k; None while a sample is missing."""
    maj_k: float | None
    """maj@k; None while a sample is missing."""
    expected: int
    """Samples asked for: problems x k."""
    verdicts: dict[str, int]
    """Samples by verdict."""
    truncated_share: float | None
    """Responses that ran into the length limit, with or without an answer."""
    no_answer_share: float | None
    """Responses that ended by themselves without an answer."""
    tokens_mean: float | None
    tokens_p95: float | None
    tokens: int
    """Response tokens of all samples."""
    tokens_per_second: float | None
    wall_seconds: float
    """All sessions together."""


class ProblemResult(Record):
    """One problem's samples in numbers."""

    id: str
    text_hash: str
    """SHA-256 over text and label."""
    answer: str
    """The label."""
    verdicts: list[Verdict | Literal["error"] | None]
    """By sample; None where it was not drawn yet."""
    avg: float | None
    """Mean correctness; None without a response."""
    majority: list[str]
    """The most frequent answers."""
    tokens_mean: float | None


class TaskRecord(Record):
    """What was asked."""

    name: str
    source: str
    problems: int
    text_hash: str
    """SHA-256 over all texts and labels: two runs with the same hash had the same problems."""
    prompt: str


class Results(Record):
    """The whole file."""

    version: int = VERSION
    status: Literal["complete", "incomplete"]
    """incomplete: samples are missing, or ended in an error. Running the command again goes on."""
    task: TaskRecord
    model: Identity
    sampling: Sampling
    seed_policy: str
    warnings: list[str]
    """What makes the numbers less than they seem."""
    summary: Summary
    problems: list[ProblemResult]
    samples: list[Sample]
    """In order of problem and sample, whatever the order they came in."""
    sessions: list[Session]
    software: dict[str, str]


def write(path: Path, results: Results) -> None:
    """Write the file, whole or not at all."""
    content = {SCHEMA_KEY: SCHEMA, **results.model_dump(mode="json")}
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read(path: Path) -> Results:
    """Read `results.json`, or the one in a folder. Raises BadInput: not such a file, or of another version."""
    path = path / "results.json" if path.is_dir() else path
    if not path.is_file():
        raise BadInput(f"{path}: no such file. `beam-rl eval TASK --out FOLDER` writes one.")
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.pop(SCHEMA_KEY, None) != SCHEMA:
        raise BadInput(f"{path}: not the results of an evaluation (its {SCHEMA_KEY} is not {SCHEMA}).")
    if content.get("version") != VERSION:
        raise BadInput(f"{path}: version {content.get('version')} of the schema; this program reads {VERSION}.")
    try:
        return Results.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def in_order(samples: Sequence[Sample], problem_ids: Sequence[str]) -> list[Sample]:
    """Samples by problem, then by number."""
    place = {name: index for index, name in enumerate(problem_ids)}
    return sorted(samples, key=lambda one: (place[one.problem], one.sample))
