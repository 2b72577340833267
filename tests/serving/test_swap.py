"""Weights are exchanged under load, and every token says the truth about which weights made it."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import Origin

Swap = Callable[..., dict[str, Any]]


def test_no_request_is_lost_and_every_token_fits_the_version_its_span_names(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap
) -> None:
    """A → B → A → B with 32 streams in flight on two servers; then back."""
    load = live.Load([server.url for server in servers], in_flight=32)
    first = servers[0].status()["version"]
    names = {"A": first}

    async def exchange() -> None:
        async with load:
            for model in "BAB":
                report = await asyncio.to_thread(swap, models[model])
                names[model] = report["endpoints"][0]["after"]
                for endpoint in report["endpoints"]:
                    assert endpoint["outcome"] == "committed"
                    assert endpoint["after"] == names[model]
                    assert endpoint["kept"] > 0
                    assert endpoint["probe"]["mean"] <= 2e-5
                    assert endpoint["probe"]["against"] == "trainer"

    asyncio.run(exchange())
    swap(models["A"])
    assert [answer.error for answer in load.answers if answer.error] == []
    seen = {span["version"] for answer in load.answers for span in answer.spans}
    assert seen == {names["A"], names["B"]}
    assert max(len(answer.spans) for answer in load.answers) > 1, "no request lived through an exchange"
    versions = {names[key]: models[key] for key in "AB"}
    scored = live.full_forward(versions, load.answers)
    largest, ties = live.distance(load.answers, scored, versions)
    assert largest <= live.TOLERANCE
    assert ties <= len(load.answers) / 10
    swapped = {names["A"]: scored[names["B"]], names["B"]: scored[names["A"]]}
    assert live.distance(load.answers, swapped)[0] > 0.01, "the test could not tell the versions apart"


def test_a_runs_export_is_served_under_its_step(
    servers: list[Any], models: dict[str, Path], swap: Swap, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").touch()
    shutil.copytree(models["B"], tmp_path / "export")
    manifest.add_origin(tmp_path / "export", Origin("run", 7))
    before = servers[0].status()["version"]
    report = swap(tmp_path, "--label", "candidate 1")
    assert all(one["after"].startswith("candidate-1-") for one in report["endpoints"])
    swap("--rollback")
    report = swap(tmp_path)
    assert all(one["after"].startswith("step-7-") for one in report["endpoints"])
    assert swap(tmp_path)["endpoints"][0]["outcome"] == "already there"
    status = swap("--status")
    assert {one["previous"] for one in status.values()} == {before}
    assert {one["base"] for one in status.values()} == {report["endpoints"][0]["after"]}
    swap(models["A"])


def test_weights_and_addresses_that_are_none_are_bad_input(swap: Swap, models: dict[str, Path], tmp_path: Path) -> None:
    assert "neither a checkpoint" in swap(tmp_path, code=2)["error"]
    assert "give WEIGHTS, or one of" in swap(code=2)["error"]
    assert "give a server's address" in swap(models["A"], to=["localhost:8000"], code=2)["error"]
