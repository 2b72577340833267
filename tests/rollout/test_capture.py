"""Captured routes are those the model took, however the engine scheduled the tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

SPARSE = (2, 3, 4, 5, 6, 7)


def chosen(routes: Any) -> NDArray[np.int64]:
    """Routes [tokens, layers, topk] of the sparse layers as sorted sets."""
    return np.sort(np.asarray(routes)[:, SPARSE].astype(np.int64), axis=-1)


def expected(reference: dict[str, Tensor], row: int, tokens: int) -> NDArray[np.int64]:
    """The reference router's choice for the first tokens of a row."""
    routes = np.stack([reference[f"routes.{layer}"][row, :tokens].numpy() for layer in SPARSE], axis=1)
    return np.sort(routes.astype(np.int64), axis=-1)


def test_dense_layers_do_not_shift_routes(
    engine: Any, prompts: list[list[int]], reference: Callable[[str], dict[str, Tensor]]
) -> None:
    """Also the chunked prefill: 96 prompt tokens are computed in steps of 64."""
    engine.reset_prefix_cache()
    for row, output in enumerate(engine.generate(prompts, tokens=1)):
        routes = output.outputs[0].routed_experts
        assert routes.shape == (96, 8, 4), "one row a token, the sampled one excepted, and one column a layer"
        assert routes.dtype == np.uint8
        assert not routes[:, :2].any(), "dense layers have no routes"
        assert np.array_equal(chosen(routes), expected(reference("tiny"), row, 96))


def test_prefix_cache_hits_bring_their_routes(
    engine: Any, prompts: list[list[int]], reference: Callable[[str], dict[str, Tensor]]
) -> None:
    engine.generate(prompts, tokens=1)
    for row, output in enumerate(engine.generate(prompts, tokens=1)):
        assert output.num_cached_tokens >= 64
        assert np.array_equal(chosen(output.outputs[0].routed_experts), expected(reference("tiny"), row, 96))


def test_preempted_requests_keep_their_routes_and_logprobs(engine: Any, prompts: list[list[int]]) -> None:
    """A preempted request is computed again from its start; the tokens scored once more, undisturbed, say the same.

    Log-probs are of the tokens as they were sampled, before and after a preemption; four samples share a prompt.
    """
    before = engine.preemptions()
    outputs = engine.generate([p[:40] for p in prompts], tokens=60, n=4, temperature=1.0)
    assert engine.preemptions() > before, "the KV cache was to be too small for this test"
    completions = [(output.prompt_token_ids, c) for output in outputs for c in output.outputs]
    sequences = [[*prompt, *c.token_ids] for prompt, c in completions]
    assert len({tuple(s) for s in sequences}) == 8
    for sequence, (prompt, completion) in zip(sequences, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == 60
        assert len(completion.routed_experts) == len(prompt) + 59, "one row a token, the last excepted"
        engine.reset_prefix_cache()
        before = engine.preemptions()
        (prefilled,) = engine.generate([sequence[:-1]], tokens=1)
        assert np.array_equal(chosen(completion.routed_experts), chosen(prefilled.outputs[0].routed_experts))
        again = engine.prompt_logprobs([sequence])[0, len(prompt) - 1 :]
        assert engine.preemptions() == before
        found = [at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        np.testing.assert_allclose(found, again.numpy(), atol=2e-5)


def engine_config(golden: Callable[[str], Path], **arguments: Any) -> Any:
    """vLLM's configuration of an engine with capture, or the error that it refuses the arguments with."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"enforce_eager": True, "skip_tokenizer_init": True, "enable_return_routed_experts": True}
    return EngineArgs(str(golden("tiny")), **(defaults | arguments)).create_engine_config()


def test_vllm_still_cannot_capture_on_its_own_cpu_runner(golden: Callable[[str], Path]) -> None:
    """When this fails, vLLM can, and `cpu_platform` and `cpu_worker` have no reason left."""
    with pytest.raises(ValueError, match="Model Runner V2"):
        engine_config(golden, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")


def test_vllms_other_rules_for_the_capture_hold(golden: Callable[[str], Path]) -> None:
    config = engine_config(golden)
    assert config.parallel_config.worker_cls == "beam_rl.rollout.cpu_worker.BeamCPUWorker"
    assert "_verify_aux_output_compatibility" not in vars(config)
    with pytest.raises(ValueError, match="prefix caching"):
        engine_config(golden, enable_prefix_caching=False)
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(ValueError, match="speculative decoding"):
        engine_config(golden, speculative_config=speculation)


def test_skyrls_default_worker_becomes_the_cpus(golden: Callable[[str], Path]) -> None:
    config = engine_config(golden, worker_cls="vllm.v1.worker.gpu_worker.Worker", distributed_executor_backend="mp")
    assert config.parallel_config.worker_cls == "beam_rl.rollout.cpu_worker.BeamCPUWorker"
    assert config.parallel_config.distributed_executor_backend == "uni"
