"""Every parallel layout computes, saves and resumes what one process does: with R3, packed or not, recomputed or not.

Two and four processes are started once and run everything (`layouts_ranks.py`); each test looks at one thing.
"""

import subprocess
import sys
import time

import pytest
import torch

from beam_rl.trainer.engine import Parallel, Sequence

LAYOUTS = ("tp2", "tp2-ep2", "pp2", "ep2", "cp2", "dp2", "tp2-ep2-etp2", "pp2-ep2", "ep2-cp2")
"""Of `layouts_ranks.py`, as are the variants."""
VARIANTS = (
    "packed",
    "one sample a micro batch",
    "packed, recomputed",
    "one sample a micro batch, recomputed",
)


def sample(text, start, length, seed, gaps=False):
    """A sample with foreign routes, some of them missing if `gaps`, and its fields."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(length - 1)
    mask[: length // 3] = 0
    routes = torch.rand(length - 1, 8, 16, generator=generator).topk(4, -1).indices.to(torch.uint8)
    captured = None
    if gaps:
        captured = torch.arange(length - 1) % 4 != 1
        routes[~captured] = 0
    old = -3 * torch.rand(length - 1, generator=generator) - 4
    fields = {"advantages": torch.randn(length - 1, generator=generator), "old_logprobs": old}
    fields |= {"weight": 1 + torch.rand(length - 1, generator=generator), "rollout_logprobs": old, "base_logprobs": old}
    return Sequence(text[start : start + length].clone(), mask, routes=routes, captured=captured, fields=fields)


@pytest.fixture(scope="module")
def one(ranks, golden, tmp_path_factory):
    """A folder with the model, the samples and a checkpoint of one process; its values; what it does from there.

    The first two samples have the same tokens and contradictory routes; they never share a micro batch.
    """
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "model").symlink_to(golden("tiny"))
    text = torch.randint(3, 256, (400,), generator=torch.Generator().manual_seed(5))
    shapes = [(0, 31), (0, 31), (40, 2), (50, 25), (80, 17), (100, 33), (140, 11), (160, 40), (210, 5), (220, 19)]
    samples = [sample(text, start, length, i, gaps=i in (3, 5)) for i, (start, length) in enumerate(shapes)]
    torch.save(samples, folder / "samples.pt")
    engine = ranks.build(folder / "model", Parallel())
    whole = ranks.values(engine, samples)
    clipped = ranks.dual_clip(engine, samples)
    ranks.train(engine, samples, 2)
    extra = {"stream": {"drawn": 20}, "step": 2}
    engine.save(folder / "one" / "step_2", extra)
    steps = ranks.train(engine, samples, 2)
    return {
        "folder": folder,
        "samples": samples,
        "whole": whole,
        "dual clip": clipped,
        "resume": {"steps": steps, "weights": ranks.weights(engine), "extra": extra},
    }


@pytest.fixture(scope="module")
def started(ranks, one):
    """Runs all layouts of so many processes, once; the processes' output."""
    outputs = {}

    def run(count):
        if count not in outputs:
            outputs[count] = run_ranks(ranks.__file__, one["folder"], count)
        return outputs[count]

    return run


def run_ranks(script, folder, count):
    """The output of `count` processes of the script; when one fails, the others are ended."""
    logs = [folder / f"{count}.{rank}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, script, str(folder), str(rank), str(count)]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file))
    try:
        while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request, ranks, one, started):
    """Name of a layout, and what its processes found."""
    output = started(ranks.LAYOUTS[request.param][0])
    report = one["folder"] / f"{request.param}.pt"
    assert report.exists(), output
    return request.param, torch.load(report, weights_only=False)


def assert_gradients(found, expected):
    """Relative error of each tensor; those of a few numbers next to nothing have only the noise of the whole."""
    assert found.keys() == expected.keys()
    noise = 1e-7 * max(float(tensor.norm()) for tensor in expected.values())
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm())
        assert error <= 1e-4 * float(tensor.norm()) + noise, f"{name}: {error:.2e} of {float(tensor.norm()):.2e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_routes_loss_and_gradients_are_those_of_one_process(run, one, variant):
    found, expected = run[1][variant], one["whole"]
    for name in ("logprobs", "entropies"):
        for ours, theirs in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    for ours, theirs in zip(found["routes"], expected["routes"], strict=True):
        assert torch.equal(ours, theirs)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert_gradients(found["gradients"], expected["gradients"])


def test_the_routes_used_are_the_rollouts(one):
    """Every captured row, in every sparse layer; and two samples of the same tokens keep their own."""
    for sequence, used in zip(one["samples"], one["whole"]["routes"], strict=True):
        captured = slice(None) if sequence.captured is None else sequence.captured
        assert torch.equal(used[:-1, 2:][captured], sequence.routes[:, 2:][captured].to(torch.int16))
    first, second = one["whole"]["logprobs"][:2]
    assert float((first - second).abs().max()) > 1e-3


def test_a_checkpoint_of_one_process_continues_in_the_layout(run, one):
    assert_continues(run[1]["resume"], one["resume"])
    assert run[1]["resume"]["extra"] == one["resume"]["extra"]


def test_a_resume_in_the_layout_is_exact(run):
    """Its checkpoint was written while training went on: the steps after it must not be in it."""
    assert run[1]["resume"]["exact"]


def test_a_checkpoint_of_the_layout_continues_in_one_process(ranks, run, one):
    engine = ranks.build(one["folder"] / "model", Parallel())
    assert engine.load(one["folder"] / run[0] / "step_2") == one["resume"]["extra"]
    steps = ranks.train(engine, one["samples"], 2)
    assert_continues({"steps": steps, "weights": ranks.weights(engine)}, one["resume"])


def assert_continues(found, expected):
    """The same next losses and gradients, and the same weights after them, within float32 noise."""
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_the_workers_dual_clip_loss_counts_the_tokens_of_all_replicas(run, one):
    metrics, found = run[1]["dual clip"]
    assert metrics == pytest.approx(one["dual clip"][0], rel=1e-5)
    assert_gradients(found, one["dual clip"][1])
