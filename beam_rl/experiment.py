"""SkyRL's experiment with Beam's workers: what is started, in which order, and what is handed to whom."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator, TrajectoryOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg

from beam_rl import environment, precision, publish
from beam_rl.model.errors import BadInput
from beam_rl.problems import Problems
from beam_rl.recipe import Recipe
from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import Origin
from beam_rl.rollouts import Fault, drop_inconsistent
from beam_rl.servers import Servers, sleep
from beam_rl.tracking import RunTracking
from beam_rl.training import Advance, BeamTrainer, Observer
from beam_rl.workers import policy_worker, reference_worker

REGISTRIES = (PolicyLossRegistry._actor_name, AdvantageEstimatorRegistry._actor_name)
"""Names of SkyRL's registry actors; see `registries`."""


class CountingGenerator(SkyRLGymGenerator):
    """SkyRL's generator, telling `on_response` of every response as it is finished and graded.

    Samples of a training batch that cannot be trained on are taken out of its loss: here, because SkyRL checks the
    batch before it hands it on.
    """

    on_response: Advance | None = None
    route_shape: tuple[int, int] | None = None
    """(layers, topk) of the routes that training replays; None without R3."""
    dropped: Mapping[int, Fault] = MappingProxyType({})
    """What was wrong with each sample of the last batch that is out of the loss, by index."""

    async def generate(self, input_batch: GeneratorInput, *arguments: Any, **options: Any) -> GeneratorOutput:
        output = await super().generate(input_batch, *arguments, **options)
        metadata = input_batch.get("batch_metadata")
        self.dropped = {}
        if metadata is not None and metadata.training_phase == "train":
            self.dropped = drop_inconsistent(output, self.route_shape)
        return output

    async def agent_loop(self, *arguments: Any, **options: Any) -> TrajectoryOutput:
        output = await super().agent_loop(*arguments, **options)
        if self.on_response is not None:
            self.on_response(1)
        return output


class BeamExperiment(BasePPOExp):
    """One run of a recipe. Servers were started before; the policy starts beside them, on their GPUs after them."""

    def __init__(
        self,
        recipe: Recipe,
        config: Any,
        tokenizer: Any,
        problems: Problems,
        held_out: Problems | None,
        servers: Servers,
        observer: Observer,
    ) -> None:
        """`config` is `recipe.skyrl()`, checked by `check_config`; a `held_out` of None evaluates nothing."""
        self.recipe = recipe
        self.problems = problems
        self.held_out = held_out
        self.servers = servers
        self.observer = observer
        self.cfg = config
        self.tokenizer = tokenizer
        self.colocate_pg = servers.placement
        self.trainer: BeamTrainer | None = None

    def get_tracker(self) -> RunTracking:
        trainer = self.cfg.trainer
        return RunTracking(
            self.recipe.run_dir,
            project_name=trainer.project_name,
            experiment_name=trainer.run_name,
            backend=trainer.logger,
            config=self.cfg,
            tags=trainer.tags,
        )

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> CountingGenerator:
        environment.register()
        generator = CountingGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=cfg.generator.inference_engine.served_model_name or cfg.trainer.policy.model.path,
        )
        generator.route_shape = self.recipe.route_shape
        return generator

    def _setup_trainer(self) -> RayPPOTrainer:
        """The policy starts beside the servers, or after them where they share GPUs: both measure free memory."""
        Path(self.cfg.trainer.ckpt_path).mkdir(parents=True, exist_ok=True)
        trainer = BeamTrainer(
            self.recipe,
            self.observer,
            cfg=self.cfg,
            tracker=self.get_tracker(),
            tokenizer=self.tokenizer,
            train_dataset=self.problems,
            eval_dataset=self.held_out,
            inference_engine_client=None,
            generator=None,
            colocate_pg=self.colocate_pg,
        )
        self.trainer = trainer
        beam = self.recipe.beam
        if beam.endpoints:
            token = publish.admin_token(beam)
            run_dir, note, every = self.recipe.run_dir, self.observer.note, beam.publish_every
            trainer.publisher = publish.Publisher(beam.endpoints, token, run_dir, note, every=every)
        arithmetic = precision.chosen(self.recipe)
        client = None if self.colocate_pg is None else self.servers.client(self.tokenizer)
        trainer.build_models(policy_worker(arithmetic), None, reference_worker(arithmetic))
        client = client or self.servers.client(self.tokenizer)
        trainer.inference_engine_client = client
        trainer.dispatch.set_inference_engine_client(client)
        trainer.generator = self.get_generator(self.cfg, self.tokenizer, client)
        return trainer

    def close(self) -> None:
        """Let the last version reach the servers that the run publishes to."""
        if self.trainer is not None and self.trainer.publisher is not None:
            self.trainer.publisher.close()

    def export(self) -> Path:
        """Write the trained policy as a Hugging Face checkpoint; returns the folder."""
        assert self.trainer is not None
        if self.colocate_pg is not None:
            asyncio.run(sleep(self.trainer.inference_engine_client))  # its memory is the trainer's now
        folder = self.recipe.run_dir / "export"
        self.trainer.export(folder)
        manifest.add_origin(folder, Origin(self.recipe.run_dir.resolve().name, self.trainer.global_step))
        return folder


def check_config(config: Any) -> None:
    """SkyRL's own checks of a configuration. Raises BadInput with its message."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        os.environ.setdefault("WANDB_API_KEY", "unused")  # SkyRL asks for one even where nothing is sent
    try:
        validate_cfg(config)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise BadInput(f"SkyRL refuses the recipe: {error}") from error
