"""The engine computes what the reference implementation computes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from beam_rl.model.checkpoint import open_checkpoint
from beam_rl.model.errors import BadInput
from beam_rl.trainer.engine import Sequence
from beam_rl.trainer.score import score

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["tiny", "groups", "long"])
def test_logprobs_and_routes_are_the_references(name, golden):
    expected = load_file(GOLDEN / name / "reference.safetensors")
    found = score(golden(name), expected["input_ids"], "float32")
    torch.testing.assert_close(found["token_logprobs"], expected["token_logprobs"], atol=2e-5, rtol=0)
    layers = [key for key in expected if key.startswith("routes.")]
    assert layers == sorted(key for key in found if key.startswith("routes."))
    for key in layers:
        assert found[key].dtype == torch.int16
        assert torch.equal(found[key].sort(-1).values, expected[key].sort(-1).values), key


def test_gradients_are_the_references(engine_for, reference, gradients):
    """Of -mean(token_logprobs); experts are stored one by one here and fused there, so their norms are joined."""
    engine = engine_for()
    samples = [Sequence(tokens=row, loss_mask=torch.ones(len(row) - 1)) for row in reference["input_ids"]]
    count = sum(len(s.loss_mask) for s in samples)
    metrics = engine.forward_backward(samples, lambda logprobs, *_: (-logprobs.sum() / count, {}), replay=False)
    assert metrics["loss"] == pytest.approx(float(-reference["token_logprobs"].mean()), abs=1e-5)
    found = gradients(engine)
    for key in (k for k in reference if k.startswith("grad.")):
        name, expected = key.removeprefix("grad."), reference[key]
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(name.rpartition(".")[2])
        if ".experts." in name and parts is not None:
            prefix = name.rpartition(".")[0]
            ours = torch.cat(
                [g.flatten() for n, g in found.items() if n.startswith(prefix) and n.split(".")[-2] in parts]
            )
        else:
            ours = found[name]
        ours = ours.norm()[None] if expected.shape != ours.shape else ours
        assert float((ours - expected).norm() / expected.norm()) < 1e-4, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_back_the_loaded_weights(dtype, engine_for, golden):
    config, checkpoint = open_checkpoint(golden("tiny"))
    loaded = dict(checkpoint.tensors(config))
    exported = dict(engine_for(dtype=dtype).export())
    assert exported.keys() == loaded.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, loaded[name].to(tensor.dtype)), name
    exact = [name for name, tensor in exported.items() if tensor.dtype == torch.float32]
    if dtype == "bfloat16":  # the router and its correction bias keep float32
        assert exact
        assert all(".mlp.gate." in name for name in exact)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids: ids[0], "expected integers"),
        (lambda ids: ids[:0], "expected integers"),
        (lambda ids: ids.float(), "expected integers"),
        (lambda ids: ids + 256, "vocab_size"),
    ],
)
def test_score_refuses_tokens_that_the_model_cannot_take(change, said, golden, reference):
    with pytest.raises(BadInput, match=said):
        score(golden("tiny"), change(reference["input_ids"]))


def test_score_refuses_incomplete_routes(golden, reference):
    routes = {f"routes.{layer}": reference[f"routes.{layer}"] for layer in range(2, 7)}
    with pytest.raises(BadInput, match=r"routes\.7 is missing"):
        score(golden("tiny"), reference["input_ids"], "float32", routes)
