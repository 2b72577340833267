"""Models, tokenizers and data that do not fit, found before Ray starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beam_rl import inputs, recipe, tiny
from beam_rl.evals import sources
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.model.tensors import initial_tensors


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def check(content: dict[str, Any], write: Any, *overrides: str) -> list[str]:
    reported: list[str] = []
    inputs.load(recipe.load(write(content), overrides), reported.append)
    return reported


def test_a_right_model_and_right_data_pass_in_silence(content: dict[str, Any], write: Any) -> None:
    assert check(content, write) == []


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"vocab_size": 64}, [], "its vocab_size is 64, the policy's 32"),
        ({"num_experts": 16}, [], "its num_experts is 16, the policy's 8"),
        ({"num_experts": 16}, ["beam.r3=false"], None),
        ({"num_experts": 16}, ["trainer.algorithm.use_kl_loss=false"], None),
    ],
)
def test_a_reference_that_cannot_score_the_policys_tokens_is_refused(
    change: dict[str, int],
    overrides: list[str],
    message: str | None,
    content: dict[str, Any],
    write: Any,
    tmp_path: Path,
) -> None:
    config = BeamConfig(**tiny.ARCHITECTURE | change, architectures=["BeamForCausalLM"], dtype="bfloat16")
    save_hf(tmp_path / "other", config, initial_tensors(config, 1, torch.bfloat16))
    content["trainer"] |= {"algorithm": {"use_kl_loss": True}, "ref": {"model": {"path": str(tmp_path / "other")}}}
    if message is None:
        assert check(content, write, *overrides) == []
    else:
        with pytest.raises(BadInput, match=message):
            check(content, write, *overrides)


def test_a_folder_without_a_config_is_named(content: dict[str, Any], write: Any, model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(BadInput, match=r"config\.json"):
        check(content, write, f"trainer.policy.model.path={model}")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight"),
        (lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone()), "extra"),
        (lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:5].clone()}), "norm"),
    ],
    ids=["missing", "extra", "wrong shape"],
)
def test_a_tensor_that_does_not_fit_is_named(
    change: Any, name: str, content: dict[str, Any], write: Any, model: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=name):
        check(content, write, f"trainer.policy.model.path={model}")


def test_a_tokenizer_of_another_model_is_refused(content: dict[str, Any], write: Any, model: Path) -> None:
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for extra in range(100):
        tokenizer["model"]["vocab"][f"token {extra}"] = len(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(BadInput, match="vocab_size"):
        check(content, write, f"trainer.policy.model.path={model}")


def test_a_model_without_a_tokenizer_is_refused(content: dict[str, Any], write: Any, model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(BadInput, match="no tokenizer"):
        check(content, write, f"trainer.policy.model.path={model}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "empty"),
        ("not json\n", "line 1 is not JSON"),
        ('{"question": "1+1=?"}\n', '"prompt"'),
        ('{"prompt": "1+1=?", "reward_spec": {"ground_truth": "2"}}\n', '"prompt"'),
        ('{"prompt": [{"role": "user", "content": null}], "reward_spec": {"ground_truth": "2"}}\n', '"prompt"'),
        ('{"prompt": [{"role": 1, "content": "1+1=?"}], "reward_spec": {"ground_truth": "2"}}\n', '"prompt"'),
        (
            '{"prompt": [{"role": "user", "content": "1"}], "reward_spec": {"ground_truth": "2"}, "env_class": "x"}\n',
            "row 1.*\"env_class\" is 'x'",
        ),
        ('{"prompt": [{"role": "user", "content": "1+1=?"}]}\n', '"reward_spec"'),
        ('{"prompt": [{"role": "user", "content": "1+1=?"}], "reward_spec": {"ground_truth": ""}}\n', '"reward_spec"'),
    ],
)
def test_data_that_cannot_be_used_is_named(
    text: str | None, message: str, content: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        check(content, write, f"data.train_data=[{path}]")
    assert "data.train_data" in str(error.value)


def test_long_prompts_are_counted_and_refused_or_dropped(content: dict[str, Any], write: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = Path(content["data"]["train_data"][0]).read_text().splitlines()
    row = json.loads(lines[0])
    row["prompt"][0]["content"] = "1+" * 40 + "1=?"
    path.write_text("\n".join([*lines, json.dumps(row), json.dumps(row)]))
    with pytest.raises(BadInput, match=r"2 of 66 prompts are longer .*max_prompt_length=32"):
        check(content, write, f"data.train_data=[{path}]")
    (report,) = check(content, write, f"data.train_data=[{path}]", "beam.long_prompts=drop")
    assert "2 of 66" in report


def test_only_a_newline_ends_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\r\n\n{"text": "d"}\n', encoding="utf-8", newline="")
    assert sources.read_json(path) == [{"text": "a\u2028b\x85c"}, {"text": "d"}]


def test_a_row_that_the_chat_template_refuses_is_named(
    content: dict[str, Any], write: Any, model: Path, tmp_path: Path
) -> None:
    (model / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    path = tmp_path / "data.jsonl"
    lines = Path(content["data"]["train_data"][0]).read_text().splitlines()
    lines[1] = lines[1].replace('"user"', '"system"')
    path.write_text("\n".join(lines))
    with pytest.raises(BadInput, match=r"row 2: .*no system role"):
        check(content, write, f"trainer.policy.model.path={model}", f"data.train_data=[{path}]")


def test_fewer_problems_than_a_batch_are_refused(content: dict[str, Any], write: Any) -> None:
    with pytest.raises(BadInput, match="64 problems are fewer"):
        check(content, write, "trainer.train_batch_size=128")


def test_a_budget_beyond_the_models_positions_is_refused(content: dict[str, Any], write: Any) -> None:
    with pytest.raises(BadInput, match="max_position_embeddings"):
        check(content, write, "generator.sampling_params.max_generate_length=500")
    with pytest.raises(BadInput, match=r"eval_sampling_params\.max_generate_length=500"):
        check(content, write, "generator.eval_sampling_params.max_generate_length=500")


def test_r3_is_refused_for_a_model_without_experts(content: dict[str, Any], write: Any, tmp_path: Path) -> None:
    """The rollout engine would fail on it only after it has loaded everything."""
    config = BeamConfig(
        **tiny.ARCHITECTURE | {"mlp_layer_types": ["dense"] * 6}, architectures=["BeamForCausalLM"], dtype="bfloat16"
    )
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    save_hf(tmp_path / "dense", config, initial_tensors(config, 1, torch.bfloat16), copy_from=tmp_path / "tokenizer")
    content["trainer"]["policy"]["model"]["path"] = str(tmp_path / "dense")
    with pytest.raises(BadInput, match=r"beam\.r3=true"):
        inputs.load(recipe.load(write(content)))
    inputs.load(recipe.load(write(content), ["beam.r3=false"]))
