"""Recipes: layers of defaults, overrides, and every kind of mistake named before anything starts."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from beam_rl import checks, precision, recipe
from beam_rl.cli import main
from beam_rl.model.errors import BadInput


def test_a_sparse_recipe_has_the_published_dapo_defaults(tmp_path: Path) -> None:
    path = tmp_path / "dapo.yaml"
    path.write_text("beam: {tiny: {}, device: gpu}")
    loaded = recipe.load(path)
    algorithm = loaded.trainer.algorithm
    assert (algorithm.eps_clip_low, algorithm.eps_clip_high, algorithm.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (algorithm.advantage_estimator, algorithm.policy_loss_type) == ("grpo", "dual_clip")
    assert (algorithm.loss_reduction, algorithm.use_kl_loss) == ("token_mean", False)
    assert algorithm.dynamic_sampling.type == "filter"
    assert algorithm.dynamic_sampling.max_sample_batches == 10
    assert loaded.trainer.policy.optimizer_config.lr == 1e-6
    assert (loaded.generator.n_samples_per_prompt, loaded.updates_per_step) == (16, 16)
    assert loaded.generator.sampling_params.max_generate_length == 20480
    assert loaded.generator.eval_sampling_params.top_p == 0.7
    assert loaded.beam.overlong is not None
    assert (loaded.beam.overlong.buffer, loaded.beam.overlong.factor) == (4096, 1.0)
    assert loaded.beam.r3
    assert loaded.generator.inference_engine.enable_return_routed_experts


def test_mxfp8_of_weights_only_asks_nothing_of_an_engine_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("beam: {tiny: {}, device: gpu, precision: mxfp8, mxfp8: {activations: false, scaling: floor}}")
    loaded = recipe.load(path)
    checks.arithmetic(loaded)
    chosen = precision.chosen(loaded).mxfp8
    assert chosen is not None
    assert (chosen.scaling, chosen.activations) == ("floor", False)
    assert precision.engine_arguments(loaded, "mxfp8") == precision.engine_arguments(loaded, "bf16")


def test_overrides_win_over_the_file(content: dict[str, Any], write: Any) -> None:
    loaded = recipe.load(write(content), ["trainer.seed=7", "beam.gap.budget=2e-2", "beam.overlong=null"])
    assert loaded.trainer.seed == 7
    assert loaded.beam.gap.budget == 0.02
    assert loaded.beam.overlong is None


def test_the_resolved_recipe_loads_to_itself_even_in_a_moved_folder(
    content: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    first = recipe.load(write(content))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "recipe.yaml").write_text(first.to_yaml())
    again = recipe.load(moved / "recipe.yaml", run_dir=moved)
    assert again.trainer.ckpt_path == str(moved / "checkpoints")
    assert again.beam.model_dump(exclude={"run_dir"}) == first.beam.model_dump(exclude={"run_dir"})
    assert again.generator == first.generator


def test_a_section_with_nothing_in_it_is_absent(content: dict[str, Any], write: Any) -> None:
    given = recipe.load(write(content))
    content["generator"]["eval_sampling_params"] = None
    content["trainer"]["placement"] = None
    content["environment"] = None
    assert recipe.load(write(content)).values == given.values


def test_without_held_out_data_nothing_is_evaluated(content: dict[str, Any], write: Any) -> None:
    """SkyRL evaluates whenever the interval is above 0, and then finds no data set."""
    del content["data"]["val_data"]
    content["trainer"]["eval_before_train"] = True
    loaded = recipe.load(write(content))
    assert (loaded.trainer.eval_interval, loaded.trainer.eval_before_train) == (-1, False)
    content = {"beam": {"tiny": {}}}
    assert recipe.load(write(content)).trainer.eval_interval > 0, "the tiny model brings its own held-out problems"


def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("beam: {tiny: {}}\ntrainer: {policy: {optimizer_config: {lr: 1e-3}}}")
    assert recipe.load(path).trainer.policy.optimizer_config.lr == 0.001


MISTAKES = [
    (["trainer.sed=2"], r"unknown key trainer\.sed.*trainer\.seed"),
    (["trainr.seed=2"], r"unknown key trainr.*trainer"),
    (["generator.n_sample_per_prompt=4"], r"unknown key.*generator\.n_samples_per_prompt"),
    (["beam.gap.budgt=1"], r"unknown key beam\.gap\.budgt.*beam\.gap\.budget"),
    (["trainer.seed=abc"], r"trainer\.seed.*whole number"),
    (["trainer.train_batch_size=8.5"], r"trainer\.train_batch_size.*whole number"),
    (["trainer.policy.optimizer_config.lr=fast"], r"lr.*number"),
    (["trainer.policy=3"], r"trainer\.policy.*section"),
    (["data.train_data=x.jsonl"], r"data\.train_data.*list"),
    (["beam.r3=perhaps"], r"beam\.r3"),
    (["beam.precision=fp8"], r"beam\.precision"),
    (["trainer.seed"], r"section\.key=value"),
    (["trainer.seed.x=1"], r"trainer\.seed"),
    (["generator.n_samples_per_prompt=1"], r"group of one"),
    (["beam.gap.budget=0"], r"beam\.gap\.budget"),
    (["beam.gap.budget=-0.1"], r"beam\.gap\.budget"),
    (["beam.overlong.buffer=0"], r"beam\.overlong\.buffer"),
    (["beam.overlong.buffer=16"], r"beam\.overlong\.buffer=16.*max_generate_length"),
    (["trainer.max_training_steps=0"], r"max_training_steps=0"),
    (["trainer.max_tokens_per_microbatch=-1"], r"max_tokens_per_microbatch"),
    (["generator.sampling_params.max_generate_length=0"], r"max_generate_length"),
    (["trainer.algorithm.dynamic_sampling.max_sample_batches=0"], r"max_sample_batches"),
    (["trainer.train_batch_size=10"], r"train_batch_size=10 does not divide"),
    (["trainer.policy_mini_batch_size=0"], r"policy_mini_batch_size=0"),
    (["trainer.strategy=fsdp"], r"trainer\.strategy"),
    (["trainer.ckpt_path=/tmp/x"], r"trainer\.ckpt_path.*beam\.run_dir"),
    (["generator.sampling_params.top_p=0.9"], r"top_p=0\.9"),
    (["generator.sampling_params.repetition_penalty=1.1"], r"repetition_penalty=1\.1: makes another distribution"),
    (["generator.sampling_params.additional_kwargs={logit_bias: {5: 1}}"], r"additional_kwargs\.logit_bias"),
    (["trainer.placement.colocate_all=true"], r"colocate_all=true: there is no GPU to share"),
    (["beam.cuda_graphs=true"], r"cuda_graphs=true: there is no GPU with beam\.device=cpu"),
    (["generator.inference_engine.engine_init_kwargs.logprobs_mode=raw_logprobs"], r"logprobs_mode"),
    (["trainer.policy.optimizer_config.lr=.nan"], r"lr=nan"),
    (["trainer.policy.optimizer_config.lr=.inf"], r"lr=inf"),
    (["trainer.policy.optimizer_config.weight_decay=-0.1"], r"weight_decay=-0\.1"),
    (
        ["trainer.policy.optimizer_config.scheduler=cosine", "trainer.policy.optimizer_config.num_warmup_steps=6"],
        r"num_warmup_steps=6.* 6 updates",
    ),
    (["generator.eval_sampling_params.max_generate_length=0"], r"eval_sampling_params\.max_generate_length=0"),
    (["generator.inference_engine.num_engines=2"], r"num_engines=2.*device=cpu"),
    (["trainer.placement.policy_num_gpus_per_node=3"], r"samples do not divide over 3 data-parallel ranks"),
    (["trainer.placement.ref_num_gpus_per_node=2"], r"ref_num_gpus_per_node=2: must be 1"),
    (
        ["trainer.ref.megatron_config.context_parallel_size=2"],
        r"ref\.megatron_config\.context_parallel_size=2: must be 1",
    ),
    (
        ["trainer.placement.policy_num_gpus_per_node=2", "trainer.placement.ref_num_gpus_per_node=1"],
        r"ref_num_gpus_per_node=1: must be 2 \(the reference has the policy's layout",
    ),
    (
        [
            "trainer.algorithm.use_kl_loss=true",
            "trainer.placement.colocate_policy_ref=false",
            "trainer.placement.policy_num_gpus_per_node=2",
            "trainer.policy.megatron_config.tensor_model_parallel_size=2",
        ],
        r"1 processes of the reference do not divide by tensor \* pipeline \* context parallel = 2",
    ),
    (
        [
            "trainer.policy.megatron_config.tensor_model_parallel_size=2",
            "trainer.ref.megatron_config.tensor_model_parallel_size=4",
        ],
        r"trainer\.ref\.megatron_config\.tensor_model_parallel_size=4: must be 2",
    ),
    (["generator.inference_engine.data_parallel_size=2"], r"data_parallel_size=2.*device=cpu"),
    (["environment.env_class=beam_maths"], r"env_class='beam_maths'.*beam_math"),
    (["data.train_data=null"], r"data\.train_data"),
    (["beam.tiny={}"], r"beam\.tiny"),
    (["trainer.algorithm.temperature=0.5"], r"trainer\.algorithm\.temperature=0\.5: must be 1\.0"),
    (["trainer.algorithm.off_policy_correction.outlier_token_is_threshold_low=0.1"], r"outlier_token_is_threshold_low"),
    (["beam.precision=mxfp8", "beam.device=gpu"], r"precision=mxfp8: MXFP8 rollouts on a GPU.*activations=false"),
    (["beam.publish=http://127.0.0.1:8000"], r"beam\.publish: .*BEAM_RL_ADMIN_TOKEN"),
    (["beam.publish=nowhere", "beam.publish_token_file={token}"], r"beam\.publish: .*nowhere"),
    (["beam.publish_every=0"], r"beam\.publish_every"),
    (["beam.lora.rank=8"], r"unknown key beam\.lora\.rank.*beam\.lora\.r"),
    (["beam.precision=lora", "beam.lora.r=0"], r"beam\.lora\.r is 0"),
    (["beam.precision=lora", "beam.lora.target_modules=[gate]"], r"beam\.lora\.target_modules.*router"),
    (["beam.precision=lora", "beam.lora.target_modules=[lm_head]"], r"beam\.lora\.target_modules.*output layer"),
    (["beam.precision=mxfp8", "beam.mxfp8.scaling=ceil"], r"beam\.mxfp8\.scaling.*rceil"),
    (["beam.precision=mxfp8", "beam.mxfp8.activations=some"], r"beam\.mxfp8\.activations"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[item[0] for item, _ in MISTAKES])
def test_a_mistake_is_named_with_exit_code_2(
    overrides: list[str],
    message: str,
    content: dict[str, Any],
    write: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = tmp_path / "token"
    token.write_text("a token of the servers".replace(" ", "-"))
    token.chmod(0o600)
    overrides = [item.replace("{token}", str(token)) for item in overrides]
    assert main(["train", str(write(content)), *overrides, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert re.search(message, captured.err), captured.err


TINY_MISTAKES = [
    (["beam.precision=lora", "beam.lora.r=12"], r"beam\.lora\.r is 12.*multiple of 8"),
    (["beam.precision=mxfp8", "beam.mxfp8.exclude=[foo]"], r"beam\.mxfp8\.exclude: 'foo'"),
    (["beam.tiny.architecture.hiden_size=256"], r"architecture\.hiden_size: cannot be set.* hidden_size"),
    (["beam.tiny.architecture.vocab_size=256"], r"architecture\.vocab_size: cannot be set"),
    (["beam.tiny.architecture.hidden_size=large"], r"beam\.tiny\.architecture: .*hidden_size.*expected int"),
    (["beam.tiny.architecture.num_experts=15"], r"beam\.tiny\.architecture: .*num_experts \(15\)"),
]


@pytest.mark.parametrize(("overrides", "message"), TINY_MISTAKES, ids=[item[-1] for item, _ in TINY_MISTAKES])
def test_a_precision_that_does_not_fit_the_tiny_model_is_refused_before_its_warm_up(
    overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("beam: {tiny: {}}")
    assert main(["train", str(path), *overrides, "--dry-run"]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["bf16", "lora", "mxfp8"])
def test_a_recipe_for_gpus_is_checked_without_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(__file__).parents[2] / "recipes" / "h200" / f"{name}.yaml")
    assert main(["train", path, "--dry-run"]) == 0
    assert "hidden_size: 1024" in capsys.readouterr().out
    assert main(["train", path, "--dry-run", "trainer.placement.colocate_all=false"]) == 0
    for engines in ("num_engines=2", "tensor_parallel_size=2"):
        assert main(["train", path, "--dry-run", f"generator.inference_engine.{engines}"]) == 2
        assert re.search(r"colocate_all=true: .* has 1 and .* 2\. Make them equal", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("bf16", ["trainer.placement.colocate_all=true"], r"cuda_graphs=true: .*\.colocate_all=true lends to the roll"),
        ("bf16", ["trainer.algorithm.use_kl_loss=true"], r"true: .*\.colocate_policy_ref=true lends to the reference"),
        ("bf16", ["trainer.gradient_checkpointing=true"], r"cuda_graphs=true: excludes trainer\.gradient_checkp"),
        ("mxfp8", [], r"beam\.cuda_graphs is True: .*no MXFP8"),
        ("lora", ["beam.lora.lora_dropout=0.1"], r"beam\.cuda_graphs is True: .*no dropout"),
        ("lora", [], None),
        ("bf16", [], None),
    ],
)
def test_cuda_graphs_are_refused_where_they_cannot_be(
    name: str, overrides: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(Path(__file__).parents[2] / "recipes" / "h200" / f"{name}.yaml")
    given = ["trainer.placement.colocate_all=false", "beam.cuda_graphs=true", *overrides]
    assert main(["train", path, "--dry-run", *given]) == (2 if message else 0)
    assert message is None or re.search(message, capsys.readouterr().err)


def test_a_reference_has_the_policys_layout(content: dict[str, Any], write: Any) -> None:
    """Its engine is built with the policy's, so that sizes of its own would have done nothing."""
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    content["trainer"]["policy"]["megatron_config"] = sizes
    content["trainer"]["placement"] = {"policy_num_nodes": 2, "policy_num_gpus_per_node": 4}
    loaded = recipe.load(write(content))
    reference, placement = loaded.trainer.ref.megatron_config, loaded.trainer.placement
    assert {name: getattr(reference, name) for name in sizes} == sizes
    assert (placement.ref_num_nodes, placement.ref_num_gpus_per_node) == (2, 4)
    apart = ["trainer.algorithm.use_kl_loss=true", "trainer.placement.colocate_policy_ref=false"]
    assert recipe.load(write(content), apart).reference_size == 1
    assert recipe.load(write(content), apart[:1]).reference_size == 0
    together = recipe.load(write(content), [*apart, "trainer.placement.colocate_all=true", "beam.device=gpu"])
    assert (together.reference_size, together.trainer.placement.ref_num_gpus_per_node) == (0, 4)


