"""The training engine: Beam on Megatron-Core, without Ray and without SkyRL."""
# ruff: noqa: E402 (Megatron is imported after the CPU module had its say)

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from beam_rl.trainer import cpu
from torch import Tensor

logging.getLogger("megatron").setLevel(logging.ERROR)  # what Megatron deprecates is no news to our users
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.c10d_logger", category=FutureWarning)
cpu.install()

from beam_rl.model.checkpoint import HFCheckpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.gpt import build_model
from beam_rl.model.names import export_hf, load_hf
from beam_rl.model.transformer_config import transformer_config
from beam_rl.trainer import checkpoint, distributed, optimizer
from beam_rl.trainer.logprobs import entropies, token_logprobs
from beam_rl.trainer.replay import RoutesError, Routing
from beam_rl.trainer.sequences import MicroBatch, Sequence, check_sample, pack, split, unpack
from beam_rl.trainer.settings import EngineConfig, OptimizerSettings, Parallel
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

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


class LossFn(Protocol):
    """A loss over the K tokens of a micro batch whose loss mask is not 0."""

    def __call__(
        self, logprobs: Tensor, fields: Mapping[str, Tensor], loss_mask: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Loss and metrics of a micro batch, both SUMS over its tokens.

        The engine adds them over micro batches and ranks and divides by nothing: a token mean over the global batch is
        a sum whose terms the caller has divided by the global number of tokens. So neither the loss nor the gradient
        depends on how the batch was split, packed or padded.

        Args:
            logprobs: float32 [K], with gradient.
            fields: float32 [K] each: the samples' fields.
            loss_mask: float32 [K], none of them 0.
            entropy: float32 [K] without gradient, if it was asked for.
        """
        ...


@dataclass
class Scores:
    """Results of a forward pass, one tensor a sample, on the CPU."""

    logprobs: list[Tensor]
    """float32 [n - 1]: entry t is of token t + 1."""
    entropies: list[Tensor] | None
    """float32 [n - 1], in nats."""
    routes: list[Tensor] | None
    """int16 [n, layers, topk]: the experts used; -1 in dense layers."""


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
        outputs = self._run(batches, partial(_score, temperature=self.config.temperature, entropy=entropy), progress)
        values = self._gather(batches, outputs, 2 if entropy else 1)  # [micro batches][1 or 2, T]

        def per_sample(row: int) -> list[Tensor]:
            return [v[:-1] for v in unpack([v[row] for v in values], batches, len(sequences))]

        return Scores(
            logprobs=per_sample(0),
            entropies=per_sample(1) if entropy else None,
            routes=unpack(self._gather_routes(batches), batches, len(sequences)) if routes else None,
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
            outputs = self._run(
                batches, lambda batch, logits: self._loss(batch, logits, loss_fn, entropy), progress, backward=True
            )
        except BaseException:
            self.zero_grad()
            raise
        return self._sum_metrics(outputs)

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
        """Megatron's schedule over micro batches; `finish` turns the last stage's logits [local, V / tp] into outputs.

        Returns the outputs on the last pipeline stage, and nothing on the others.
        """
        done = 0

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            with cpu.without_mode():
                output = model(
                    input_ids=batch.tokens, position_ids=None, attention_mask=None, packed_seq_params=batch.batch
                )
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
        logits = logits.index_select(0, batch.rows)
        logprobs = token_logprobs(logits, batch.targets, self.config.temperature)
        spread = entropies(logits, self.config.temperature) if entropy else None
        loss, metrics = loss_fn(logprobs, batch.fields, batch.loss_mask, spread)
        if len(batch.rows) == 0:
            loss = loss + logprobs.sum()  # nothing to learn, but the backward pass of every rank must run
        count = torch.zeros((), dtype=torch.int, device=loss.device)
        return loss, count, {"loss": loss.detach(), **metrics}

    def _gather(self, batches: Seq[MicroBatch], outputs: Seq[Tensor], width: int) -> list[Tensor]:
        """Bring [width, K] of the context-parallel ranks together: [width, T] on the CPU of every rank."""
        last, pp = parallel_state.is_pipeline_last_stage(), parallel_state.get_pipeline_model_parallel_group()
        gathered = []
        for i, batch in enumerate(batches):
            whole = torch.zeros(width, batch.total, device=batch.tokens.device)
            if last:
                whole[:, batch.places] = outputs[i]
                if self.config.parallel.cp > 1:
                    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
            if self.config.parallel.pp > 1:
                dist.broadcast(whole, parallel_state.get_pipeline_model_parallel_last_rank(), group=pp)
            gathered.append(whole.cpu())
        return gathered

    def _gather_routes(self, batches: Seq[MicroBatch]) -> list[Tensor]:
        """Routes used, int16 [T, layers, topk] a micro batch, of all layers and context-parallel ranks, on the CPU."""
        groups = parallel_state.get_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
        gathered = []
        for batch in batches:
            shape = (batch.total, self.hf.num_hidden_layers, self.hf.num_experts_per_tok)
            whole = torch.full(shape, -1, dtype=torch.int32, device=batch.tokens.device)
            where = slice(None) if batch.local is None else batch.local
            for layer, ids in batch.batch.recorded.items():
                whole[where, layer] = ids.int()
            for group in groups:
                if group.size() > 1:
                    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
            gathered.append(whole.to(torch.int16).cpu())
        return gathered

    def _sum_metrics(self, outputs: Seq[Mapping[str, Tensor | float]]) -> dict[str, float]:
        """Sum the micro batches' metrics over micro batches and replicas; every rank gets them."""
        sums: list[Any] = [None]
        if parallel_state.is_pipeline_last_stage():
            names = list(outputs[0])
            rows = [[torch.as_tensor(output[name], dtype=torch.float64).cpu() for name in names] for output in outputs]
            total = torch.tensor(rows, dtype=torch.float64).sum(0).to(distributed.device())
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            sums = [dict(zip(names, total.tolist(), strict=True))]
        if self.config.parallel.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(sums, last, group=parallel_state.get_pipeline_model_parallel_group())
        return sums[0]

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


def _score(batch: MicroBatch, logits: Tensor, temperature: float, entropy: bool) -> Tensor:
    """Log-probabilities, and entropies if wanted, of the wanted rows: float32 [1 or 2, K]."""
    logits = logits.index_select(0, batch.rows)
    logprobs = token_logprobs(logits, batch.targets, temperature)
    return torch.stack((logprobs, entropies(logits, temperature)) if entropy else (logprobs,))
