"""A run that ends with many requests under way: none of them outlives its event loop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DRIVER = """
import asyncio, socket, sys
from pathlib import Path

from beam_rl import cli, lifetime, run

lifetime.TOGETHER_SECONDS = 60.0  # however busy the machine is
recipe, ready, case = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
engine = socket.create_server(("127.0.0.1", 0), backlog=256)  # accepts, and never answers
url = f"http://127.0.0.1:{engine.getsockname()[1]}"

async def loop(trainer):
    from tqdm.asyncio import tqdm

    async def request(index):
        try:
            await trainer.inference_engine_client._post(f"{url}/skyrl/v1/generate", {"token_ids": [index]})
        finally:
            if case == "release":  # as of a session, by a router that does not answer
                await asyncio.sleep(600)

    async def fail():
        await asyncio.sleep(1)
        raise RuntimeError("a request failed")

    steps = tqdm(total=4)
    asyncio.get_running_loop().call_later(1, ready.touch)
    await tqdm.gather(*map(request, range(2048)), *([fail()] if case == "error" else []))

def without_ray(recipe, inputs, temp_dir, console, started):
    from skyrl.train.trainer import RayPPOTrainer
    from beam_rl.client import BatchingClient
    from beam_rl.experiment import BeamExperiment
    from beam_rl.training import BeamTrainer

    class Experiment(BeamExperiment):
        def _setup_trainer(self):
            trainer = BeamTrainer.__new__(BeamTrainer)
            trainer.inference_engine_client = BatchingClient(url)
            trainer.unpublished = None
            return trainer

    RayPPOTrainer.train = loop
    with console.phase("evaluation", 2048):
        Experiment.__new__(Experiment).run()

run.run = without_ray
sys.exit(cli.main(["train", recipe]))
"""


@pytest.mark.parametrize(
    ("case", "signals"),
    [
        ("timeout", ["SIGTERM", "SIGTERM"]),  # it signals its child, then the group
        ("release", ["SIGINT", "SIGINT"]),  # as of `timeout -s INT`, while the first one is being obeyed
        ("Ctrl-C", ["SIGINT"]),
        ("release", ["SIGTERM"]),
        ("error", []),
    ],
)
def test_no_traceback_follows_the_last_message(
    case: str, signals: list[str], content: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    """Requests that outlived the event loop were collected after the message, with a traceback of each."""
    script, ready = tmp_path / "driver.py", tmp_path / "ready"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(write(content)), str(ready), case]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not ready.exists() and driver.poll() is None:
        time.sleep(0.05)
    for name in signals:
        os.kill(driver.pid, getattr(signal, name))
        time.sleep(0.02)
    try:
        out, err = driver.communicate(timeout=60)
    finally:
        driver.kill()
    _, _, end = out.partition("evaluation: stopped")
    logs = tmp_path / "run" / "logs"
    failed = ["the run failed: RuntimeError: a request failed", f"logs: {logs}"]
    assert end.splitlines()[1:] == (["interrupted; no checkpoint was written yet"] if signals else failed)
    assert err == ""
    assert driver.returncode == 1
    log = (logs / "driver.log").read_text()
    for trace in ("Event loop is closed", "never awaited", "it is pending"):
        assert trace not in log
