"""`beam-rl serve`: a vLLM server of a checkpoint, behind the guard, whose weights `beam-rl swap` exchanges."""

import argparse
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from beam_rl import eval_server, lifetime, secret, watchdog
from beam_rl.model.config import load_config
from beam_rl.model.errors import BadInput
from beam_rl.rollout import serve_settings, swap_stage
from beam_rl.rollout.drafter import check_drafter
from beam_rl.rollout.profile import CPU_ENVIRONMENT, Device
from beam_rl.rollout.serve_profile import DRAFT_TOKENS, ServeProfile
from beam_rl.rollout.serve_settings import ServeSettings, write_private

GUARD = "beam_rl.rollout.serve_guard.Guard"
OURS = (
    "model", "host", "port", "middleware", "api_key", "weight_transfer_config", "scheduling_policy", "uds",
    "worker_extension_cls",
)  # fmt: skip
"""vLLM arguments that are not to be given with --engine."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", ".*")
"""Files of a checkpoint folder that the server's own copy of it leaves out."""
SHARED_MEMORY = Path("/dev/shm")


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted; 0 then, 1 if the server ends by itself."""
    if not (options.model / "config.json").is_file():
        raise BadInput(f"{options.model}: not a checkpoint folder (it has no config.json).")
    if not 1 <= options.port <= 65535:
        raise BadInput(f"--port {options.port}: give a number from 1 to 65535.")
    if options.max_body < 1 or not options.body_timeout > 0:
        raise BadInput("--max-body and --body-timeout must be positive.")
    where = eval_server.device()
    profile = _profile(options, where)
    extra = dict(map(eval_server.parsed, options.engine))
    for name in OURS:
        if name in extra:
            raise BadInput(f"--engine {name}: is beam-rl's to set.")
    admin = secret.read("--admin-token-file", options.admin_token_file, secret.ADMIN_VARIABLE)
    key = secret.read("--api-key-file", options.api_key_file, secret.KEY_VARIABLE)
    arguments, lost = profile.engine_args(where)
    for line in lost:
        say(f"not in effect: {line}")
    if admin is None:
        say("no admin token: nothing but the data plane answers, and the weights cannot be exchanged")
    if not _loopback(options.host) and key is None:
        say(f"listening on {options.host} without an API key: whoever reaches this address can use the model")
    with lifetime.bounded(Path(tempfile.gettempdir())) as folder, _stored(options, folder) as settings:
        for name, token in (("admin_token_file", admin), ("api_key_file", key)):
            if token is not None:
                write_private(folder / name, token)
                settings[name] = str(folder / name)
        ServeSettings(**settings).write(folder / "serve.json")
        command = _command(options, folder, settings, arguments | extra)
        environment = _environment(where, folder) | profile.environment(where)
        return _supervise(command, environment, f"http://{_connectable(options.host)}:{options.port}")


def _profile(options: argparse.Namespace, where: Device) -> ServeProfile:
    """The profile with what only this command line knows. Raises BadInput."""
    profile = ServeProfile.named(options.profile)
    if options.drafter is not None:
        profile = replace(profile, drafter=str(options.drafter), draft_tokens=profile.draft_tokens or DRAFT_TOKENS)
    if options.moe_configs is not None:
        profile = replace(profile, moe_configs=str(options.moe_configs.resolve()))
    if profile.moe_configs is not None and not Path(profile.moe_configs).is_dir():
        raise BadInput(f"moe_configs {profile.moe_configs}: no such folder; `beam-rl tune-moe` writes one.")
    if profile.drafter is not None and where == "gpu":
        check_drafter(Path(profile.drafter), load_config(options.model))
    return profile


@contextmanager
def _stored(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Pack the weights, and make the folder that vLLM reads: later changes of the checkpoint's do not matter."""
    store = options.store or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else folder)
    if not store.is_dir():
        raise BadInput(f"--store {store}: no such folder.")
    # The watchdog removes files in /dev/shm that bear the marker, should this process be killed.
    prefix = f"beam-serve-{socket.gethostname()}-{os.environ[watchdog.VARIABLE]}"
    initial = store / f"{prefix}-0.safetensors"
    try:
        version = swap_stage.describe(options.model, initial)
        model = folder / "model"
        shutil.copytree(options.model, model, ignore=shutil.ignore_patterns(*WEIGHTS), symlinks=False)
        (model / "model.safetensors").symlink_to(initial.resolve())
        say(f"{options.model} is version {version.name}")
        config = load_config(model)
        dtype = "float32" if str(config.dtype).endswith("float32") else "bfloat16"
        yield {
            "model": str(model), "store": str(store), "prefix": prefix, "initial": str(initial), "dtype": dtype,
            "health": options.health, "metrics": options.metrics,
            "max_body_bytes": options.max_body * 2**20, "body_seconds": options.body_timeout,
        }  # fmt: skip
    finally:
        for file in store.glob(f"{prefix}-*"):
            file.unlink(missing_ok=True)


def _command(options: argparse.Namespace, folder: Path, settings: dict[str, Any], engine: dict[str, Any]) -> list[str]:
    arguments = {
        "model": settings["model"],
        "served_model_name": options.name or options.model.resolve().name,
        "host": options.host,
        "port": options.port,
        "dtype": settings["dtype"],
        "middleware": GUARD,
        "enable_scale_out": True,  # /inference/v1/generate, token ids in and out; its other routes stay closed
        "disable_uvicorn_access_log": True,  # a request's path is the client's to choose: logs show none of it
    }
    if not any((folder / "model").glob("tokenizer*")):
        say("the checkpoint has no tokenizer: only /inference/v1/generate works, on token ids")
        arguments["skip_tokenizer_init"] = True
    return [sys.executable, "-m", eval_server.SERVER, *eval_server.options(arguments | engine)]


def _environment(where: Device, folder: Path) -> dict[str, str]:
    """The server's environment, without tokens."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_TOKEN", "_API_KEY"))}
    kept |= {"VLLM_NO_USAGE_STATS": "1", serve_settings.VARIABLE: str(folder / "serve.json")}
    if where == "cpu":
        kept |= {name: os.environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}
    return kept


def _supervise(command: list[str], environment: dict[str, str], url: str) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    ready = False
    try:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while process.poll() is None:
                if not ready:
                    ready = _answers(client, url)
                    if ready:
                        say(f"ready: {url}")
                time.sleep(0.5 if ready else eval_server.LOOK_SECONDS)
    except KeyboardInterrupt:
        say("stopping")
        return 0
    finally:
        eval_server.stop(process)
    say(f"the server ended by itself, with exit code {process.returncode}")
    return 1


def _answers(client: httpx.Client, url: str) -> bool:
    """Whether the server answers at all: it does so once the engine is ready, and /health may be closed."""
    try:
        client.get(f"{url}/health")
    except httpx.HTTPError:
        return False
    return True


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _connectable(host: str) -> str:
    """An address under which this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def say(line: str) -> None:
    """Tell the user, at once: the server's own log is on the same terminal."""
    print(f"beam-rl serve: {line}", flush=True)
