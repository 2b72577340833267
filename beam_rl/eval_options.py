"""The options of `beam-rl eval`, `beam-rl eval compare` and `beam-rl grade`; what they do is in `eval_command`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from beam_rl.evals import sources

COMMANDS = "beam_rl.eval_command"
"""Imported when one of the commands runs."""


@dataclass(frozen=True)
class Preset:
    """Sampling settings that have a name."""

    what: str
    temperature: float
    top_p: float
    max_tokens: int = 20_480
    reasoning_effort: str | None = None


PRESETS = {
    "beam": Preset("the recipes' evaluation, reasoning effort minimal", 1.0, 0.7, reasoning_effort="minimal"),
    "dapo": Preset("DAPO's validation (arXiv 2503.14476)", 1.0, 0.7),
    "policy": Preset("the whole distribution, as training samples it", 1.0, 1.0),
    "greedy": Preset("the most likely token, always", 0.0, 1.0),
}


def add_commands(commands: Any) -> None:
    """The commands' options; `commands` is argparse's collection of sub-commands."""
    evaluate = commands.add_parser(
        "eval",
        help="avg@k on AIME or your own problems",
        description="Sample k responses to every problem, grade them, and write OUT/results.json and OUT/report.html. "
        "Interrupted, the same command goes on where it was.",
        epilog="Presets: " + "; ".join(f"{name}: {preset.what}" for name, preset in PRESETS.items()) + ".",
    )
    evaluate.add_argument("task", metavar="TASK", help=f"{', '.join(sources.AIME)}, or a .jsonl or .parquet file")
    where = evaluate.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="PATH", help="checkpoint folder: a vLLM server is started for it")
    where.add_argument("--endpoint", metavar="URL", help="a server that speaks OpenAI's protocol")
    evaluate.add_argument("--api-key-env", metavar="NAME", help="variable that holds the endpoint's key")
    evaluate.add_argument("--served-model", metavar="NAME", help="which of the endpoint's models, if it has several")
    evaluate.add_argument(
        "--engine", action="append", default=[], metavar="KEY=VALUE", help="argument of vLLM's engine"
    )
    evaluate.add_argument(
        "--data", type=Path, metavar="FILE", help="read AIME's problems from a file, not from the Hub"
    )
    evaluate.add_argument("--prompt", metavar="TEXT", help="the user's message, with {problem} in it")
    evaluate.add_argument("--samples", type=int, default=8, metavar="K", help="responses a problem (default 8)")
    evaluate.add_argument("--limit", type=int, metavar="N", help="only the first N problems")
    evaluate.add_argument("--preset", choices=PRESETS, default="beam", help="sampling settings (default beam)")
    evaluate.add_argument("--temperature", type=float)
    evaluate.add_argument("--top-p", type=float)
    evaluate.add_argument("--max-tokens", type=int, metavar="N", help="longest response (presets: 20480)")
    evaluate.add_argument("--reasoning-effort", metavar="LEVEL", help="for the chat template; 'default' gives it none")
    evaluate.add_argument("--seed", type=int, help="makes a seed for every sample (default: the server draws)")
    evaluate.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at a time (default 64)")
    evaluate.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="seconds a response (default 3600)"
    )
    evaluate.add_argument("--out", type=Path, help="folder; default runs/eval-TASK-DATE-TIME")
    evaluate.set_defaults(run=lambda options: import_module(COMMANDS).eval_command(options))

    compare = commands.add_parser(
        "eval compare", help="two evaluations, paired by problem", description="Compare two evaluations of one task."
    )
    compare.add_argument("before", metavar="A", type=Path, help="folder or results.json")
    compare.add_argument("after", metavar="B", type=Path)
    compare.set_defaults(run=lambda options: import_module(COMMANDS).compare_command(options))

    grade = commands.add_parser(
        "grade",
        help="grade responses in a file",
        description='Grade lines of {"response": ..., "answer": ...} ("truncated": true where generation was cut off); '
        "prints one verdict a line: correct, wrong, no_answer, truncated or timeout.",
    )
    grade.add_argument("file", metavar="FILE.jsonl", type=Path)
    grade.set_defaults(run=lambda options: import_module(COMMANDS).grade_command(options))


def join_words(arguments: Sequence[str]) -> list[str]:
    """The arguments with `eval compare` as one word, which is how argparse knows it."""
    head = list(arguments[:2])
    return ["eval compare", *arguments[2:]] if head == ["eval", "compare"] else list(arguments)
