"""The training engine: Beam on Megatron-Core, without Ray and without SkyRL."""
# ruff: noqa: E402 (Megatron is imported after the CPU module had its say)

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beam_rl.trainer import cpu

logging.getLogger("megatron").setLevel(logging.ERROR)  # what Megatron deprecates is no news to our users
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.c10d_logger", category=FutureWarning)
cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from beam_rl.model import lora, mxfp8
from beam_rl.model.checkpoint import HFCheckpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.gpt import build_model
from beam_rl.model.names import describe_hf, export_adapter, export_hf, fingerprint, load_hf
from beam_rl.model.transformer_config import transformer_config
from beam_rl.trainer import adapter, checkpoint, distributed, optimizer, outputs, pipeline
from beam_rl.trainer.gradients import data_parallel
from beam_rl.trainer.graphs import DecoderGraphs, uses_graphs
from beam_rl.trainer.offload import TrainingMemory
from beam_rl.trainer.optimizer import tensors as optimizer_tensors
from beam_rl.trainer.outputs import LossFn, Scores
from beam_rl.trainer.replay import RoutesError, Routing
from beam_rl.trainer.sequences import MicroBatch, Sequence, check_sample, pack, split, unpack
from beam_rl.trainer.settings import EngineConfig, OptimizerSettings, Parallel

__all__ = [
    "EngineConfig",
    "LossFn",
    "OptimizerSettings",
    "Parallel",
    "RoutesError",
    "Scores",
    "Sequence",
    "TrainerEngine",
]


