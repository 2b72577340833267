"""DAPO on SkyRL's training loop: `RayPPOTrainer` with this project's rules at its seams."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from skyrl.backends.skyrl_train.distributed.dispatch import loss_fn_outputs_to_tensor
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput
from skyrl.train.generators.utils import concatenate_generator_outputs, slice_generator_output
from skyrl.train.trainer import RayPPOTrainer

from beam_rl import checkpoints, gap
from beam_rl.dapo import DynamicSampling, Selection, overlong_penalty
from beam_rl.evaluation import evaluate
from beam_rl.problems import Problems, ProblemStream
from beam_rl.publish import Publisher
from beam_rl.recipe import Recipe
from beam_rl.rollouts import RolloutStats, accuracies, indices_of, neutral, rewards, split_groups, whole_distribution
from beam_rl.trainer.worker import WITHOUT_REPLAY

Advance = Callable[[int], None]
"""Takes how many units of a phase are done now."""
CANCEL_SECONDS = 2.0
"""How long a cancelled request may take to release what it holds: a router may not answer."""


class Observer(Protocol):
    """What the trainer tells the outside."""

    def step_started(self, step: int) -> None: ...

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluating(self, step: int, responses: int) -> Any:
        """A context manager for the length of an evaluation; entering it gives an `Advance`."""

    def evaluated(self, record: dict[str, Any]) -> None: ...

    def resumed(self, step: int) -> None: ...

    def note(self, text: str) -> None: ...


class BeamTrainer(RayPPOTrainer):
    """SkyRL's loop with DAPO's rewards and sampling, the gap monitor, and checkpoints that cannot be half written."""

    def __init__(self, recipe: Recipe, observer: Observer, **arguments: Any) -> None:
        self.recipe = recipe
        self.observer = observer
        self.monitor = gap.GapMonitor(recipe.beam.gap, recipe.beam.gap_budget)
        self.stats = RolloutStats()
        self.publisher: Publisher | None = None
        """Takes every version to live servers, where the recipe names some."""
        self.selection: Selection | None = None
        self.sampling: DynamicSampling | None = None
        self.informative_share = 1.0
        """Share of informative groups in the last step: the next one generates accordingly more."""
        self.signal: list[str] = []
        self.silent: list[str] = []
        """The last generated batch's groups with a learning signal, and without."""
        self.collected: list[tuple[GeneratorOutput, list[str]]] = []
        """The step's generated batches, with the group of each of their samples."""
        self.gap: gap.Gap | None = None
        self.gap_without_r3: float | None = None
        self.updates = 0
        self.recorded = 0
        """The last step whose record the observer has."""
        self.unpublished: dict[str, Any] | None = None
        """The driver's state of a saved policy whose step has no record yet."""
        self.published = 0
        """The step of the latest whole checkpoint."""
        super().__init__(**arguments)

    # Data

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        trainer = self.recipe.trainer
        self.stream = ProblemStream(self.train_dataset, trainer.train_batch_size, self.recipe.steps, trainer.seed)
        self.train_dataloader = self.stream
        self.total_training_steps = self.recipe.steps

    async def train(self) -> None:
        """SkyRL's loop; its requests and HTTP sessions end with the event loop that they belong to."""
        try:
            await super().train()
        except BaseException:
            with suppress(Exception):  # what ended training is the news
                self.publish_checkpoint()
            raise
        finally:
            await cancel_others(CANCEL_SECONDS)
            await self.inference_engine_client.aclose()

    # Rollout

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """SkyRL's generation, then: unusable tokens out of the loss, the overlong penalty into the rewards."""
        if self.sampling is None:
            self.observer.step_started(self.global_step)
        input_batch["sampling_params"] = whole_distribution(input_batch["sampling_params"] or {})
        output = await super().generate(input_batch)
        dropped = self.generator.dropped
        self.stats.dropped_samples.update(dropped.values())
        if output.get("rollout_logprobs") is not None:
            self.stats.dropped_tokens += gap.drop_nonfinite(output["rollout_logprobs"], output["loss_masks"])
        limit = self.recipe.generator.sampling_params.max_generate_length
        uids = [trajectory.instance_id for trajectory in input_batch["trajectory_ids"] or []]
        shaped = [
            reward + overlong_penalty(len(response), limit, self.recipe.beam.overlong)
            for reward, response in zip(rewards(output), output["response_ids"], strict=True)
        ]
        output["rewards"] = neutral(shaped, uids, dropped)
        self.stats.add(output)
        right = neutral(accuracies(output), uids, dropped)
        self.signal, self.silent = split_groups(uids, right, self.recipe.beam.sampling.accuracy_tolerance)
        self.stats.groups += len(self.signal) + len(self.silent)
        self.stats.informative += len(self.signal)
        return output

    def handle_dynamic_sampling(
        self, generator_output: GeneratorOutput, uids: list[str]
    ) -> tuple[GeneratorOutput, list[str], bool]:
        """Collect informative groups over generated batches; never raises, never returns a batch that cannot train."""
        if self.sampling is None:
            self.sampling = self.new_sampling()
        selection = self.sampling.add(self.signal, self.silent)
        self.collected.append((generator_output, uids))
        if selection is None:
            self.stream.wanted = self.sampling.next_size()
            return generator_output, uids, True
        if selection.note is not None:
            self.observer.note(f"step {self.global_step}: {selection.note}")
        if len(self.collected) > 1:
            generator_output = concatenate_generator_outputs([output for output, _ in self.collected])
            uids = [uid for _, uids in self.collected for uid in uids]
        chosen = indices_of(uids, selection.groups)
        self.informative_share = self.sampling.share()
        self.selection, self.sampling, self.collected = selection, None, []
        self.stream.wanted = self.new_sampling().next_size()
        return slice_generator_output(generator_output, chosen), [uids[index] for index in chosen], False

    def new_sampling(self) -> DynamicSampling:
        """An empty collection for the step that begins."""
        trainer, sampling = self.recipe.trainer, self.recipe.beam.sampling
        ranks, samples = self.dispatch.get_lcm_dp_size(), self.recipe.generator.n_samples_per_prompt
        return DynamicSampling(
            wanted=trainer.train_batch_size,
            updates=trainer.train_batch_size // trainer.policy_mini_batch_size,
            max_batches=trainer.algorithm.dynamic_sampling.max_sample_batches,
            on_exhausted=sampling.on_exhausted,
            stride=ranks // math.gcd(ranks, samples),
            expected=self.informative_share,
        )

    # Training

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        """SkyRL's conversion, for as many groups and mini-batches as the selection has."""
        with self.batch_of(self.selection):
            return super().convert_to_training_input(generator_output, uids)

    @contextmanager
    def batch_of(self, selection: Selection | None) -> Iterator[None]:
        """SkyRL's batch sizes set to those of a short batch for the length of the block."""
        trainer = self.cfg.trainer
        full = trainer.train_batch_size, trainer.policy_mini_batch_size
        if selection is not None and selection.updates > 0:
            trainer.train_batch_size = len(selection.groups)
            trainer.policy_mini_batch_size = len(selection.groups) // selection.updates
        try:
            yield
        finally:
            trainer.train_batch_size, trainer.policy_mini_batch_size = full

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        """SkyRL's old log-probs, and the gap to the rollout's."""
        self.publish_checkpoint(wait=False)  # of an earlier step, written while later ones run
        training_input = super().fwd_logprobs_values_reward(training_input)
        ours, theirs = training_input["action_log_probs"], training_input["rollout_logprobs"]
        mask = training_input["loss_mask"].numpy()
        self.gap = gap.measure(ours.numpy(), theirs.numpy(), mask)
        self.gap_without_r3 = None
        if self.recipe.beam.r3 and self.monitor.measures_without_r3(self.global_step):
            free = self.logprobs_without_r3(training_input)
            self.gap_without_r3 = gap.measure(free.numpy(), theirs.numpy(), mask).mean
        message = self.monitor.update(self.gap)
        if message is not None:
            self.observer.note(f"step {self.global_step}: {message}")
        if self.monitor.stop:
            self.observer.note("beam.gap.action is stop: this is the last step")
            self.cfg.trainer.max_training_steps = self.total_training_steps = self.global_step
        return training_input

    def logprobs_without_r3(self, training_input: TrainingInputBatch) -> torch.Tensor:
        """The policy's log-probs [B, R] with the router's own choice of experts."""
        data = training_input.select(keys=["sequences", "attention_mask"], metadata_keys=["response_length"])
        data.metadata[WITHOUT_REPLAY] = True
        output = self.dispatch.forward("policy", data)
        return loss_fn_outputs_to_tensor(output.loss_fn_outputs, key="logprobs")[: len(training_input["sequences"])]

    def _execute_training_step(self, model: str, data: TrainingInputBatch) -> dict[str, float]:
        """SkyRL's updates; none when the step has no learning signal."""
        if self.selection is not None and self.selection.updates == 0:
            self.updates = 0
            return {}
        self.updates = (
            len(data.metadata[f"{model}_mini_batch_boundaries"]) * self.recipe.trainer.update_epochs_per_batch
        )
        return super()._execute_training_step(model, data)

    # Evaluation

    async def eval(self, vllm_metrics_scraper: Any = None) -> dict[str, float]:
        """avg@k on the held-out problems; the record goes to the observer, its numbers to SkyRL's tracker."""
        assert isinstance(self.eval_dataset, Problems)
        responses = len(self.eval_dataset) * self.recipe.generator.eval_n_samples_per_prompt
        with self.observer.evaluating(self.global_step, responses) as advance:
            self.generator.on_response = advance
            try:
                record = await evaluate(self.recipe, self.eval_dataset, self.generator, self.global_step)
            finally:
                self.generator.on_response = None
        self.observer.evaluated(record)
        return {f"eval/{key}": value for key, value in record.items() if isinstance(value, int | float)}

    # Records

    def _fire(self, event_name: str, **fields: Any) -> None:
        """SkyRL's callbacks; when a step's metrics are complete, also its record, and an earlier step's checkpoint."""
        super()._fire(event_name, **fields)
        if event_name == "on_train_end":
            self.publish_checkpoint()
        if event_name == "on_log" and "trainer/global_step" in fields["logs"]:
            self.publish_checkpoint(wait=False)
            record = self.step_record(fields["logs"])
            self.stats, self.selection = RolloutStats(), None
            fields["logs"].update({f"beam/{key}": value for key, value in record.items() if is_number(value)})
            self.observer.step(record)
            self.recorded = self.global_step
            if self.publisher is not None:
                self.publisher.step(self.global_step, self.export)

    def step_record(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The "step" record of `metrics.jsonl`, from what SkyRL logged and what was counted here."""
        seconds = {
            "generate": logs["timing/generate"],
            "logprobs": logs["timing/fwd_logprobs_values_reward"],
            "train": logs["timing/train_critic_and_policy"],
            "sync": logs["timing/sync_weights"],
        }
        whole = logs["timing/step"]
        assert self.gap is not None
        return {
            "kind": "step",
            "step": self.global_step,
            "updates": self.updates,
            "time": time.time(),
            **self.stats.record(),
            "gap_mean": self.gap.mean,
            "gap_p99": self.gap.p99,
            "gap_max": self.gap.max,
            "gap_budget": self.recipe.beam.gap_budget,
            "gap_mean_no_r3": self.gap_without_r3,
            "tokens_per_second": sum(self.stats.lengths) / whole,
            "step_seconds": whole,
            "seconds": seconds | {"other": whole - sum(seconds.values())},
            "policy_loss": logs.get("policy/policy_loss"),
            "grad_norm": logs.get("policy/grad_norm"),
            "lr": logs.get("policy/policy_lr"),
            "kl": logs.get("policy/policy_kl"),
            "clip_share": logs.get("policy/loss_metrics/clip_ratio"),
            "entropy": logs.get("policy/policy_entropy"),
            "weight_version": self.inference_engine_client.weight_version,
        }

    # Checkpoints

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face checkpoint, with a manifest of its tensors."""
        self.dispatch.save_hf_model("policy", str(folder), self.tokenizer)

    def save_checkpoints(self) -> str:
        """Begin to write the policy; the driver's state and the pointer to both follow when that is done.

        SkyRL saves before it evaluates and logs: a pointer set here would, after a kill, resume beyond those.
        """
        root = Path(self.cfg.trainer.ckpt_path)
        where = checkpoints.folder(root, self.global_step)
        self.publish_checkpoint()
        if self.global_step == self.published:
            return str(where)  # resumed with no step left; SkyRL saves at the end all the same
        self.dispatch.save_checkpoint("policy", str(where / "policy"))
        self.unpublished = {
            "step": self.global_step,
            "stream": self.stream.state_dict(),
            "gap_over": self.monitor.over,
            "informative_share": self.informative_share,
        }
        self.publish_checkpoint()  # after SkyRL's loop the record is there already
        return str(where)

    def publish_checkpoint(self, *, wait: bool = True) -> None:
        """Make the policy saved last the latest checkpoint, once its step is recorded and every rank has written it.

        Args:
            wait: until it is written; otherwise it is left for a later call if it is not.
        """
        state = self.unpublished
        if state is None or self.recorded < state["step"]:
            return
        try:
            if not self.policy_written(wait=wait):
                return
        except Exception:
            self.unpublished = None  # its save failed, and nothing is pending any more: it must not count later
            raise
        trainer = self.cfg.trainer
        checkpoints.publish(Path(trainer.ckpt_path), state["step"], state, trainer.max_ckpts_to_keep)
        self.unpublished, self.published = None, state["step"]

    def policy_written(self, *, wait: bool) -> bool:
        """Whether all ranks have written the policy saved last; SkyRL's dispatch can only wait for it."""
        return all(
            ray.get(self.policy_model.async_run_ray_method("pass_through", "finalize_pending_saves", blocking=wait))
        )

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Go on from the last whole checkpoint: its weights reach the rollout before the first sample is drawn."""
        root = Path(self.cfg.trainer.ckpt_path)
        found = checkpoints.latest(root)
        if found is None:
            return 0, None
        step, state = found
        checkpoints.forget_beyond(root, step)
        path = checkpoints.folder(root, step)
        self.dispatch.load_checkpoint("policy", str(path / "policy"))
        self.stream.load_state_dict(state["stream"])
        self.monitor.over = state["gap_over"]
        self.informative_share = state["informative_share"]
        if self.recipe.trainer.algorithm.dynamic_sampling.type is not None:
            self.stream.wanted = self.new_sampling().next_size()
        self.cfg.trainer.eval_before_train = False  # the evaluation before training is in metrics.jsonl already
        self.observer.resumed(step)
        self.recorded = self.published = step
        return step, str(path)


async def cancel_others(seconds: float) -> None:
    """Cancel the event loop's other tasks and wait for them: a gather that fails leaves its other requests running.

    Those that do not end within `seconds`, because they release what they hold, are cancelled again in that.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for _ in range(2):
        for task in others:
            task.cancel()
        if others:
            _, others = await asyncio.wait(others, timeout=seconds)


def is_number(value: Any) -> bool:
    """Whether a record's value can be drawn as a curve."""
    return isinstance(value, int | float) and not isinstance(value, bool)
