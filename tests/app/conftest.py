"""A checkpoint and problems that are right, for tests that then break one thing at a time; and a run's processes."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml


class Descendants:
    """All processes that a driver has started, directly or not, as far as they were seen; any may end at any time."""

    def __init__(self, driver: "subprocess.Popen[bytes]") -> None:
        self.driver = psutil.Process(driver.pid)
        self.seen: set[psutil.Process] = set()

    def look(self) -> None:
        try:
            self.seen |= set(self.driver.children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def running(self, word: str) -> psutil.Process | None:
        """One that lives and has `word` in its command line."""
        self.look()
        return next((process for process in self.seen if word in command_line(process)), None)

    def alive(self, patience: float = 60) -> list[str]:
        """Command lines of those that are still there after `patience` seconds."""
        end = time.monotonic() + patience
        while (left := [line for line in map(command_line, self.seen) if line]) and time.monotonic() < end:
            time.sleep(0.1)
        return left


def command_line(process: psutil.Process) -> str:
    """Empty if the process has ended, also where nobody has waited for it."""
    try:
        lives = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return " ".join([process.name(), *process.cmdline()]) if lives else ""
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture(scope="session")
def descendants() -> type[Descendants]:
    """Follows the processes that another one starts."""
    return Descendants


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Beam with its tokenizer, and `train.jsonl` and `held_out.jsonl` beside it."""
    import torch

    from beam_rl import tiny
    from beam_rl.evals.arithmetic import ArithmeticSpec, generate, write_rows
    from beam_rl.model.checkpoint import save_hf
    from beam_rl.model.config import BeamConfig
    from beam_rl.model.tensors import initial_tensors

    folder = tmp_path_factory.mktemp("tiny")
    config = BeamConfig(**tiny.ARCHITECTURE, architectures=["BeamForCausalLM"], dtype="bfloat16")
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    save_hf(folder / "model", config, initial_tensors(config, 1, torch.bfloat16), copy_from=folder / "tokenizer")
    split = generate(1, 64, 64, ArithmeticSpec())
    write_rows(folder / "train.jsonl", split.train)
    write_rows(folder / "held_out.jsonl", split.held_out)
    return folder / "model"


@pytest.fixture
def content(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    """A small, right recipe as nested mappings."""
    return {
        "trainer": {
            "policy": {"model": {"path": str(checkpoint)}, "optimizer_config": {"lr": 1e-4, "num_warmup_steps": 0}},
            "train_batch_size": 8,
            "policy_mini_batch_size": 4,
            "max_prompt_length": 32,
            "max_tokens_per_microbatch": 4096,
            "max_training_steps": 3,
            "eval_interval": 100,
            "eval_before_train": False,
            "ckpt_interval": 1,
        },
        "generator": {
            "n_samples_per_prompt": 4,
            "eval_n_samples_per_prompt": 2,
            "sampling_params": {"max_generate_length": 16},
        },
        "data": {
            "train_data": [str(checkpoint.parent / "train.jsonl")],
            "val_data": [str(checkpoint.parent / "held_out.jsonl")],
        },
        "beam": {"overlong": {"buffer": 8}, "run_dir": str(tmp_path / "run")},
    }


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a recipe file and returns its path."""

    def to_file(content: dict[str, Any]) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return to_file


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
