"""Run by `test_lora_layouts.py` in several processes: adapters in every layout against the values of one process."""

import json
import sys
from pathlib import Path

import torch

from beam_rl.trainer import cpu

cpu.install()  # before Megatron is imported

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import shard_buffer  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from beam_rl.model.config import load_config  # noqa: E402
from beam_rl.model.lora_config import LoraConfig  # noqa: E402
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Parallel, Sequence, TrainerEngine  # noqa: E402

LORA = LoraConfig(r=8, lora_alpha=16)
LAYOUTS = {
    2: ({"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"ep": 2}, {"pp": 2}, {"cp": 2}),
    4: ({"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"ep": 2, "etp": 2}),
}
"""By number of processes; what remains of them is data parallelism."""


def weighted_loss(logprobs, fields, loss_mask, entropy):
    return -(logprobs * fields["weight"] * loss_mask).sum() / 100, {}


def read_samples(file: Path) -> list[Sequence]:
    return [
        Sequence(torch.tensor(tokens), torch.tensor(mask), fields={"weight": torch.tensor(weight)})
        for tokens, mask, weight in json.loads(file.read_text())
    ]


def build(model: Path, layout: dict[str, int], recompute: str | None = None) -> TrainerEngine:
    settings = EngineConfig(
        dtype="float32",
        parallel=Parallel(**layout),
        optimizer=OptimizerSettings(lr=1e-3),
        micro_batch_tokens=64,
        recompute=recompute,  # type: ignore[arg-type]
        lora=LORA,
    )
    engine = TrainerEngine(settings)
    engine.build(load_config(model))
    engine.load_hf(model)
    return engine


def adapter_gradients(engine: TrainerEngine) -> dict[str, torch.Tensor]:
    """Accumulated gradients under PEFT's names; each replica holds the sum of a part of every buffer only."""
    for chunk in engine.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    parameters = [p for model in engine.models for p in model.parameters() if p.requires_grad]
    kept = [p.data.clone() for p in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    result = {name: tensor.clone() for name, tensor in engine.export_adapter()}
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data.copy_(data)
    return result


def values(engine: TrainerEngine, samples: list[Sequence]) -> dict[str, torch.Tensor]:
    """What must not depend on the layout: the fingerprint, merged weights, gradients, their norm, and one step."""
    result = {f"before.{name}": tensor.clone() for name, tensor in engine.export()}
    engine.forward_backward(samples, weighted_loss, replay=False)
    result |= {f"grad.{name}": tensor for name, tensor in adapter_gradients(engine).items()}
    result["norm"] = torch.tensor(engine.optimizer_step()["grad_norm"])
    return result | {f"after.{name}": tensor.clone() for name, tensor in engine.export()}


def check(layout: dict[str, int], folder: Path) -> None:
    samples = read_samples(folder / "samples.json")
    expected = load_file(folder / "expected.safetensors")
    for recompute in (None, "full"):
        engine = build(folder / "model", layout, recompute)
        where = f"{layout}, recompute {recompute}"
        assert engine.base == (folder / "fingerprint").read_text(), where
        for name, tensor in engine.export_adapter():
            assert torch.equal(tensor, expected[f"fresh.{name}"]), f"{where}: {name}"
        engine.load_adapter(folder / "adapter")
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = range(replica, len(samples), replicas)
        scores = engine.forward_logprobs([samples[i] for i in mine], replay=False)
        for i, score in zip(mine, scores, strict=True):
            assert (score - expected[f"logprobs.{i}"]).abs().max() <= 2e-5, f"{where}: log-probs of sample {i}"
        found = values(engine, [samples[i] for i in mine])
        assert set(found) == {name for name in expected if not name.startswith(("logprobs.", "fresh."))}, where
        for name, tensor in found.items():
            error = (tensor - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)
            assert error <= 1e-4, f"{where}: {name} is off by {error:.1e}"
        if recompute is None and dist.get_rank() == 0:
            print(where, "passed", flush=True)
    adapter = folder / "-".join(f"{axis}{size}" for axis, size in layout.items())
    engine.save_adapter(adapter)
    again = build(folder / "model", layout)
    again.load_adapter(adapter)
    for (name, tensor), (_, other) in zip(again.export_adapter(), engine.export_adapter(), strict=True):
        assert torch.equal(tensor, other), f"{where}: {name}"
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for each in LAYOUTS[dist.get_world_size()]:
        check(each, Path(sys.argv[1]))
    dist.destroy_process_group()
