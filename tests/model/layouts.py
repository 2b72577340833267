"""Run by `test_layouts.py` in two processes: every layout of two against the values of one."""

import sys
from pathlib import Path

import torch

from beam_rl.trainer import cpu

cpu.install()  # before Megatron is imported

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from beam_rl.model.batch import PackedBatch  # noqa: E402
from beam_rl.model.checkpoint import open_checkpoint  # noqa: E402
from beam_rl.model.gpt import build_model  # noqa: E402
from beam_rl.model.names import export_hf, load_hf  # noqa: E402
from beam_rl.model.transformer_config import transformer_config  # noqa: E402
from beam_rl.trainer import distributed  # noqa: E402
from beam_rl.trainer.settings import Parallel  # noqa: E402

LAYOUTS = ("tp ep", "tp etp", "ep", "pp")


def check(layout: str, folder: Path) -> None:
    """Logits, replayed and recorded routes, and the export."""
    sizes = dict.fromkeys(layout.split(), 2)
    distributed.initialize(Parallel(**sizes), seed=0)
    config, checkpoint = open_checkpoint(folder)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    with cpu.cuda_as_cpu():
        megatron = transformer_config(config, params_dtype=torch.float32, **sizes)
        model = build_model(megatron, pre_process=first, post_process=last)
    load_hf([model], checkpoint)
    expected = load_file(folder / "expected.safetensors")
    batch = PackedBatch.from_lengths(
        expected["lengths"].tolist(), routes=expected["routes"], captured=expected["captured"].bool(), record=True
    )
    with torch.no_grad():
        if not first:
            hidden = torch.empty(int(sum(batch.lengths)), 1, config.hidden_size)
            dist.recv(hidden, src=0)
            model.set_input_tensor(hidden)
        output = model(expected["tokens"], packed_seq_params=batch)
        if not last:
            dist.send(output, dst=1)
    for layer, ids in batch.recorded.items():
        assert torch.equal(ids, expected[f"recorded.{layer}"]), f"{layout}: routes of layer {layer}"
    if last:
        part = expected["logits"].chunk(sizes.get("tp", 1), dim=-1)[parallel_state.get_tensor_model_parallel_rank()]
        torch.testing.assert_close(output, part, atol=1e-5, rtol=0, msg=lambda text: f"{layout}: {text}")
    exported = dict(export_hf([model]))
    assert set(exported) == set(checkpoint.names()), layout
    for name, tensor in checkpoint.tensors(config):
        assert torch.equal(exported[name], tensor), f"{layout}: {name}"
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    for each in LAYOUTS:
        check(each, Path(sys.argv[1]))
    dist.destroy_process_group()
