"""A tiny Beam for a laptop: model, tokenizer, problems and supervised warm-up, all from the recipe's seed."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial as bind
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from beam_rl import __version__
from beam_rl.evals import arithmetic
from beam_rl.evals.arithmetic import ArithmeticSpec, Problem, generate, parse, solution, write_rows
from beam_rl.model.errors import BadInput
from beam_rl.settings import TinySettings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from beam_rl.model.config import BeamConfig
    from beam_rl.recipe import Recipe
    from beam_rl.trainer.engine import Sequence, TrainerEngine

Progress = Callable[[int], None]
"""Called with the number of supervised steps done."""
Dtype = Literal["bfloat16", "float32"]

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")
CHARACTERS = ("\\boxed{", "}", *"0123456789", *"+-*=?")
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
VOCABULARY_SIZE = 32  # the kernels want multiples of 32; the rest is never sampled after the warm-up

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

ARCHITECTURE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": VOCABULARY["<pad>"],
    "bos_token_id": VOCABULARY["<bos>"],
    "eos_token_id": VOCABULARY["<eos>"],
}
"""1.5 M parameters with every feature of Beam: both attention kinds, both MLP kinds, group-limited routing."""

FIXED = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
"""What the tokenizer decides."""

SLIPS = (-10, -2, -1, 1, 2, 10)
"""What a slip adds to the answer."""


def prepare(recipe: "Recipe", progress: Progress) -> Path:
    """The folder of the warmed-up tiny model (Hugging Face format), made now or taken from the cache.

    Beside it lie `train.jsonl` and `held_out.jsonl`, rows as SkyRL's PromptDataset reads them. Same settings and seed:
    same folder, bit for bit on one machine. Raises BadInput where the arithmetic task is too small for the settings.
    """
    settings, folder = recipe.beam.tiny, cache_folder(recipe)
    assert settings is not None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        for stale in folder.parent.glob(f"{folder.name}.*.partial"):  # of a warm-up that was killed
            shutil.rmtree(stale)
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
            try:
                build(partial, settings, recipe.trainer.seed, dtype_of(recipe), progress)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder / "model"


def cache_folder(recipe: "Recipe") -> Path:
    """Where the recipe's tiny model is kept; its name differs whenever the finished folder would."""
    settings = recipe.beam.tiny
    assert settings is not None
    made_of = settings.model_dump(exclude={"cache_dir"})
    makers = [Path(file).read_text(encoding="utf-8") for file in (__file__, arithmetic.__file__)]
    what = [__version__, makers, made_of, recipe.trainer.seed, dtype_of(recipe)]
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return Path(settings.cache_dir).expanduser() / name


def dtype_of(recipe: "Recipe") -> Dtype:
    """The type of the tiny model's weights."""
    return "float32" if recipe.beam.precision == "fp32" else "bfloat16"


def build(folder: Path, settings: TinySettings, seed: int, dtype: Dtype, progress: Progress) -> None:
    """Make the problems, the random model and its tokenizer, warm the model up, write everything below `folder`."""
    split = generate(seed, settings.train_problems, settings.held_out_problems, task(settings))
    write_rows(folder / "train.jsonl", split.train)
    write_rows(folder / "held_out.jsonl", split.held_out)
    from beam_rl.model.checkpoint import save_hf

    config = architecture(dtype, settings.architecture)
    encoder = tokenizer(config.max_position_embeddings)
    encoder.save_pretrained(folder / "tokenizer")
    engine = warm_up(config, encoder, split.train, settings, seed, dtype, folder / "initial", progress)
    save_hf(folder / "model", config, engine.export(), copy_from=folder / "tokenizer")
    shutil.rmtree(folder / "tokenizer")
    (folder / "settings.json").write_text(settings.model_dump_json(indent=1), encoding="utf-8")


def architecture(dtype: Dtype = "bfloat16", changes: Mapping[str, Any] = MappingProxyType({})) -> "BeamConfig":
    """The tiny model's configuration, with changes to it by name. Raises BadInput."""
    from huggingface_hub.errors import StrictDataclassError

    from beam_rl.model.config import BeamConfig

    for name in changes:
        if name not in ARCHITECTURE or name in FIXED:
            known = ", ".join(key for key in ARCHITECTURE if key not in FIXED)
            raise BadInput(f"beam.tiny.architecture.{name}: cannot be set. These can: {known}.")
    try:
        return BeamConfig(**ARCHITECTURE | dict(changes), architectures=["BeamForCausalLM"], dtype=dtype)
    except (BadInput, StrictDataclassError) as error:
        raise BadInput(f"beam.tiny.architecture: {' '.join(str(error).split())}") from error


