"""Canaries of `trainer.cpu`: each fails when a new Megatron-Core makes an entry of that module wrong or unnecessary."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from beam_rl.trainer import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU module is inert with CUDA")

# The parts of Megatron that a training step of ours walks through.
PATH = (
    *("distributed/*.py", "optimizer/*.py", "pipeline_parallel/*.py", "dist_checkpointing/**/*.py"),
    *("tensor_parallel/*.py", "transformer/*.py", "transformer/moe/*.py"),
)


def megatron_source() -> str:
    root = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations))) / "core"
    return "\n".join(path.read_text() for pattern in PATH for path in sorted(root.glob(pattern)))


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)


def test_every_stub_still_stands_for_a_call_of_megatron():
    source = megatron_source()
    unused = [name for name in cpu.STUBS if f"torch.cuda.{name}" not in source and f"cuda.{name}" not in source]
    assert unused == []


@pytest.mark.parametrize("name", sorted(cpu.REPLACED))
def test_replaced_functions_keep_megatrons_signature(name):
    cpu.install()
    module, _, function = name.rpartition(".")
    ours = getattr(importlib.import_module(module), function)
    assert ours is cpu.REPLACED[name]
    kinds = [[(p.name, p.kind) for p in inspect.signature(f).parameters.values()] for f in (ours, cpu.ORIGINALS[name])]
    assert kinds[0] == kinds[1]


def test_megatron_still_gives_tensors_for_split_sizes_without_cuda():
    """`all_to_all_single` takes lists or arrays; Megatron converts only CUDA tensors. If it learns to, drop ours."""
    cpu.install()
    name = "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu"
    assert torch.is_tensor(cpu.ORIGINALS[name](torch.tensor([1]), as_numpy=True))
    assert cpu.REPLACED[name](torch.tensor([3, 4]), as_numpy=True).tolist() == [3, 4]
    assert torch.is_tensor(cpu.REPLACED[name](torch.tensor([3, 4])))


def test_megatron_still_spawns_a_process_for_the_write_queue():
    cpu.install()
    name = "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue"
    assert "Manager()" in inspect.getsource(cpu.ORIGINALS[name])


UNEQUAL = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
parts = [torch.zeros(2), torch.zeros(3)]
try:
    dist.all_gather(parts, parts[rank])
except RuntimeError as error:
    assert "size" in str(error), error
else:
    sys.exit("gloo gathers parts of unequal sizes: drop ours")
"""


def test_gloo_still_gathers_parts_of_one_size_only(tmp_path):
    command = [sys.executable, "-c", UNEQUAL, str(tmp_path / "store")]
    processes = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


@pytest.mark.parametrize("literal", ['device="cuda"', "device='cuda'", "== 'torch.cuda.FloatTensor'"])
def test_megatron_still_writes_cuda_by_name(literal):
    assert literal in megatron_source()


def test_cuda_means_cpu_only_inside_the_mode():
    with cpu.cuda_as_cpu():
        made = torch.zeros(2, device="cuda")
        assert made.device.type == "cpu"
        assert made.type() == "torch.cuda.FloatTensor"
        with cpu.without_mode():
            assert made.type() == "torch.FloatTensor"
    assert made.type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_install_imports_megatron_without_a_compiler_and_is_idempotent():
    code = (
        "import sys, torch\nfor name in ('current_device', 'current_stream', 'get_rng_state'):\n"
        "    try: getattr(torch.cuda, name)()\n    except (RuntimeError, AssertionError): continue\n"
        "    sys.exit(name + ' works without CUDA: drop its stub')\n"
        "from beam_rl.trainer import cpu\ncompile_ = torch.compile\ncpu.install(); cpu.install()\n"
        "import megatron.core.optimizer, megatron.core.models.gpt.gpt_model\n"
        "assert 'torch._dynamo' not in sys.modules and torch.compile is compile_\n"
        "assert not torch.cuda.is_available() and torch.cuda.current_device() == torch.device('cpu')"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert "not installed" not in result.stderr


def test_megatron_random_states_fork_and_return():
    """Megatron's tracker gives each named stream its own state; the CPU generator must come back as it was."""
    cpu.install()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.manual_seed(1)
    before = torch.get_rng_state()
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    with tracker.fork():
        first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3))
    torch.set_rng_state(before)
    with tracker.fork():
        assert not torch.equal(first, torch.rand(3))
    assert torch.equal(before, torch.get_rng_state())
