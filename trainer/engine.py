"""The training engine: Beam on Megatron-Core, without Ray and without SkyRL."""
# ruff: noqa: E402 (Megatron is imported after the CPU module had its say)

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from beam_rl.model.checkpoint import HFCheckpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.gpt import build_model
from beam_rl.model.names import export_hf, load_hf
from beam_rl.model.transformer_config import transformer_config
from beam_rl.trainer import checkpoint, distributed, optimizer, outputs
from beam_rl.trainer.logprobs import entropies, token_logprobs
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

Progress = Callable[[int, int], None]
"""Called after every micro batch with (done, all)."""


class TrainerEngine:
    """A Beam, its optimizer and its schedule, on this rank of the layout."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.chunks: list[Any] = []
        """The model's parts on this rank (several under virtual pipelining), wrapped for data parallelism."""
        self._reduced = False
        """Whether the gradient buffers hold gradients that were reduced over the data-parallel ranks already."""

    def build(self, hf: BeamConfig) -> None:
        """Build the model with fresh weights from the seed, and the optimizer if the configuration has one."""
        config, layout = self.config, self.config.parallel
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
            calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged: see LossFn
        )
        with cpu.cuda_as_cpu():
            first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
            model = build_model(transformer, pre_process=first, post_process=last).to(distributed.device())
            self.chunks = [model]
            if config.optimizer is None:
                model.requires_grad_(False)
                return
            transformer.finalize_model_grads_func = finalize_model_grads
            self.chunks = [_data_parallel(transformer, model)]
            self.optimizer, self.schedule = optimizer.build_optimizer(config.optimizer, self.chunks, config.torch_dtype)
        self.zero_grad()

    def load_hf(self, path: str | Path) -> None:
        """Read a Hugging Face checkpoint's weights into the model and the optimizer's main parameters."""
        load_hf(self.models, HFCheckpoint(path))
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
        progress: Progress | None = None,
    ) -> Scores:
        """A forward pass over the samples; every rank of this data-parallel replica gets the results.

        Args:
            replay: use the samples' routes instead of the router's choice.
            masked: compute log-probabilities only where the loss mask is not 0, and give 0 elsewhere.
            entropy: also compute entropies.
            routes: also record the experts used.

        Raises:
            RoutesError: `replay`, and a sample's routes are missing or invalid.
        """
        batches = self._batches(sequences, replay, masked=masked, record=routes)
        score = partial(outputs.score_rows, temperature=self.config.temperature, entropy=entropy)
        results = self._run(batches, score, progress)
        values = outputs.gather(batches, results, 2 if entropy else 1)  # [micro batches][1 or 2, T]

        def per_sample(row: int) -> list[Tensor]:
            return [v[:-1] for v in unpack([v[row] for v in values], batches, len(sequences))]

        return Scores(
            logprobs=per_sample(0),
            entropies=per_sample(1) if entropy else None,
            routes=unpack(outputs.gather_routes(batches, self.hf), batches, len(sequences)) if routes else None,
        )

    def forward_logprobs(
        self, sequences: Seq[Sequence], *, replay: bool = True, masked: bool = False, progress: Progress | None = None
    ) -> list[Tensor]:
        """Log-probabilities of the samples' tokens, float32 [n - 1] a sample; see `score`."""
        return self.score(sequences, replay=replay, masked=masked, progress=progress).logprobs

    def forward_backward(
        self,
        sequences: Seq[Sequence],
        loss_fn: LossFn,
        *,
        replay: bool = True,
        entropy: bool = False,
        progress: Progress | None = None,
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
        batches = self._batches(sequences, replay, masked=True, record=False)
        self._reduced = True
        try:
            results = self._run(
                batches, lambda batch, logits: self._loss(batch, logits, loss_fn, entropy), progress, backward=True
            )
        except BaseException:
            self.zero_grad()
            raise
        return outputs.sum_metrics(results)

    def _batches(self, sequences: Seq[Sequence], replay: bool, *, masked: bool, record: bool) -> list[MicroBatch]:
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
                device=distributed.device(),
            )
            for group in groups
        ]

    def _run(
        self,
        batches: Seq[MicroBatch],
        finish: Callable[[MicroBatch, Tensor], Any],
        progress: Progress | None,
        *,
        backward: bool = False,
    ) -> list[Any]:
        """Megatron's schedule over micro batches; `finish` turns the last stage's logits [K, V / tp] into outputs.

        Returns the outputs on the last pipeline stage, and nothing on the others.
        """
        done = 0

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            with cpu.without_mode():
                output = model(batch.tokens, packed_seq_params=batch.batch, logit_rows=batch.rows)
            return output, partial(finish_step, batch)

        def finish_step(batch: MicroBatch, output: Tensor, non_loss_data: bool = False) -> Any:
            nonlocal done
            with cpu.without_mode():
                result = finish(batch, output[0])
            done += 1
            if progress is not None:
                progress(done, len(batches))
            return result

        with cpu.cuda_as_cpu():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(batches),
                seq_length=max(batch.total for batch in batches),
                micro_batch_size=1,
                forward_only=not backward,
                collect_non_loss_data=not backward,
            )

    def _loss(
        self, batch: MicroBatch, logits: Tensor, loss_fn: LossFn, entropy: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor | float]]:
        """Megatron's triple of loss, token count and outputs; a count of 0 keeps it from dividing the gradients."""
        logprobs = token_logprobs(logits, batch.targets, self.config.temperature)
        spread = entropies(logits, self.config.temperature) if entropy else None
        loss, metrics = loss_fn(logprobs, batch.fields, batch.loss_mask, spread)
        if len(batch.rows) == 0:
            loss = loss + logprobs.sum()  # nothing to learn, but the backward pass of every rank must run
        count = torch.zeros((), dtype=torch.int, device=loss.device)
        return loss, count, {"loss": loss.detach(), **metrics}

    # Optimizer

    def optimizer_step(self) -> dict[str, float]:
        """Apply the accumulated gradient and clear it.

        Returns:
            grad_norm (before clipping), lr, and skipped: 1.0 if the gradient was not finite and nothing changed.
        """
        with cpu.cuda_as_cpu():
            norm, lr, skipped = optimizer.step(self.optimizer, self.schedule)
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": float(skipped)}

    def zero_grad(self) -> None:
        """Forget the accumulated gradient."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._reduced = False

    # Weights and state

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under their Hugging Face names, whole, one at a time; every rank must walk through to the end."""
        return export_hf(self.models)

    def save(self, path: str | Path, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint folder: model, optimizer, schedule, random states, and the caller's `extra`.

        It appears under `path` complete or not at all.
        """
        with cpu.cuda_as_cpu():
            checkpoint.save(self, Path(path), extra)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint folder of any layout; returns what `save` was given as `extra`.

        Raises:
            BadInput: the folder is no complete checkpoint of this model, or a file of it is damaged; the file is named.
        """
        with cpu.cuda_as_cpu():
            return checkpoint.load(self, Path(path))


def _data_parallel(transformer: Any, model: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    layout = DistributedOptimizer.compute_full_param_layout(
        [param for param in model.parameters() if param.requires_grad],
        None,
        replicas.size(),
        config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_group().size(),
    )
    return DistributedDataParallel(transformer, config, model, full_param_layout=layout)
