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

PARTS = ("kernels", "parity", "training")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
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
        found: dict[str, Any] = {}
        try:
            importlib.import_module(f"tests.gpu.{name}").run(partial(report, found, name))
        except Exception:  # the other parts are run all the same
            failed = True
            traceback.print_exc()
            found["failed"] = traceback.format_exc()
        results[name] = found
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    return int(failed)


def report(to: dict[str, Any], part: str, key: str, value: Any) -> None:
    """Print one result, and keep it."""
    to[key] = value
    print(f"{part:<9} {key:<44} {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