def test_a_resolved_recipe_may_get_another_layout(content: dict[str, Any], write: Any, tmp_path: Path) -> None:
    """A resumed run reads its own resolved recipe, and the keys that follow from the layout were in its way."""
    content["trainer"]["placement"] = {"policy_num_gpus_per_node": 2}
    content["trainer"]["policy"]["megatron_config"] = {"tensor_model_parallel_size": 2}
    (tmp_path / "resolved").mkdir()
    resolved = tmp_path / "resolved" / "recipe.yaml"
    first = recipe.load(write(content))
    resolved.write_text(first.to_yaml())
    assert recipe.load(resolved).values == first.values
    other = [
        "trainer.placement.policy_num_gpus_per_node=4",
        "trainer.policy.megatron_config.tensor_model_parallel_size=1",
    ]
    again = recipe.load(resolved, other)
    assert again.trainer.placement.ref_num_gpus_per_node == 4
    assert again.trainer.ref.megatron_config.tensor_model_parallel_size == 1


@pytest.mark.parametrize(
    ("colocated", "reference", "expected"),
    [("true", "false", False), ("false", "true", False), ("false", "false", None)],
)
def test_no_graphs_keep_memory_that_rollout_or_reference_need(
    colocated: str, reference: str, expected: bool | None
) -> None:
    path = Path(__file__).parents[2] / "recipes" / "h200" / "bf16.yaml"
    given = [f"trainer.placement.colocate_all={colocated}", f"trainer.algorithm.use_kl_loss={reference}"]
    assert precision.chosen(recipe.load(path, given)).cuda_graphs is expected


