"""avg@k on held-out problems, with the current policy: the task and the statistics of `beam-rl eval`."""

import time
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput
from skyrl.train.generators.utils import prepare_generator_input

from beam_rl.evals.grader import Verdict
from beam_rl.evals.results import Sample
from beam_rl.evals.summary import summarize
from beam_rl.evals.task import Task
from beam_rl.problems import Problems
from beam_rl.recipe import Recipe
from beam_rl.rollouts import accuracies, whole_distribution


async def evaluate(recipe: Recipe, problems: Problems, generator: GeneratorInterface, step: int) -> dict[str, Any]:
    """Sample k responses to every problem and grade them; the "eval" record of `metrics.jsonl`.

    avg8 is the mean correctness over problems and samples, se its standard error clustered by problem.
    """
    start = time.time()
    samples = recipe.generator.eval_n_samples_per_prompt
    engine = recipe.generator.inference_engine
    inputs, _ = prepare_generator_input(
        problems.collate_fn([problems[index] for index in range(len(problems))]),
        samples,
        whole_distribution(get_sampling_params_for_backend(engine.backend, recipe.generator.eval_sampling_params)),
        recipe.environment.env_class,
        "eval",
        step,
    )
    output = await generator.generate(inputs)
    task = problems.task("held-out")
    seconds = time.time() - start
    summary = summarize(task, graded(task, output, samples), samples, seconds)
    return {
        "kind": "eval",
        "step": step,
        "time": time.time(),
        "avg8": summary.avg,
        "se": summary.se,
        "pass8": summary.pass_k,
        "maj8": summary.maj_k if any("answer" in row for row in output.get("env_metrics") or []) else None,
        "truncated_share": summary.truncated_share,
        "no_answer_share": summary.no_answer_share,
        "grader_timeouts": summary.verdicts.get(Verdict.timeout, 0),
        "response_length_mean": summary.tokens_mean,
        "response_length_p95": summary.tokens_p95,
        "problems": len(task.problems),
        "samples": samples,
        "text_hash": task.text_hash,
        "seconds": seconds,
    }


def graded(task: Task, output: GeneratorOutput, k: int) -> list[Sample]:
    """A generator's output as graded samples; its rows are k a problem, in the task's order.

    An environment that gives no verdict is believed its accuracy, or its reward.
    """
    values = accuracies(output)
    metrics = output.get("env_metrics") or [{}] * len(values)
    stops = output.get("stop_reasons") or [None] * len(values)
    responses = output.get("response_ids")
    made = []
    for row, (accuracy, metric, stop) in enumerate(zip(values, metrics, stops, strict=True)):
        verdict = Verdict(metric.get("verdict") or (Verdict.correct if accuracy > 0 else Verdict.wrong))
        if verdict is Verdict.no_answer and stop == "length":
            verdict = Verdict.truncated  # the environment does not see why generation stopped
        made.append(
            Sample(
                problem=task.problems[row // k].id,
                sample=row % k,
                verdict=verdict,
                answer=metric.get("answer"),
                tokens=len(responses[row]) if responses is not None else None,
                finish_reason=stop,
            )
        )
    return made
