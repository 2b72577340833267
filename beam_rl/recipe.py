"""A recipe: one sparse YAML file, typed and complete once loaded.

Values come from four layers, later ones winning: SkyRL's own defaults, the published DAPO recipe
(arXiv 2503.14476), the file, `key=value` overrides. What follows from other keys (`derived`) is set last.
Keys below `trainer`, `generator`, `data` and `environment` are SkyRL's; keys below `beam` are `BeamSettings`.
Nothing here imports torch, Ray or vLLM: a bad recipe must die in a second.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError
from skyrl.train.config.config import (
    DataConfig,
    EnvironmentConfig,
    GeneratorConfig,
    TrainerConfig,
    build_nested_dataclass,
)

from beam_rl import schema
from beam_rl.defaults import CPU, DAPO
from beam_rl.model.errors import BadInput
from beam_rl.settings import BeamSettings
from beam_rl.tree import assign, drop, lookup, merge, parse_override, read

if TYPE_CHECKING:
    from skyrl.train.config import SkyRLTrainConfig

SECTIONS: dict[str, type] = {
    "trainer": TrainerConfig,
    "generator": GeneratorConfig,
    "data": DataConfig,
    "environment": EnvironmentConfig,
}
PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""A trainer's parallel sizes, in SkyRL's keys."""


@dataclass(frozen=True)
class Recipe:
    """A complete, typed recipe. Paths are absolute."""

    name: str
    """The file's name without its ending: the run's name."""
    values: dict[str, dict[str, Any]]
    """The four SkyRL sections as nested mappings: DAPO's defaults, the file, the overrides, what follows from them."""
    beam: BeamSettings
    """The `beam:` section."""
    run_dir: Path
    """The run's folder."""

    @cached_property
    def trainer(self) -> TrainerConfig:
        return self._section("trainer")

    @cached_property
    def generator(self) -> GeneratorConfig:
        return self._section("generator")

    @cached_property
    def data(self) -> DataConfig:
        return self._section("data")

    @cached_property
    def environment(self) -> EnvironmentConfig:
        return self._section("environment")

    @property
    def model_path(self) -> Path | None:
        """The checkpoint to train; None while a tiny model is still to be made."""
        path = lookup(self.values, "trainer.policy.model.path")  # SkyRL's default is another model
        return Path(path) if path else None

    @property
    def route_shape(self) -> tuple[int, int] | None:
        """(layers, experts a token) of the routes that training replays; None without R3 or without experts."""
        from beam_rl.model.config import load_config  # takes longer than a bad recipe may

        assert self.model_path is not None
        config = load_config(self.model_path)
        return (config.num_hidden_layers, config.num_experts_per_tok) if self.beam.r3 and config.sparse_layers else None

    @property
    def steps(self) -> int:
        """Training steps of the whole run."""
        steps = self.trainer.max_training_steps
        assert steps is not None  # a default exists and checks.py refuses null
        return steps

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates a step."""
        batches = self.trainer.train_batch_size // self.trainer.policy_mini_batch_size
        return batches * self.trainer.update_epochs_per_batch

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks of the policy."""
        return self.world_size // self.model_parallel

    @property
    def world_size(self) -> int:
        """Processes of the policy."""
        placement = self.trainer.placement
        return placement.policy_num_nodes * placement.policy_num_gpus_per_node

    @property
    def shares_reference(self) -> bool:
        """Whether a reference model takes turns with the policy on its devices."""
        placement = self.trainer.placement
        return self.trainer.algorithm.use_kl_loss and (placement.colocate_all or placement.colocate_policy_ref)

    @property
    def reference_size(self) -> int:
        """Processes of a reference model that has devices of its own; 0: there is none."""
        placement = self.trainer.placement
        apart = self.trainer.algorithm.use_kl_loss and not self.shares_reference
        return placement.ref_num_nodes * placement.ref_num_gpus_per_node if apart else 0

    @property
    def model_parallel(self) -> int:
        """Processes that hold one copy of the policy: tp * pp * cp."""
        megatron = self.trainer.policy.megatron_config
        return (
            megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
        )

    def with_values(self, **dotted: Any) -> "Recipe":
        """A copy with some SkyRL values replaced; a dot in a key is written `__`."""
        values = deepcopy(self.values)
        for key, value in dotted.items():
            assign(values, key.replace("__", "."), value)
        return Recipe(self.name, values, self.beam, self.run_dir)

    def skyrl(self) -> "SkyRLTrainConfig":
        """SkyRL's own configuration object (imports vLLM's front end: seconds)."""
        from skyrl.train.config import SkyRLTrainConfig

        return build_nested_dataclass(SkyRLTrainConfig, deepcopy(self.values))

    def to_yaml(self) -> str:
        """The resolved recipe: loading it gives this recipe again."""
        beam = self.beam.model_dump() | {"run_dir": str(self.run_dir)}
        values = deepcopy(self.values)
        paths = ("trainer.ckpt_path", "trainer.export_path", "trainer.log_path")
        for key in (*paths, *reference_keys(values)):  # they follow the folder, and the layout, of whoever reads this
            drop(values, key)
        body = yaml.safe_dump({"beam": beam, **values}, sort_keys=False, width=120, allow_unicode=True)
        return f"# The resolved recipe {self.name}. Keys that are not here have SkyRL 0.4.0's defaults.\n{body}"

    def _section(self, name: str) -> Any:
        return build_nested_dataclass(SECTIONS[name], deepcopy(self.values[name]))


