"""Checks and timings that need a GPU: `python -m tests.gpu.run [NAME …] [--out results.json]`, all of them by default.

Every part checks first, then times; a line each, and everything as JSON. Nothing here runs in CI, which has no GPU.
"""

import argparse
import importlib
import json
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

PARTS = ("kernels", "parity", "graphs", "training", "rollout", "cache", "speculation", "serve", "moe", "sync", "nccl")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="write the results as JSON, anew with every one")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{results['device']}, torch {torch.__version__}")
    failed = False
    for name in options.names or PARTS:
        found = results[name] = {}
        try:
            importlib.import_module(f"tests.gpu.{name}").run(partial(report, results, options.out, name))
        except Exception:  # the other parts are run all the same
            failed = True
            traceback.print_exc()
            found["failed"] = traceback.format_exc()
            write(results, options.out)
    return int(failed)


def report(results: dict[str, Any], out: Path | None, part: str, key: str, value: Any) -> None:
    """Print one result, and keep it: whoever stops a part early has what was measured by then."""
    results[part][key] = value
    write(results, out)
    shown = value
    if isinstance(value, float):
        shown = f"{value:.4g}"
    elif isinstance(value, list):
        shown = f"{len(value)} lines, in the JSON file"
    print(f"{part:<11} {key:<64} {shown}", flush=True)


def write(results: dict[str, Any], out: Path | None) -> None:
    """The results so far, as JSON; the file is whole whenever the process is stopped."""
    if out is not None:
        beside = out.with_name(f"{out.name}.new")
        beside.write_text(json.dumps(results, indent=1))
        beside.replace(out)


if __name__ == "__main__":
    sys.exit(main())