class TrainerEngine:
    """A Beam, its optimizer and its schedule, on this rank of the layout."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.chunks: list[Any] = []
        """The model's part on this rank (one; Megatron takes a list), wrapped for data parallelism."""
        self._reduced = False
        """Whether the gradient buffers hold gradients that were reduced over the data-parallel ranks already."""
        self.base: str | None = None
        """Fingerprint of the frozen weights under LoRA, once they are loaded."""
        self._memory = TrainingMemory()
        self._graphs: DecoderGraphs | None = None
        self.host_memory = checkpoint.HostMemory()
        self._pending: checkpoint.PendingSave | None = None
        """The save that is not finished yet; there is never more than one, because each holds a copy of everything."""

    def build(self, hf: BeamConfig) -> None:
        """Build the model with fresh weights from the seed, and the optimizer if the configuration has one."""
        config, layout = self.config, self.config.parallel
        if config.lora is not None:
            config.lora.check(hf)
        graphs = uses_graphs(config, hf)
        distributed.initialize(layout, config.seed)
        self.hf = hf
        transformer = transformer_config(
            hf,
            params_dtype=config.torch_dtype,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            etp=layout.etp,
            cp=layout.cp,
            recompute=config.recompute,
            mxfp8=config.mxfp8,
            calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged: see LossFn
        )
        with cpu.cuda_as_cpu():
            first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
            model = build_model(transformer, pre_process=first, post_process=last).to(distributed.device())
            if config.lora is not None:
                lora.attach(model, config.lora, config.seed)
            self.chunks = [model]
            if config.optimizer is None:
                model.requires_grad_(False)
                return
            transformer.finalize_model_grads_func = pipeline.finalize
            self.chunks = [data_parallel(transformer, model)]
            if graphs:
                self._graphs = DecoderGraphs(self.chunks[0], max(256, config.micro_batch_tokens // 16))
            self.optimizer, self.schedule = optimizer.build_optimizer(config.optimizer, self.chunks, config.torch_dtype)
        self.zero_grad()

    def load_hf(self, path: str | Path) -> None:
        """Read a Hugging Face checkpoint's weights into the model and the optimizer's main parameters.

        Under LoRA they are the frozen base, which a checkpoint does not hold: load it before `load`.
        """
        load_hf(self.models, HFCheckpoint(path))
        self._memory.changed()
        if self.config.lora is not None:
            self.base = fingerprint(self.models)
        if self.config.optimizer is not None:
            self.optimizer.reload_model_params()

    @property
    def models(self) -> list[Any]:
        """The bare models on this rank."""
        return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in self.chunks]

    # Forward and backward

    @torch.no_grad()
    def score(
        self,
        sequences: Seq[Sequence],
        *,
        replay: bool = True,
        masked: bool = False,
        entropy: bool = False,
        routes: bool = False,
        temperature: float | None = None,
    ) -> Scores:
        """A forward pass over the samples; every rank of this data-parallel replica gets the results.

        Args:
            replay: use the samples' routes instead of the router's choice.
            masked: compute log-probabilities only where the loss mask is not 0, and give 0 elsewhere.
            entropy: also compute entropies.
            routes: also record the experts used.
            temperature: of the softmax; default the configuration's.

        Raises:
            RoutesError: `replay`, and a sample's routes are missing or invalid.
        """
        batches = self._batches(sequences, replay, masked=masked, record=routes)
        temperature = temperature or self.config.temperature
        results = pipeline.run(self.chunks, batches, lambda batch, scores: scores, temperature=temperature)
        values = outputs.gather(batches, results)  # [micro batches][2, T]

        def per_sample(row: int) -> list[Tensor]:
            return [v[:-1] for v in unpack([v[row] for v in values], batches, len(sequences))]

        return Scores(
            logprobs=per_sample(0),
            entropies=per_sample(1) if entropy else None,
            routes=unpack(outputs.gather_routes(batches, self.hf), batches, len(sequences)) if routes else None,
        )

    def forward_logprobs(self, sequences: Seq[Sequence], *, replay: bool = True, masked: bool = False) -> list[Tensor]:
        """Log-probabilities of the samples' tokens, float32 [n - 1] a sample; see `score`."""
        return self.score(sequences, replay=replay, masked=masked).logprobs

    def forward_backward(
        self,
        sequences: Seq[Sequence],
        loss_fn: LossFn,
        *,
        replay: bool = True,
        entropy: bool = False,
    ) -> dict[str, float]:
        """Accumulate a loss's gradient over all samples of one optimizer step: this data-parallel replica's share.

        Returns:
            the loss and the metrics of `loss_fn`, summed over all samples of all replicas, on every rank.

        Raises:
            RoutesError: `replay`, and a sample's routes are missing or invalid.
            RuntimeError: the last call's gradients were not applied or cleared. They are already reduced over the
                data-parallel ranks, and a second reduction would count them again; give all samples in one call.
        """
        if self.config.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer, for forward passes only")
        if self._reduced:
            raise RuntimeError("call optimizer_step or zero_grad before the next forward_backward")
        multiple = 1 if self._graphs is None else self._graphs.multiple
        batches = self._batches(sequences, replay, masked=True, record=False, multiple=multiple)
        self._reduced = True
        try:
            with lora.dropout(self.models):
                results = pipeline.run(
                    self.chunks,
                    batches,
                    partial(pipeline.loss, loss_fn=loss_fn, entropy=entropy),
                    temperature=self.config.temperature,
                    backward=True,
                )
        except BaseException:
            self.zero_grad()
            raise
        return outputs.sum_metrics(results)

    def _batches(
        self, sequences: Seq[Sequence], replay: bool, *, masked: bool, record: bool, multiple: int = 1
    ) -> list[MicroBatch]:
        """Check and pack the samples; ranks that share experts get the same number of micro batches."""
        hf, layout = self.hf, self.config.parallel
        replay = replay and bool(hf.sparse_layers)
        routing = Routing(hf.num_hidden_layers, tuple(hf.sparse_layers), hf.num_experts_per_tok, hf.num_experts)
        for number, sequence in enumerate(sequences):
            check_sample(number, sequence, sequences[0], routing if replay else None)
        groups = split(sequences, self.config.micro_batch_tokens)
        groups += [[] for _ in range(distributed.shared_count(max(1, len(groups))) - len(groups))]
        return [
            pack(
                sequences,
                group,
                routing=routing if replay else None,
                masked=masked,
                record=record,
                cp=(layout.cp, parallel_state.get_context_parallel_rank()),
                tp=layout.tp,
                multiple=multiple,
                device=distributed.device(),
            )
            for group in groups
        ]

    # Optimizer

    def optimizer_step(self) -> dict[str, float]:
        """Apply the accumulated gradient and clear it.

        Returns:
            grad_norm (before clipping), lr, and skipped: 1.0 if the gradient was not finite and nothing changed.
        """
        with cpu.cuda_as_cpu():
            for chunk in self.chunks:
                chunk.settle()  # without a backward pass since the last step, the gradient is 0
            norm, lr, skipped = optimizer.step(self.optimizer, self.schedule)
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": float(skipped)}

    def zero_grad(self) -> None:
        """Forget the accumulated gradient."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._reduced = False

    # Memory

    def offload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Free the device's memory of the model and its gradients, or of the optimizer, until `backload`.

        Weights and optimizer state go to host memory; gradients that were not applied are forgotten.
        """
        if self.config.optimizer is not None and self._reduced:
            self.zero_grad()
        if self._graphs is not None:
            self._graphs.clear()
        states = optimizer_tensors(self.optimizer) if self.config.optimizer is not None else ()
        self._memory.lend(self.chunks, states if optimizer else (), model=model)

    def backload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Take back the memory that `offload` freed."""
        self._memory.take_back(self.chunks, model=model, optimizer=optimizer)

    # Weights and state

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under their Hugging Face names, whole, one at a time; every rank must walk through to the end.

        Under LoRA they are merged, each time anew from the frozen weights.
        """
        return export_hf(self.models)

    def rollout_weights(self, *, fused_experts: bool = False) -> Iterator[tuple[str, Tensor]]:
        """What `export` gives, as the rollout wants it (`mxfp8.for_rollout`).

        Args:
            fused_experts: a layer's experts in two tensors (`export_hf`) where they lie here whole, as they are sent.
        """
        tensors = export_hf(self.models, fused_experts=fused_experts and self._whole_experts)
        return mxfp8.for_rollout(tensors, self.config.mxfp8)

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What `export` gives, as a checkpoint of the policy holds it (`mxfp8.for_checkpoint`)."""
        return mxfp8.for_checkpoint(self.export(), self.config.mxfp8)

    def rollout_description(self, *, fused_experts: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Names, shapes and types of `rollout_weights`, in its order, as tensors on the meta device."""
        tensors = describe_hf(self.models, fused_experts=fused_experts and self._whole_experts)
        return mxfp8.for_rollout(tensors, self.config.mxfp8)

    @property
    def _whole_experts(self) -> bool:
        """Whether a layer's experts lie here whole and have a place in one tensor: E4M3 data and scales have none."""
        layout, rounding = self.config.parallel, self.config.mxfp8
        return layout.ep == layout.etp == 1 and not (rounding and rounding.activations)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """All adapters under PEFT's names, as `export`; nothing without LoRA."""
        return export_adapter(self.models)

    def save_adapter(self, path: str | Path, base: str | Path | None = None) -> None:
        """Write the adapters as a folder that PEFT loads; it appears complete or not at all. Every rank calls.

        Args:
            base: where the base model is, for the folder's `base_model_name_or_path`.
        """
        adapter.save(self, Path(path), base)

    def load_adapter(self, path: str | Path) -> None:
        """Start from adapters that `save_adapter` wrote; the optimizer's moments stay as they are. Every rank calls.

        Raises:
            BadInput: no such adapters, or they were made with other settings or for another model; it is named.
        """
        adapter.load(self, Path(path))
        self._memory.changed()

    def save(self, path: str | Path, extra: Mapping[str, Any], *, asynchronous: bool = False) -> None:
        """Write a checkpoint folder: model, optimizer, schedule, random states, and the caller's `extra`.

        It appears under `path` complete or not at all. An `asynchronous` save returns as soon as everything is copied
        to host memory, and the folder appears in `finalize_saves`; until then training may go on. Every rank calls.
        """
        self.finalize_saves()
        with cpu.cuda_as_cpu():
            self._pending = checkpoint.begin(self, Path(path), extra)
        if not asynchronous:
            self.finalize_saves()

    def finalize_saves(self, *, blocking: bool = True) -> bool:
        """Complete an asynchronous save; every rank calls. Nothing to do where none is pending.

        Args:
            blocking: wait for it; otherwise complete it only if all ranks have written their files already.

        Returns:
            whether no save is pending any more.
        """
        if self._pending is None:
            return True
        with cpu.cuda_as_cpu():
            if not blocking and not self._pending.written():
                gc.collect()  # Megatron turns the collector off while it writes, and many steps may pass
                return False
            pending, self._pending = self._pending, None
            pending.finish()
        return True

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint folder of any layout; returns what `save` was given as `extra`.

        Raises:
            BadInput: the folder is no complete checkpoint of this model, or a file of it is damaged; the file is named,
                and the newest whole checkpoint beside it.
        """
        self.finalize_saves()
        with cpu.cuda_as_cpu():
            extra = checkpoint.load(self, Path(path))
        self._memory.changed()  # an engine without an optimizer trains nothing: all of it is frozen
        return extra