def load(path: str | Path, overrides: Sequence[str] = (), run_dir: str | Path | None = None) -> Recipe:
    """Read a recipe, apply `key=value` overrides, check every key and type, and complete it.

    Relative paths in the file and the overrides are relative to the working folder. `run_dir` replaces
    `beam.run_dir` (a resumed run stays in its folder). Raises BadInput.
    """
    path = Path(path)
    written = read(path)
    for item in overrides:
        key, value = parse_override(item)
        assign(written, key, value)
    written = {key: value for key, value in written.items() if value is not None}  # a section's name and nothing in it
    for section, cls in SECTIONS.items():
        if isinstance(written.get(section), Mapping):
            written[section] = schema.without_null_sections(written[section], cls)
    known = known_keys()
    for section, content in written.items():
        schema.check_text(section, "a recipe's section")
        if section != "beam" and section not in SECTIONS:
            raise schema.unknown_key(section, [*SECTIONS, "beam"])
        if not isinstance(content, Mapping):
            raise BadInput(f"{section}: {content!r} is {schema.type_name(content)}, but a section with keys is wanted.")
        if section != "beam":
            schema.check(content, SECTIONS[section], section, known)
    beam = beam_settings(written.get("beam", {}), known)
    name = path.stem if path.name != "recipe.yaml" else path.absolute().parent.name
    where = run_dir or beam.run_dir or f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(where).expanduser().absolute()
    defaults = merge(DAPO, CPU) if beam.device == "cpu" else DAPO
    values = merge(defaults, {key: value for key, value in written.items() if key != "beam"})
    for section in SECTIONS:
        values.setdefault(section, {})
    complete(values, beam, written)
    derive(values, beam, folder, name, written)
    return Recipe(name, values, beam, folder)


def complete(values: dict[str, Any], beam: BeamSettings, written: Mapping[str, Any]) -> None:
    """Make paths absolute, and let evaluation sample as many tokens as training does unless it says otherwise."""
    for key in ("trainer.policy.model.path", "trainer.ref.model.path"):
        if path := lookup(values, key):
            assign(values, key, str(Path(path).expanduser().absolute()))
    for key in ("train_data", "val_data"):
        sources = values["data"].get(key)
        if sources is not None:
            values["data"][key] = [local(source) for source in sources]
        elif beam.tiny is None and key == "train_data":
            raise BadInput("data.train_data: missing. Name the training files (.jsonl or .parquet), or give beam.tiny.")
    values["data"].setdefault("val_data", [])
    if beam.tiny is None and not lookup(values, "trainer.policy.model.path"):
        raise BadInput("trainer.policy.model.path: missing. Name a checkpoint folder, or give a beam.tiny section.")
    for key in ("trainer.policy.model.path", "data.train_data", "data.val_data"):
        if beam.tiny is not None and lookup(written, key):
            raise BadInput(f"{key}: beam.tiny makes the model and the data itself. Remove one of the two.")
    length = lookup(values, "generator.sampling_params.max_generate_length")
    values["generator"]["eval_sampling_params"].setdefault("max_generate_length", length)


