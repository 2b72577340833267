"""The command line: `beam-rl` (also `python -m beam_rl`).

Exit codes: 0 done, 1 the run failed, 2 bad input. Heavy imports happen inside the commands.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from beam_rl import eval_options, serve_options
from beam_rl.model.errors import BadInput


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parsed(eval_options.join_words(sys.argv[1:] if arguments is None else arguments))
    try:
        return int(options.run(options))
    except BadInput as error:
        print(f"beam-rl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("beam-rl: interrupted.", file=sys.stderr)
        return 1


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `key=value` may also stand behind an option, where argparse expects none any more."""
    root = parser()
    options, rest = root.parse_known_args(arguments)
    late = [item for item in rest if "=" in item and not item.startswith("-")]
    if len(late) < len(rest) or not (late == [] or hasattr(options, "overrides")):
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    if late:
        options.overrides = [*options.overrides, *late]
    return options


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    root = argparse.ArgumentParser(
        prog="beam-rl", description="DAPO post-training of Beam on SkyRL, vLLM and Megatron-Core."
    )
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="run a recipe", description="Run a recipe from start to end.")
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help="YAML file; may be left out with --resume")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for example trainer.seed=2")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the resolved recipe, stop")
    train.add_argument("--resume", metavar="RUN", type=Path, help="go on from a run's last checkpoint")
    train.set_defaults(run=train_command)

    score = commands.add_parser(
        "score", help="token log-probs and routes of one side", description="Score token ids with one side's model."
    )
    score.add_argument("model", metavar="MODEL", type=Path, help="checkpoint folder")
    score.add_argument("--tokens", required=True, type=Path, metavar="IN.safetensors", help="input_ids [B, S]")
    score.add_argument("--side", required=True, choices=("trainer", "rollout"))
    score.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    score.add_argument("--replay", type=Path, metavar="ROUTES.safetensors", help="routes.L [B, S, topk]; trainer only")
    score.add_argument("--out", required=True, type=Path, metavar="OUT.safetensors")
    score.set_defaults(run=score_command)

    gap = commands.add_parser(
        "gap",
        help="the log-prob gap by precision, with R3 and without",
        description="Measure |log p(trainer) - log p(rollout)| in every precision, on the same prompts.",
    )
    gap.add_argument(
        "recipe", metavar="RECIPE", help="YAML file; its model (or --model), prompts and sampling are used"
    )
    gap.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for example beam.lora.r=16")
    gap.add_argument("--model", type=Path, metavar="PATH", help="another checkpoint, for example RUN/export")
    gap.add_argument("--adapter", type=Path, metavar="PATH", help="a PEFT adapter for the lora rows")
    gap.add_argument(
        "--precision", action="append", choices=("lora", "bf16", "mxfp8"), help="only this; may be repeated"
    )
    gap.add_argument("--prompts", type=int, default=64, metavar="N", help="prompts to sample one response for (64)")
    gap.add_argument("--explain", action="store_true", help="say where the gap comes from")
    gap.add_argument("--json", action="store_true", help="print JSON instead of the table")
    gap.set_defaults(run=gap_command)

    report = commands.add_parser("report", help="write a run's report.html", description="Write RUN/report.html.")
    report.add_argument("folder", metavar="RUN", type=Path)
    report.set_defaults(run=report_command)

    export = commands.add_parser(
        "export", help="write a run's checkpoint in HF format", description="Write RUN's last checkpoint as HF files."
    )
    export.add_argument("folder", metavar="RUN", type=Path)
    export.add_argument("--out", type=Path, help="folder to write; default RUN/export")
    export.set_defaults(run=export_command)

    eval_options.add_commands(commands)
    serve_options.add_commands(commands)

    doctor = commands.add_parser("doctor", help="check this machine", description="Check this machine.")
    doctor.set_defaults(run=doctor_command)
    return root


def train_command(options: argparse.Namespace) -> int:
    from beam_rl import checks, inputs, recipe

    path, overrides = options.recipe, list(options.overrides)
    if options.resume is not None:
        if path is not None and "=" in path:  # `train --resume RUN key=value`
            path, overrides = None, [path, *overrides]
        if not (options.resume / "recipe.yaml").is_file():
            raise BadInput(f"--resume {options.resume}: not a run folder (it has no recipe.yaml).")
        path = path or options.resume / "recipe.yaml"
    if path is None:
        raise BadInput("train: name a recipe, for example recipes/quickstart.yaml.")
    loaded = recipe.load(path, overrides, run_dir=options.resume)
    checks.settings(loaded)
    checks.folder(loaded, resume=options.resume is not None)
    if options.dry_run:
        if loaded.model_path is not None:
            inputs.load(loaded, lambda line: print(line, file=sys.stderr))  # standard output is the recipe
        print(loaded.to_yaml(), end="")
        return 0
    from beam_rl import run

    return run.train(loaded, resume=options.resume is not None)


def score_command(options: argparse.Namespace) -> int:
    for option, path in (("MODEL", options.model / "config.json"), ("--tokens", options.tokens)):
        if not path.is_file():
            raise BadInput(f"{option}: {path}: no such file.")
    from beam_rl import scoring

    scoring.score(options.model, options.tokens, options.side, options.dtype, options.replay, options.out)
    return 0


def gap_command(options: argparse.Namespace) -> int:
    from beam_rl import checks, recipe

    loaded = recipe.load(options.recipe, list(options.overrides))
    checks.settings(loaded)
    if options.prompts < 1:
        raise BadInput(f"--prompts {options.prompts}: must be at least 1.")
    if options.adapter is not None and not (options.adapter / "adapter_config.json").is_file():
        raise BadInput(f"--adapter {options.adapter}: not a PEFT adapter (it has no adapter_config.json).")
    from beam_rl import gap_command

    return gap_command.run(
        loaded,
        model=options.model,
        adapter=options.adapter,
        precisions=options.precision,
        prompts=options.prompts,
        explain=options.explain,
        as_json=options.json,
    )


def report_command(options: argparse.Namespace) -> int:
    if not (options.folder / "metrics.jsonl").is_file():
        raise BadInput(f"{options.folder}: not a run folder (it has no metrics.jsonl).")
    from beam_rl.report import write_report

    print(write_report(options.folder))
    return 0


def export_command(options: argparse.Namespace) -> int:
    if not (options.folder / "recipe.yaml").is_file():
        raise BadInput(f"{options.folder}: not a run folder (it has no recipe.yaml).")
    from beam_rl import scoring

    print(scoring.export(options.folder, options.out))
    return 0


def doctor_command(options: argparse.Namespace) -> int:
    from beam_rl import doctor

    return doctor.check()


if __name__ == "__main__":
    sys.exit(main())
