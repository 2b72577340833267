"""Draws a task's samples from a server, grades them, and keeps every one of them.

`evaluate` may be interrupted at any moment and called again with the same journal: finished samples are not drawn
again, failed ones are. What is kept is described in `journal`, what comes out of it in `results`.

Why not inspect-ai (0.3.285 was tried): a retry would repeat no more than the samples in flight there, too. But a server
that died is asked on and on, without a word (no limit by default; with one, every sample fails by itself); an
interrupted eval set reports success (its issue 4859); a retry forgets the time of earlier sessions, and with it the
tokens a second (2628); unwritten samples lie outside the run's folder; and it would add 23 packages and 3 s of imports.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from beam_rl.evals import results
from beam_rl.evals.endpoint import HOPELESS, Endpoint, RequestFailed
from beam_rl.evals.journal import Journal
from beam_rl.evals.results import Identity, Results, Sample, Sampling, TaskRecord
from beam_rl.evals.summary import by_problem, grid, summarize
from beam_rl.evals.task import Problem, Task, grade_response
from beam_rl.model.errors import BadInput

LOOK_SECONDS = 0.5
"""How often it is looked whether a server of our own still runs."""
PROMPT_ROOM = 1
"""Tokens that a prompt has at least."""


class ServerLost(Exception):
    """The server is gone, or refuses everything; what was done is kept."""


@dataclass(frozen=True)
class Run:
    """What to evaluate, where, and with what."""

    task: Task
    sampling: Sampling
    endpoint: Endpoint
    concurrency: int = 64
    """Requests at a time, at most."""
    checkpoint: dict[str, str] = field(default_factory=dict)
    """`path`, `config_hash` and `weights_hash` of the model, where this run started the server."""
    died: Callable[[], str | None] = lambda: None
    """Why our own server has ended; None while it runs, or where it is not ours."""
    progress: Callable[[int], None] = lambda done: None
    """Told how many samples are done, those of earlier sessions included."""


def evaluate(run: Run, journal: Journal) -> Results:
    """Draw and grade what the journal lacks; returns what is also in `results.json`, beside the journal.

    Raises:
        ServerLost: the server is gone. `results.json` then holds what was done.
        BadInput: the journal is another evaluation's, or the server cannot do what is asked for.
    """
    drawing = _Drawing(run, journal)
    try:
        asyncio.run(drawing.all())
    finally:
        found = drawing.results()
        if found is not None:
            results.write(journal.folder / "results.json", found)
    assert found is not None
    return found


class _Drawing:
    """One session of a run."""

    def __init__(self, run: Run, journal: Journal) -> None:
        self.run = run
        self.journal = journal
        self.identity: Identity | None = None
        self.succeeded = bool(journal.done)
        """Whether the server ever gave a response: then a refusal is that request's own fault."""

    async def all(self) -> None:
        """Everything that is missing, `concurrency` at a time."""
        run = self.run
        async with run.endpoint as endpoint:
            try:
                identity = await endpoint.identify()
            except RequestFailed as error:
                raise ServerLost(run.died() or str(error)) from error
            check_context(run.sampling, identity)
            identity = identity.model_copy(update=run.checkpoint)
            self.journal.describe(**sections(run.task, run.sampling), model=identity.model_dump())
            self.identity = identity
            missing = [
                (problem, index)
                for problem in run.task.problems
                for index in range(run.sampling.samples)
                if (problem.id, index) not in self.journal.done
            ]
            self.tell()
            if not missing:
                return
            self.journal.begin(time.time())
            try:
                await self.draw(iter(missing), min(run.concurrency, len(missing)))
            finally:
                self.journal.end(time.time())

    async def draw(self, missing: Iterator[tuple[Problem, int]], workers: int) -> None:
        """Workers share the iterator; the first fatal error ends them all."""
        watch = asyncio.create_task(self.watch())
        tasks = [asyncio.create_task(self.work(missing)) for _ in range(workers)]
        everything: set[asyncio.Task[None]] = {watch, *tasks}
        pending = everything
        try:
            while pending - {watch}:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def watch(self) -> None:
        """Raises ServerLost as soon as a server of our own ends."""
        while (why := self.run.died()) is None:
            await asyncio.sleep(LOOK_SECONDS)
        raise ServerLost(why)

    async def work(self, missing: Iterator[tuple[Problem, int]]) -> None:
        for problem, index in missing:
            self.journal.add(await self.sample(problem, index))
            self.tell()

    async def sample(self, problem: Problem, index: int) -> Sample:
        """One sample, drawn and graded. Raises ServerLost or BadInput where no other one can succeed either."""
        endpoint = self.run.endpoint
        version = await endpoint.weight_version()
        try:
            made = await endpoint.complete(request(self.run.task, problem, index, self.run.sampling))
        except RequestFailed as error:
            await self.give_up_unless_alive(error)
            return Sample(
                problem=problem.id, sample=index, verdict="error", error=str(error), attempts=error.attempts,
                weight_version=version, finished=time.time(),
            )  # fmt: skip
        self.succeeded = True
        after = await endpoint.weight_version()
        facts: dict[str, Any] = made._asdict() | {
            "problem": problem.id,
            "sample": index,
            "weight_version": version if version == after else f"{version}..{after}",
        }
        try:
            verdict, answer = await asyncio.to_thread(
                grade_response, problem, made.response, made.finish_reason == "length"
            )
        except RuntimeError as error:  # the grader's own processes were killed
            return Sample(**facts, verdict="error", error=str(error), finished=time.time())
        return Sample(**facts, verdict=verdict, answer=answer, finished=time.time())

    async def give_up_unless_alive(self, error: RequestFailed) -> None:
        """Raise where it is the server that failed and not the request."""
        why = self.run.died()
        if why is None and error.status is None and not await self.run.endpoint.alive():
            why = f"{self.run.endpoint.url} does not answer any more: {error}"
        if why is not None:
            raise ServerLost(why) from error
        if error.status in HOPELESS or (error.status is not None and error.status < 500 and not self.succeeded):
            raise BadInput(f"{self.run.endpoint.url} refuses the requests: {error}") from error

    def tell(self) -> None:
        self.run.progress(len(self.journal.done))

    def results(self) -> Results | None:
        """What is there; None before the server was identified."""
        if self.identity is None:
            return None
        return collect(self.run.task, self.run.sampling, self.identity, self.journal)


