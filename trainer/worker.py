"""SkyRL's policy and reference workers over the trainer engine.

SkyRL's driver needs these classes too, as names for its actors. So Megatron and the engine are imported where they are
first used, in the worker's own process: the driver would spend seconds on modules that it never runs.
"""

from __future__ import annotations

import ctypes
import gc
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank, WorkerOutput
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_approx_kl
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase, RefWorkerBase, Worker
from skyrl.env_vars import SKYRL_WORKER_NCCL_TIMEOUT_IN_S
from torch import Tensor

from beam_rl.trainer.precision import Precision
from beam_rl.trainer.settings import OptimizerSettings
from beam_rl.trainer.skyrl_settings import engine_config, layout, optimizer_settings

if TYPE_CHECKING:
    from beam_rl.trainer.engine import TrainerEngine
    from beam_rl.trainer.sequences import Sequence

WITHOUT_REPLAY = "without_replay"
"""Metadata key of a batch whose log-probs are wanted with the router's own choice although R3 is on."""


class EngineWorker(Worker):
    """What the policy and the reference share: process groups, the engine, the forward pass."""

    engine: TrainerEngine
    precision = Precision()
    """A run's subclass says its own."""

    def init_worker_process_group(self) -> None:
        """Join the training processes (gloo without CUDA) and Megatron's parallel groups."""
        from megatron.core import parallel_state

        from beam_rl.trainer import (
            distributed,
            engine,  # noqa: F401 (first: it prepares Megatron for machines without CUDA)
        )

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                timeout=timedelta(seconds=SKYRL_WORKER_NCCL_TIMEOUT_IN_S),
            )
        distributed.initialize(layout(self.cfg), self.cfg.seed)
        self.mesh_rank = MeshRank(
            dp=parallel_state.get_data_parallel_rank(),
            sp=parallel_state.get_context_parallel_rank(),
            tp=parallel_state.get_tensor_model_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
            world_size=self._world_size,
            dp_size=parallel_state.get_data_parallel_world_size(),
            pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        )

    def build(self, path: str, optimizer: OptimizerSettings | None) -> None:
        """Build the engine and load the checkpoint at `path`."""
        from beam_rl.model.config import load_config
        from beam_rl.trainer.engine import TrainerEngine

        self.hf = load_config(path)
        self.path = Path(path)
        recompute = torch.cuda.is_available() and self.cfg.gradient_checkpointing
        self.engine = TrainerEngine(engine_config(self.cfg, optimizer, self.precision, recompute=recompute))
        self.engine.build(self.hf)
        self.engine.load_hf(path)
        gc.collect()
        gc.freeze()  # the collector need not look at all of this again in the middle of a step

    def replays(self, data: TrainingInputBatch) -> bool:
        """Whether R3 is on and this batch wants it."""
        return self.cfg.policy.megatron_config.moe_enable_routing_replay and not data.metadata.get(WITHOUT_REPLAY)

    def logprobs(self, data: TrainingInputBatch) -> WorkerOutput:
        """Log-probs of the response block of every sample."""
        from beam_rl.trainer.batches import padded_logprobs, sequences_from_batch

        values = self.engine.forward_logprobs(sequences_from_batch(data), replay=self.replays(data), masked=True)
        return padded_logprobs(values, data.metadata["response_length"])

    def empty_cache(self) -> None:
        """Give memory that is free back: CUDA's, or the C library's, which keeps the holes of every batch's shapes."""
        super().empty_cache()
        if not torch.cuda.is_available():
            ctypes.CDLL(None).malloc_trim(0)

    def offload_to_cpu(self, offload_optimizer: bool = True, offload_model: bool = True) -> None:
        """Lend the GPU's memory to who shares it: the rollout, or the other of policy and reference. CPUs share RAM."""
        if torch.cuda.is_available():
            self.engine.offload(model=offload_model, optimizer=offload_optimizer)

    def backload_to_gpu(self, backload_optimizer: bool = True, backload_model: bool = True) -> None:
        """Take it back."""
        if torch.cuda.is_available():
            self.engine.backload(model=backload_model, optimizer=backload_optimizer)

    def _set_pad_token_id(self, pad_token_id: int) -> None:
        """Packed sequences have no padding."""