@pytest.mark.parametrize(("precision", "budget"), [("lora", 0.01), ("bf16", 0.01), ("mxfp8", 0.03)])
def test_the_gaps_budget_follows_the_precision(
    precision: str, budget: float, content: dict[str, Any], write: Any
) -> None:
    assert recipe.load(write(content), [f"beam.precision={precision}"]).beam.gap_budget == budget
    assert recipe.load(write(content), [f"beam.precision={precision}", "beam.gap.budget=0.5"]).beam.gap_budget == 0.5


def test_a_value_behind_an_option_counts(
    content: dict[str, Any], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse takes no more positionals after an option."""
    assert main(["train", str(write(content)), "--dry-run", "trainer.seed=77"]) == 0
    assert "seed: 77" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", str(write(content)), "--dry-run", "--sed=7"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: [unclosed", "not valid YAML"),
        ("- a\n- b", "mapping of sections"),
        ("trainer: 3", "section with keys"),
        ("trainer: {seed: 1}\ntrainer: {seed: 2}", "appears twice"),
        ("", "mapping of sections"),
        ("1: {seed: 1}", "key 1 is a whole number"),
        ("trainer: {on: 1}", "trainer: the key True is true/false"),
    ],
)
def test_a_malformed_file_is_bad_input(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        recipe.load(path)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such recipe"):
        recipe.load(tmp_path / "none.yaml")


def test_a_folder_in_use_is_not_overwritten(content: dict[str, Any], write: Any, tmp_path: Path) -> None:
    loaded = recipe.load(write(content))
    checks.folder(loaded, resume=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(BadInput, match="--resume"):
        checks.folder(loaded, resume=False)
    with pytest.raises(BadInput, match="no finished checkpoint"):
        checks.folder(loaded, resume=True)


def test_dry_run_prints_what_it_would_run(
    content: dict[str, Any], write: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", str(write(content)), "--dry-run"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert recipe.load(path).trainer.train_batch_size == 8
    assert not (tmp_path / "run").exists()


def test_a_mistake_does_not_wait_for_heavy_imports(content: dict[str, Any], write: Any) -> None:
    code = (
        "import sys; from beam_rl.cli import main; "
        f"code = main(['train', {str(write(content))!r}, 'trainer.sed=1']); "
        "sys.exit(code + 10 * ('torch' in sys.modules or 'ray' in sys.modules or 'vllm' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 2
