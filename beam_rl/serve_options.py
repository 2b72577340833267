"""The options of `beam-rl serve`, `beam-rl swap` and `beam-rl tune-moe`."""

import argparse
from pathlib import Path
from typing import Any

from beam_rl import secret


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    _add_serve(commands)
    _add_swap(commands)
    _add_tune(commands)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        description="Serve a checkpoint: an OpenAI-compatible vLLM server whose weights can be exchanged under load.",
        epilog="The admin token opens everything beyond the data plane, for `beam-rl swap`; without one it is closed.",
    )
    serve.add_argument("model", metavar="MODEL", type=Path, help="checkpoint folder")
    serve.add_argument(
        "--profile", default="beam", metavar="P", help="beam (the default), latency, throughput, or a YAML file"
    )
    serve.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter of this model, to speculate with")
    serve.add_argument("--moe-configs", type=Path, metavar="DIR", help="what `beam-rl tune-moe` wrote for this card")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--name", help="the model's name in requests; default: the folder's")
    serve.add_argument("--admin-token-file", type=Path, metavar="FILE", help=f"else {secret.ADMIN_VARIABLE}")
    serve.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"key of the data plane; else {secret.KEY_VARIABLE}"
    )
    serve.add_argument("--health", choices=("open", "admin"), default="open", help="who may ask /health (open)")
    serve.add_argument("--metrics", choices=("open", "admin"), default="admin", help="who may ask /metrics (admin)")
    serve.add_argument("--max-body", type=int, default=16, metavar="MIB", help="largest request body (16)")
    serve.add_argument("--body-timeout", type=float, default=30, metavar="S", help="time for a body to arrive (30)")
    serve.add_argument(
        "--store", type=Path, metavar="DIR", help="where the served weights and those before are kept (/dev/shm)"
    )
    serve.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="more of vLLM's arguments")
    serve.set_defaults(run=_serve)


def _add_swap(commands: Any) -> None:
    swap = commands.add_parser(
        "swap",
        help="exchange the weights of running servers",
        description="Exchange the weights of servers that `beam-rl serve` started, on all of them or on none.",
        epilog="WEIGHTS must lie on the servers' hosts under the same path: they read the files themselves.",
    )
    swap.add_argument(
        "weights", metavar="WEIGHTS", nargs="?", type=Path, help="a checkpoint, a training run or a PEFT adapter"
    )
    swap.add_argument("--endpoint", action="append", required=True, metavar="URL", help="a server; may be repeated")
    what = swap.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="show what the servers serve")
    what.add_argument("--rollback", action="store_true", help="go back to the version before")
    what.add_argument("--remove-adapter", action="store_true", help="go back to the weights below the adapter")
    what.add_argument("--dry-run", action="store_true", help="verify everything, change nothing")
    swap.add_argument("--label", help="name of the version; default: its step, or the folder's name")
    swap.add_argument("--drain", type=float, metavar="S", help="let requests finish first, for at most S seconds")
    swap.add_argument("--tolerance", type=float, metavar="T", help="largest mean difference of the probe's log-probs")
    swap.add_argument("--no-fingerprint", action="store_true", help="do not compute one for weights that have none")
    swap.add_argument("--allow-older", action="store_true", help="take an earlier step of the run that is served")
    swap.add_argument("--lease", type=float, default=60, metavar="S", help="a dead client blocks others so long (60)")
    swap.add_argument("--timeout", type=float, default=600, metavar="S", help="longest wait for an answer (600)")
    swap.add_argument("--admin-token-file", type=Path, metavar="FILE", help=f"else {secret.ADMIN_VARIABLE}")
    swap.add_argument("--json", action="store_true", help="print the report as JSON")
    swap.set_defaults(run=_swap)


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune-moe",
        help="tune vLLM's MoE kernel for a model on this GPU",
        description="Time tile sizes of vLLM's MoE kernel for a model's shape on this GPU, and write the table that "
        "vLLM looks up, for `beam-rl serve --moe-configs DIR` and VLLM_TUNED_CONFIG_FOLDER=DIR.",
        epilog="A second run finds the kernels that the first compiled, and tries more in the same time.",
    )
    tune.add_argument("model", metavar="MODEL", type=Path, help="checkpoint folder; only its config.json is read")
    tune.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of tables, one a shape and card")
    tune.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share every expert (1)")
    tune.add_argument("--seconds", type=float, default=60, metavar="S", help="time for everything (60)")
    tune.set_defaults(run=_tune)


def _serve(options: argparse.Namespace) -> int:
    from beam_rl import serve_command

    return serve_command.run(options)


def _swap(options: argparse.Namespace) -> int:
    from beam_rl import swap_command

    return swap_command.run(options)


def _tune(options: argparse.Namespace) -> int:
    from beam_rl import tune_command

    return tune_command.run(options)