def local(source: str) -> str:
    """A data file's absolute path; the name of a data set on the Hub stays as it is."""
    is_file = source.endswith((".jsonl", ".json", ".parquet"))
    return str(Path(source).expanduser().absolute()) if is_file else source


def derive(values: dict[str, Any], beam: BeamSettings, run_dir: Path, name: str, written: Mapping[str, Any]) -> None:
    """Set the keys that follow from others. Raises BadInput where the recipe says something else."""
    reasons = {
        "trainer.strategy": ("megatron", "Beam trains on Megatron-Core"),
        "trainer.bf16": (beam.precision != "fp32", "beam.precision"),
        "trainer.epochs": (1, "the prompts are an endless shuffled stream; set trainer.max_training_steps"),
        "trainer.policy.megatron_config.moe_enable_routing_replay": (beam.r3, "beam.r3"),
        "generator.inference_engine.enable_return_routed_experts": (beam.r3, "beam.r3"),
        "generator.inference_engine.model_dtype": (
            "float32" if beam.precision == "fp32" else "bfloat16",
            "beam.precision",
        ),
        "generator.inference_engine.distributed_executor_backend": ("mp", "R3 hangs with the ray back end"),
        "generator.inference_engine.enable_ray_prometheus_stats": (False, "metrics.jsonl holds the numbers"),
        "trainer.enable_ray_gpu_monitor": (False, "metrics.jsonl holds the numbers"),
        "trainer.ckpt_path": (str(run_dir / "checkpoints"), "beam.run_dir"),
        "trainer.export_path": (str(run_dir / "exports"), "beam.run_dir"),
        "trainer.algorithm.temperature": (
            lookup(values, "generator.sampling_params.temperature"),
            "generator.sampling_params.temperature",
        ),
        "trainer.log_path": (str(run_dir / "logs"), "beam.run_dir"),
        "trainer.resume_mode": ("latest", "--resume"),
        "trainer.dump_eval_results": (False, "metrics.jsonl holds the numbers"),
        "trainer.print_example_interval": (0, "the console shows one line a step"),
        "trainer.flash_attn": (False, "attention is the engine's own"),
    }
    for key, source in reference_keys(values).items():
        value = lookup(values, source) or (None if source.endswith("expert_tensor_parallel_size") else 1)
        reasons[key] = (value, f"the reference has the policy's layout, {source}")
    if beam.tiny is None and not values["data"]["val_data"]:
        values["trainer"] |= {"eval_interval": -1, "eval_before_train": False}  # nothing to evaluate on
    for key, (value, reason) in reasons.items():
        given = lookup(written, key)
        if given is not None and given != value:
            raise BadInput(f"{key}={given!r}: must be {value!r} ({reason}). Remove the key.")
        assign(values, key, value)
    values["trainer"].setdefault("run_name", name)


def reference_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a reference model's layout, each with the policy's, which it follows."""
    reference, policy, place = "trainer.ref.megatron_config", "trainer.policy.megatron_config", "trainer.placement"
    found = {f"{reference}.{size}": f"{policy}.{size}" for size in PARALLEL_SIZES}
    if lookup(values, f"{place}.colocate_all") or lookup(values, f"{place}.colocate_policy_ref") is not False:
        found |= {f"{place}.ref_{count}": f"{place}.policy_{count}" for count in ("num_nodes", "num_gpus_per_node")}
    return found


def beam_settings(content: Mapping[str, Any], known: list[str]) -> BeamSettings:
    """The `beam:` section, typed. Raises BadInput naming the key."""
    try:
        return BeamSettings.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["beam", *(str(part) for part in first["loc"])])
        if first["type"] == "extra_forbidden":
            raise schema.unknown_key(key, known) from None
        raise BadInput(f"{key}: {first['input']!r}: {first['msg']}.") from None


def known_keys() -> list[str]:
    """Every dotted key a recipe may have."""
    skyrl = [key for name, section in SECTIONS.items() for key in schema.keys(section, name)]
    return [*skyrl, *model_keys(BeamSettings, "beam")]


def model_keys(model: type[BaseModel], where: str) -> Iterator[str]:
    """All dotted keys below a pydantic model."""
    for name, field in model.model_fields.items():
        yield f"{where}.{name}"
        for option in schema.options(field.annotation):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from model_keys(option, f"{where}.{name}")