def task(settings: TinySettings) -> ArithmeticSpec:
    """The arithmetic problems that the settings ask for."""
    return ArithmeticSpec(
        max_operand={"+": settings.max_term, "-": settings.max_term, "*": settings.max_factor},
        three_term_share=settings.three_term_share,
    )


def tokenizer(longest: int = ARCHITECTURE["max_position_embeddings"]) -> "PreTrainedTokenizerFast":
    r"""One token a character, `\boxed{` being one, with a chat template; for sequences of up to `longest` tokens."""
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def warm_up(
    config: "BeamConfig",
    encoder: "PreTrainedTokenizerFast",
    problems: list[Problem],
    settings: TinySettings,
    seed: int,
    dtype: Dtype,
    initial: Path,
    progress: Progress,
) -> "TrainerEngine":
    """Supervised steps on worked solutions, by the engine that DAPO uses.

    A share of the solutions ends in a slip, so that the model knows more than its samples show, as a base model does:
    that is what reinforcement learning then brings out.
    """
    import torch

    from beam_rl.model.checkpoint import save_hf
    from beam_rl.model.tensors import initial_tensors
    from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, TrainerEngine

    steps = settings.warmup_steps
    optimizer = OptimizerSettings(
        lr=settings.warmup_lr,
        min_lr=settings.warmup_lr / 10,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        warmup_steps=min(20, steps // 10),
        schedule="linear",
        total_steps=steps,
    )
    engine = TrainerEngine(EngineConfig(dtype=dtype, optimizer=optimizer, seed=seed))
    engine.build(config)
    save_hf(initial, config, initial_tensors(config, seed, getattr(torch, dtype)))
    engine.load_hf(initial)
    shutil.rmtree(initial)
    rng = random.Random(seed)
    three, two = (
        [problem for problem in problems if (len(parse(problem.problem)[1]) == 2) is long] for long in (True, False)
    )
    for step in range(1, steps + 1):
        drawn = draw(two, three, settings, rng)
        batch = [example(problem, rng, settings.slip_share, encoder) for problem in drawn]
        tokens = sum(float(sequence.loss_mask.sum()) for sequence in batch)
        engine.forward_backward(batch, bind(negative_likelihood, tokens=tokens), replay=False)
        engine.optimizer_step()
        progress(step)
    return engine


def negative_likelihood(
    logprobs: "Tensor", fields: object, loss_mask: object, entropy: object, *, tokens: float
) -> tuple["Tensor", dict[str, float]]:
    """The engine's loss for supervised steps: cross-entropy, meant over the `tokens` of the whole batch."""
    return -logprobs.sum() / tokens, {}


def draw(two: list[Problem], three: list[Problem], settings: TinySettings, rng: random.Random) -> list[Problem]:
    """A batch with `three_term_share` of three-term problems: there are far fewer distinct ones with two."""
    long = (rng.random() < settings.three_term_share for _ in range(settings.warmup_batch))
    return [rng.choice((three if is_long else two) or three or two) for is_long in long]


def example(problem: Problem, rng: random.Random, slip_share: float, encoder: "PreTrainedTokenizerFast") -> "Sequence":
    """A chat with the problem's solution; the loss is on the answer, its end of sequence included."""
    import torch

    from beam_rl.trainer.engine import Sequence

    if rng.random() < slip_share:
        problem = Problem(**(asdict(problem) | {"answer": str(int(problem.answer) + rng.choice(SLIPS))}))
    question = [{"role": "user", "content": problem.problem}]
    prompt = encoder.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prefix = encoder(prompt, add_special_tokens=False).input_ids
    target = encoder(solution(problem), add_special_tokens=False).input_ids
    tokens = torch.tensor([*prefix, *target, encoder.eos_token_id])
    mask = torch.zeros(len(tokens) - 1)
    mask[len(prefix) - 1 :] = 1.0
    return Sequence(tokens=tokens, loss_mask=mask)
