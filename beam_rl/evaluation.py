"""avg@k on held-out problems, with the current policy."""

import time
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import prepare_generator_input

from beam_rl.evals.statistics import avg_at_k, pass_at_k
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
    correct = [accuracy > 0 for accuracy in accuracies(output)]
    matrix = [correct[row : row + samples] for row in range(0, len(correct), samples)]  # [problems, samples]
    mean, error = avg_at_k(matrix)
    stops = output["stop_reasons"] or []
    return {
        "kind": "eval",
        "step": step,
        "time": time.time(),
        "avg8": mean,
        "se": error,
        "pass8": pass_at_k(matrix),
        "truncated_share": share(reason == "length" for reason in stops),
        "no_answer_share": share(bool(row.get("no_answer")) for row in output["env_metrics"] or []),
        "problems": len(matrix),
        "samples": samples,
        "seconds": time.time() - start,
    }


def share(flags: Any) -> float:
    """The share of true values; 0 of none."""
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
