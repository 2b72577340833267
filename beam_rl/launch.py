"""Start Ray for a run: on this machine, or joining a cluster that is there already."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from beam_rl.recipe import Recipe
from beam_rl.rollout.profile import CPU_ENVIRONMENT

QUIET_ENVIRONMENT = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray must not hide devices from actors without a GPU
}
RAY_CONFIG = {
    "prestart_worker_first_driver": False,  # idle workers cost start-up time
    "enable_worker_prestart": False,
    "worker_niceness": 0,  # Ray's default of 15 lets the driver, which waits most of the time, starve the workers
}
OBJECT_STORE_BYTES = 256 * 2**20


def environment(recipe: Recipe, log_dir: Path) -> dict[str, str]:
    """Variables that all of the run's processes need; values that the user has set win."""
    wanted = dict(QUIET_ENVIRONMENT)
    if recipe.beam.device == "cpu":
        wanted |= CPU_ENVIRONMENT | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}  # it keeps code for every batch's shape
    wanted["SKYRL_LOG_FILE"] = str(log_dir / "workers.log")  # SkyRL's actors write their output there
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


@contextmanager
def ray_session(recipe: Recipe, temp_dir: Path, log_dir: Path) -> Iterator[None]:
    """Ray for the length of the block. On a cluster (`beam.ray_address`) only this driver's actors end with it."""
    variables = environment(recipe, log_dir)
    os.environ.update(variables)  # inherited by everything started here: no runtime environment, no agent to build it
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if recipe.beam.ray_address is not None:
        ray.init(address=recipe.beam.ray_address, runtime_env={"env_vars": variables}, log_to_driver=False)
    else:
        devices = recipe.world_size + recipe.reference_size + 1  # one is the engine's
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, devices + 2),  # logical: Ray counts actors, SkyRL's too, and pins none
            num_gpus=devices if recipe.beam.device == "cpu" else None,
            object_store_memory=OBJECT_STORE_BYTES if recipe.beam.device == "cpu" else None,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(temp_dir),
            _system_config=RAY_CONFIG,
        )
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end the driver without a word
    try:
        yield
    finally:
        ray.shutdown()