def request(task: Task, problem: Problem, index: int, sampling: Sampling) -> dict[str, Any]:
    """The body of a chat completion, without the model's name."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": task.message(problem)}],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.reasoning_effort is not None:
        body["reasoning_effort"] = sampling.reasoning_effort  # vLLM hands it to the chat template under this name
    if sampling.seed is not None:
        body["seed"] = seed_of(sampling.seed, problem, index)
    return body


def seed_of(seed: int, problem: Problem, index: int) -> int:
    """A sample's own seed, in 31 bits: the same after a restart and in another order, different for every sample."""
    digest = hashlib.sha256(f"{seed}/{problem.text_hash}/{index}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def check_context(sampling: Sampling, identity: Identity) -> None:
    """Raise BadInput where no prompt and response of the wanted length fit the server's context."""
    if identity.context is not None and sampling.max_tokens + PROMPT_ROOM > identity.context:
        raise BadInput(
            f"--max-tokens {sampling.max_tokens}: the server's context has {identity.context} tokens, for prompt and "
            "response together. Give less."
        )


def task_record(task: Task) -> TaskRecord:
    """The task, as results and journal have it."""
    return TaskRecord(
        name=task.name, source=task.source, problems=len(task.problems), text_hash=task.text_hash, prompt=task.prompt
    )


def sections(task: Task, sampling: Sampling) -> dict[str, dict[str, Any]]:
    """What a journal must have in common with a run, as far as it is known before a server answers."""
    return {"task": task_record(task).model_dump(), "sampling": sampling.model_dump()}


def collect(task: Task, sampling: Sampling, identity: Identity, journal: Journal) -> Results:
    """The results of all samples in the journal."""
    samples = results.in_order(journal.samples, [problem.id for problem in task.problems])
    drawn = [one for row in grid(task, samples, sampling.samples) for one in row if one is not None]
    errors = sum(one.is_error for one in drawn)
    whole = len(drawn) == len(task.problems) * sampling.samples and not errors
    versions = weight_versions(samples)
    return Results(
        status="complete" if whole else "incomplete",
        task=task_record(task),
        model=identity.model_copy(update={"weight_versions": versions}),
        sampling=sampling,
        seed_policy=sampling.seed_policy,
        warnings=warnings(task, sampling, samples, versions),
        summary=summarize(task, samples, sampling.samples, sum(one.ended - one.started for one in journal.sessions)),
        problems=by_problem(task, samples, sampling.samples),
        samples=samples,
        sessions=journal.sessions,
        software={name: version(name) for name in ("beam-rl", "math-verify")},
    )


def weight_versions(samples: list[Sample]) -> list[str]:
    """All versions that samples were drawn under, in order of time."""
    in_time = sorted(samples, key=lambda one: one.finished)
    named = [part for one in in_time for part in (one.weight_version or "").split("..")]
    return list(dict.fromkeys(part for part in named if part not in ("", "None")))


def warnings(task: Task, sampling: Sampling, samples: list[Sample], versions: list[str]) -> list[str]:
    """What a reader must know before believing the numbers."""
    errors = [one for one in samples if one.is_error]
    missing = len(task.problems) * sampling.samples - len(samples)
    timeouts = sum(one.verdict == "timeout" for one in samples)
    found = []
    if missing:
        found.append(f"{missing} samples are missing: run the command again to go on")
    if errors:
        found.append(f"{len(errors)} samples ended in an error and are not counted, for example: {errors[0].error}")
    if timeouts:
        found.append(f"{timeouts} answers could not be compared in time; they count as not right")
    if len(versions) > 1:
        found.append(f"the server's weights changed during the run ({', '.join(versions)}): not one model's numbers")
    if any(one.tokens is None for one in samples if not one.is_error):
        found.append("the server does not tell how many tokens its responses have")
    return found
