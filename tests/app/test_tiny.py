"""The tiny model: its tokenizer reads what the task writes, it learns the answers, a seed gives one folder."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from beam_rl import recipe, tiny
from beam_rl.evals.arithmetic import generate, solution
from beam_rl.evals.grader import Verdict, grade

SMALL = {"train_problems": 300, "held_out_problems": 64, "warmup_steps": 3, "warmup_batch": 8}


def small(tmp_path: Path, name: str, **changes: Any) -> recipe.Recipe:
    """A recipe whose tiny model takes seconds, with a cache of its own."""
    settings = SMALL | {"cache_dir": str(tmp_path / name)} | changes
    return recipe.load("recipes/quickstart.yaml", [f"beam.tiny={settings}"], run_dir=tmp_path / "run")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def test_a_solution_survives_the_tokenizer(tmp_path: Path):
    """An unknown character, or a decoder that puts spaces between tokens, would make every answer wrong."""
    tiny.tokenizer().save_pretrained(tmp_path)
    encoder = AutoTokenizer.from_pretrained(tmp_path)
    for problem in generate(1, 500, 64, tiny.task(small(tmp_path, "cache").beam.tiny)).train:
        chat = [{"role": "user", "content": problem.problem}]
        prompt = encoder.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert encoder.unk_token_id not in prompt
        assert encoder.decode(prompt) == f"<bos><|user|>{problem.problem}<|assistant|>"
        target = encoder(solution(problem), add_special_tokens=False).input_ids
        assert grade(encoder.decode(target), problem.answer) is Verdict.correct
        assert len(target) < 24, "longer than the quickstart lets a response be"


def test_the_loss_is_on_the_answer_and_its_end_alone(tmp_path: Path):
    encoder, problem = tiny.tokenizer(), generate(1, 1, 64).train[0]
    sequence = tiny.example(problem, tiny.random.Random(1), 0.0, encoder)
    learned = sequence.tokens[1:][sequence.loss_mask > 0]
    assert encoder.decode(learned) == solution(problem) + "<eos>"


def test_the_same_seed_warms_up_to_the_same_bits_and_another_does_not(tmp_path: Path):
    """The quickstart's numbers are reproducible only if the model that it starts from is."""
    steps: list[int] = []
    first, second = (tiny.prepare(small(tmp_path, name), steps.append) for name in ("a", "b"))
    assert steps == [1, 2, 3] * 2
    one, two = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert all(one[name].equal(two[name]) for name in one)
    assert (first.parent / "held_out.jsonl").read_bytes() == (second.parent / "held_out.jsonl").read_bytes()

    again = tiny.prepare(small(tmp_path, "a"), steps.append)
    assert again == first
    assert len(steps) == 6, "the second time it comes from the cache"

    other = recipe.load("recipes/quickstart.yaml", [f"beam.tiny={SMALL}", "trainer.seed=2"], run_dir=tmp_path / "run")
    assert tiny.cache_folder(other).name != first.parent.name


def test_a_failed_warm_up_leaves_nothing_in_the_cache(tmp_path: Path):
    """A half-made folder would be taken for a finished model the next time."""

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.prepare(small(tmp_path, "cache"), stop)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_warm_up_left_is_removed(tmp_path: Path):
    folder = tiny.cache_folder(small(tmp_path, "cache"))
    stale = folder.with_name(f"{folder.name}.1.partial")
    stale.mkdir(parents=True)
    (folder / "model").mkdir(parents=True)  # a finished one, from which nothing is read here
    assert tiny.prepare(small(tmp_path, "cache"), lambda done: None) == folder / "model"
    assert not stale.exists()


def test_another_maker_has_another_place_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A changed slip, template or optimizer would otherwise be served the old model."""
    before = tiny.cache_folder(small(tmp_path, "cache"))
    (tmp_path / "tiny.py").write_text(Path(tiny.__file__).read_text() + "# changed")
    monkeypatch.setattr(tiny, "__file__", str(tmp_path / "tiny.py"))
    assert tiny.cache_folder(small(tmp_path, "cache")) != before
