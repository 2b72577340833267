"""`beam-rl gap`: the log-prob gap of one checkpoint in every precision, with R3 and without, on the same prompts.

For each precision an engine samples one response a prompt, with log-probs and routes, and the trainer scores the same
tokens, each side in a process of its own and set up as in training, but without Ray.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from beam_rl import apart, gap_report
from beam_rl.console import Console
from beam_rl.gap_report import Row
from beam_rl.precision import NAMES, Name, engine_arguments, single_engine
from beam_rl.problems import PROMPT, Problems
from beam_rl.recipe import Recipe
from beam_rl.rollout.sample import Sample, sample
from beam_rl.settings import BUDGETS
from beam_rl.trainer.responses import Scored, make_adapter, score_responses, write_served

EXPLAINED = 8
"""Samples whose hidden states are compared."""
WIDEST = 5
"""Tokens with the largest difference that are shown."""
PART = {"bfloat16": 2.0**-7, "float32": 1e-5}
"""Relative difference of a layer's output from which the two sides have parted: twice the dtype's rounding error, or
what the order of a sum leaves of float32."""


def measure(
    recipe: Recipe,
    tokenizer: Any,
    problems: Problems,
    console: Console,
    *,
    precisions: Sequence[Name] = NAMES,
    adapter: Path | None = None,
    prompts: int = 64,
    explain: bool = False,
) -> dict[str, Any]:
    """Measure, and return rows, notes and explanations as plain values (see `gap_report.as_json`).

    Args:
        adapter: a PEFT adapter for the LoRA rows. None makes one whose change of the weights is as large as a
            training run's, from the recipe's seed: a fresh adapter changes nothing, and would measure bf16 again.
        prompts: how many of the problems to use, from the first.
    """
    model = recipe.model_path
    assert model is not None
    ids = [
        list(tokenizer.apply_chat_template(problems.rows[i][PROMPT], add_generation_prompt=True, return_dict=False))
        for i in range(min(prompts, len(problems)))
    ]
    rows: list[Row] = []
    notes: list[str] = []
    explained: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="beam-rl-gap-") as temporary:
        for precision in precisions:
            config = single_engine(recipe, precision)
            served = model
            chosen = None
            if precision == "lora":
                chosen = adapter
                if chosen is None:
                    chosen = Path(temporary) / "adapter"
                    with console.phase("lora: an adapter"):
                        change = apart.call(make_adapter, model, config, chosen)
                    notes.append(
                        f"lora: a random adapter from the seed; it changes the weights under it by {change:.2%} (norm)"
                    )
                served = Path(temporary) / "merged"
                with console.phase("lora: merged weights"):
                    apart.call(write_served, model, config, chosen, served)
            if config.mxfp8 is not None and not config.mxfp8.activations:  # in training a sync brings rounded weights
                served = Path(temporary) / "rounded"
                with console.phase(f"{precision}: rounded weights"):
                    apart.call(write_served, model, config, None, served)
            with console.phase(f"{precision}: rollout"):
                samples = apart.call(
                    sample,
                    served,
                    ids,
                    dtype=config.dtype,
                    tokens=recipe.generator.sampling_params.max_generate_length,
                    temperature=recipe.generator.sampling_params.temperature,
                    hidden=EXPLAINED if explain else 0,
                    arguments=engine_arguments(recipe, precision)
                    | recipe.generator.inference_engine.engine_init_kwargs,
                )
            with console.phase(f"{precision}: trainer"):
                scored = apart.call(
                    score_responses,
                    model,
                    [each.tokens for each in samples],
                    [each.prompt for each in samples],
                    [each.routes for each in samples],
                    config,
                    adapter=chosen,
                    hidden=EXPLAINED if explain else 0,
                )
            budget = recipe.beam.gap_budget if precision == recipe.beam.precision else BUDGETS[precision]
            rows += compare(precision, samples, scored, budget)
            if explain:
                explained[precision] = explanation(samples, scored, config.dtype)
    return gap_report.as_json(rows, notes, explained)


def compare(precision: Name, samples: Sequence[Sample], scored: Sequence[Scored], budget: float) -> list[Row]:
    """The rows of one precision: with R3 and without."""
    rollout = np.concatenate([each.logprobs for each in samples])
    flips = rerouted(samples, scored)
    share = float(np.concatenate([f.ravel() for f in flips if f is not None] or [np.zeros(1)]).mean())
    sides = ((True, [each.replayed for each in scored]), (False, [each.free for each in scored]))
    return [gap_report.row(precision, r3, np.concatenate(own), rollout, share, budget) for r3, own in sides]


def rerouted(samples: Sequence[Sample], scored: Sequence[Scored]) -> list[Any]:
    """Per sample, where the trainer's own routes are not the rollout's: bool [n - 1, sparse layers], or None."""
    return [
        None
        if each.routes is None
        else gap_report.differing(own.routes[: len(each.routes)], each.routes, sparse_layers(own))
        for each, own in zip(samples, scored, strict=True)
    ]


def sparse_layers(scored: Scored) -> list[int]:
    """Layers with experts, by their routes."""
    return [layer for layer in range(scored.routes.shape[1]) if (scored.routes[:, layer] >= 0).all()]


def explanation(
    samples: Sequence[Sample], scored: Sequence[Scored], dtype: Literal["bfloat16", "float32"]
) -> dict[str, Any]:
    """Where a precision's gap comes from: the layers' outputs, and the tokens with the largest difference."""
    pairs = [(b.hidden, a.hidden) for a, b in zip(samples, scored, strict=True) if a.hidden is not None]
    ours, theirs = (np.concatenate([pair[side] for pair in pairs], axis=1) for side in (0, 1))
    layers, first = gap_report.parting(ours, theirs, PART[dtype])
    own, rollout = [each.replayed for each in scored], [each.logprobs for each in samples]
    tokens = [each.tokens for each in samples]
    return {
        "layers": layers,
        "threshold": PART[dtype],
        "first_layer_apart": first,
        "tokens": gap_report.widest(own, rollout, rerouted(samples, scored), tokens, WIDEST),
    }


def lines(found: dict[str, Any], tokenizer: Any) -> list[str]:
    """The table, its notes and the explanations, as text."""
    head = (
        f"{'precision':<10} {'R3':<4} {'mean':>9} {'p50':>9} {'p99':>9} {'max':>8} {'KL (k3)':>9} {'routes differ':>14}"
    )
    text = [head + "  budget"]
    for each in found["rows"]:
        verdict = "within" if each["mean"] < each["budget"] else "OVER"
        text.append(
            f"{each['precision']:<10} {'on' if each['r3'] else 'off':<4} {each['mean']:>9.6f} {each['p50']:>9.6f} "
            f"{each['p99']:>9.5f} {each['max']:>8.4f} {each['kl']:>9.2e} {each['routes_differ']:>14.3%}  "
            f"{each['budget']:g} {verdict}"
        )
    tokens = found["rows"][0]["tokens"] if found["rows"] else 0
    text += ["", f"nats a response token, {tokens:,} tokens in the first row; R3 on: the rollout's experts, replayed"]
    text += found["notes"]
    for precision, told in found["explained"].items():
        first = told["first_layer_apart"]
        where = f"part in layer {first}" if first is not None else "do not part"
        text += [
            "",
            f"{precision}: the hidden states {where} (relative difference over {told['threshold']:.1e})",
            "  by layer  " + " ".join(f"{value:.1e}" for value in told["layers"]),
            "  the widest tokens:",
        ]
        for token in told["tokens"]:
            shown = repr(tokenizer.decode([token["token"]]))
            text.append(
                f"    sample {token['sample']} position {token['position']} {shown}: trainer {token['trainer']:.4f}, "
                f"rollout {token['rollout']:.4f}; the trainer itself would route it elsewhere in "
                f"{token['layers_rerouted']} layers, and {token['layers_rerouted_before']} token-layers before it"
            )
    return text
