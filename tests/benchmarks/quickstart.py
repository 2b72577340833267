"""Time and memory of the quickstart, phase by phase: `make bench`.

Runs recipes/quickstart.yaml twice in fresh folders, first with nothing cached, then with the warmed-up tiny model in
the cache, and prints what each took. Meant for an otherwise idle machine; it asserts nothing.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("beam-rl")
LIMITS = {"whole": 600.0, "startup_seconds": 75.0, "step_seconds_median": 2.5, "peak_rss_gib": 8.0}
"""What the quickstart promises on two idle cores."""


def run(folder: Path, cache: Path, overrides: list[str]) -> dict[str, Any]:
    """One run of the recipe; its summary with the wall time of the whole command added."""
    start = time.perf_counter()
    settings = [f"beam.run_dir={folder}", f"beam.tiny.cache_dir={cache}", *overrides]
    subprocess.run([COMMAND, "train", "recipes/quickstart.yaml", *settings], cwd=ROOT, check=True)
    whole = time.perf_counter() - start
    return json.loads((folder / "summary.json").read_text()) | {"whole": whole}


def row(name: str, value: float, unit: str, limit: float | None = None) -> str:
    """One line of the table."""
    return f"{name:<44}{value:>9.2f} {unit:<4}" + ("" if limit is None else f"  limit {limit:g}")


def main() -> None:
    overrides = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="beam-rl-bench-") as temporary:
        base = Path(temporary)
        cold = run(base / "cold", base / "cache", overrides)
        warm = run(base / "warm", base / "cache", overrides)
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    print(row("first quickstart, nothing cached", cold["whole"], "s", LIMITS["whole"]))
    print(row("second quickstart, tiny model cached", warm["whole"], "s"))
    print(row("recipe start to first training step, cached", warm["startup_seconds"], "s", LIMITS["startup_seconds"]))
    for label, summary in (("cold", cold), ("warm", warm)):
        print(row(f"{label}: median step", summary["step_seconds_median"], "s", LIMITS["step_seconds_median"]))
        memory = summary["peak_rss_bytes"] / 2**30
        print(row(f"{label}: peak resident memory", memory, "GiB", LIMITS["peak_rss_gib"]))
        for name, seconds in summary["phase_seconds"].items():
            peak = summary["phase_peak_rss_bytes"].get(name)
            print(row(f"  {name}", seconds, "s") + (f"  peak {peak / 2**30:.2f} GiB" if peak else ""))
        for name, seconds in summary["seconds_by_phase"].items():
            print(row(f"    of the steps: {name}", seconds, "s"))


if __name__ == "__main__":
    main()