class BeamPolicyWorkerBase(EngineWorker, PolicyWorkerBase):
    """The policy: trains, scores, sends its weights to the rollout, saves."""

    fused_experts = False
    """Whether the rollout takes a layer's experts in one tensor."""

    def init_model(self, path: str, num_training_steps: int | None = None) -> None:
        """Load the checkpoint; `num_training_steps` optimizer updates are the length of a decaying schedule."""
        self.build(path, optimizer_settings(self.cfg, num_training_steps))
        self.lr = 0.0

    def forward(self, data: TrainingInputBatch, **unused: Any) -> WorkerOutput:
        """The old log-probs: `loss_fn_outputs` has one {"logprobs": [R]} a sample."""
        return self.logprobs(data)

    def forward_backward(self, data: TrainingInputBatch, **unused: Any) -> WorkerOutput:
        """Accumulate the gradient of one mini-batch; metrics are means over its unmasked tokens.

        The advantages already carry the loss reduction's scale, so the policy loss is a sum.
        """
        from beam_rl.trainer.batches import sequences_from_batch

        sequences = sequences_from_batch(data)
        tokens = self.global_tokens(sequences)
        sums = self.engine.forward_backward(
            sequences,
            lambda *arguments: self.loss(*arguments, tokens=tokens),
            replay=self.replays(data),
            entropy=True,
        )
        metrics = {
            "final_loss": sums["loss"],
            "policy_loss": sums["policy_loss"],
            "policy_entropy": sums["entropy"] / tokens,
            "loss_metrics/clip_ratio": sums["clipped"] / tokens,
            "policy_lr": self.lr,
        }
        if self.cfg.algorithm.use_kl_loss:
            metrics["policy_kl"] = sums["kl"] / tokens
        return WorkerOutput(metrics=metrics)

    def global_tokens(self, sequences: list[Sequence]) -> float:
        """Unmasked tokens of the mini-batch over all data-parallel ranks, at least 1."""
        from megatron.core import parallel_state

        from beam_rl.trainer import distributed

        count = torch.tensor(float(sum(int((s.loss_mask > 0).sum()) for s in sequences)), device=distributed.device())
        torch.distributed.all_reduce(count, group=parallel_state.get_data_parallel_group())
        return max(float(count), 1.0)

    def loss(
        self,
        logprobs: Tensor,
        fields: Mapping[str, Tensor],
        loss_mask: Tensor,
        entropy: Tensor | None,
        *,
        tokens: float,
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """SkyRL's policy loss (its registry's function) over the K tokens of a micro batch, and the KL term if wanted.

        All inputs float32 [K]. Returns sums over the tokens.
        """
        algorithm = self.cfg.algorithm
        if len(logprobs) == 0:  # padding that keeps ranks in step: SkyRL's losses look for the largest of no values
            nothing = ("policy_loss", "entropy", "clipped", *(["kl"] if algorithm.use_kl_loss else []))
            return logprobs.sum(), dict.fromkeys(nothing, 0.0)
        rollout = fields.get("rollout_logprobs")
        policy_loss, metrics = self.policy_loss_fn(
            logprobs[None],
            fields["old_logprobs"][None],
            fields["advantages"][None],
            config=algorithm,
            loss_mask=loss_mask[None],
            rollout_logprobs=None if rollout is None else rollout[None],
        )
        assert entropy is not None
        sums: dict[str, Tensor | float] = {
            "policy_loss": policy_loss.detach(),
            "entropy": entropy.sum(),
            "clipped": metrics["clip_ratio"] * len(logprobs),
        }
        loss = policy_loss
        if algorithm.use_kl_loss:
            kl = compute_approx_kl(
                logprobs, fields["base_logprobs"], loss_mask=loss_mask, kl_estimator_type=algorithm.kl_estimator_type
            ).sum()
            sums["kl"] = kl.detach()
            loss = loss + algorithm.kl_loss_coef * kl / tokens
        return loss, sums

    def optim_step(self) -> float:
        """Apply the accumulated gradient; returns its norm before clipping.

        Raises RuntimeError when the gradient is not finite: the optimizer changed nothing, and it would only recur.
        """
        step = self.engine.optimizer_step()
        self.lr = step["lr"]
        if step["skipped"]:
            raise RuntimeError(
                "the gradient is not finite; the update was not applied. Lower trainer.policy.optimizer_config.lr."
            )
        return step["grad_norm"]

    def _build_weight_source(self, dtype: torch.dtype, backend: str) -> Any:
        """What SkyRL's weight transfer sends: the exporter's tensors, in the types a checkpoint has."""
        from beam_rl.trainer.weights import EngineWeights

        return EngineWeights(self.engine, fused_experts=self.fused_experts)

    async def broadcast_to_inference_engines(
        self, inference_engine_client: Any, inference_engine_cfg: Any, model_id: str | None = None
    ) -> None:
        """Send the current weights to the rollout; returns when it runs on them."""
        client = inference_engine_client or self._weight_sync_inference_client
        await self._sync_weights_to_inference_engines(client, inference_engine_cfg)

    def save_checkpoint(self, ckpt_dir: str, tokenizer: Any = None) -> None:
        """Begin to write weights, optimizer, schedule and random states; `finalize_pending_saves` ends it."""
        self.engine.save(ckpt_dir, {}, asynchronous=True)

    def finalize_pending_saves(self, blocking: bool = True) -> bool:
        """Complete the last checkpoint, which then appears under its name; SkyRL's asks its strategy.

        Args:
            blocking: wait for it; otherwise complete it only if all ranks have written their files already.

        Returns:
            whether no save is pending any more; the same on every rank.
        """
        return self.engine.finalize_saves(blocking=blocking)

    def load_checkpoint(
        self, ckpt_dir: str, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True
    ) -> None:
        """Continue from `save_checkpoint`'s folder."""
        self.engine.load(ckpt_dir)

    def save_hf_model(self, export_dir: str, tokenizer: Any) -> None:
        """A Hugging Face checkpoint with the starting model's tokenizer and generation configuration.

        Under LoRA its weights are merged, and the adapter itself lies beside it as `adapter/`, in PEFT's format.
        """
        from beam_rl.model.checkpoint import save_hf

        if torch.distributed.get_rank() == 0:
            save_hf(Path(export_dir), self.hf, self.engine.policy_weights(), copy_from=self.path)
        else:
            deque(self.engine.policy_weights(), maxlen=0)  # every rank takes part in gathering the tensors
        torch.distributed.barrier()
        if self.precision.lora is not None:
            self.engine.save_adapter(Path(export_dir).with_name("adapter"), self.path)

    def get_lr(self) -> float:
        return self.lr


class BeamRefWorkerBase(EngineWorker, RefWorkerBase):
    """The reference of a KL term: forward passes only."""

    def init_model(self, path: str, num_training_steps: int | None = None) -> None:
        self.build(path, optimizer=None)

    def forward(self, data: TrainingInputBatch, **unused: Any) -> WorkerOutput:
        """Log-probs under the reference: `loss_fn_outputs` has one {"logprobs": [R]} a sample."""
        return self.logprobs(data)
