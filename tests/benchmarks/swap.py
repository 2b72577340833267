"""How long an exchange of weights stops two servers under load, against the time that writing the weights takes.

Two servers of a tiny model in float32, 32 streaming requests in flight, A → B → A → B. Prints each server's wait for
the step that was running, its pause and the writing in it, and what became of the requests. `--large` takes a model of
100 M parameters instead (0.4 GB in float32).
"""

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

import live  # type: ignore[import-not-found]

from beam_rl import tiny
from beam_rl.swap import Endpoint, Report, Wanted, swap

LARGE = {"hidden_size": 768, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_experts": 16}
"""What `--large` changes of the tiny architecture."""


async def exchange(load: "live.Load", models: dict[str, Path], urls: list[str]) -> tuple[list[Report], dict[str, str]]:
    """The reports of A → B → A → B under load, and the versions' names."""
    reports, names = [], {}
    async with load:
        for model in "BAB":
            endpoints = [Endpoint(url, live.TOKEN, 60, 600) for url in urls]
            report = await asyncio.to_thread(swap, Wanted(models[model]), endpoints, progress=lambda phase: None)
            if not report.ok:
                raise SystemExit(f"the exchange failed: {report}")
            names[model] = report.endpoints[0].after
            names.setdefault("A", report.endpoints[0].before)
            reports.append(report)
    return reports, names


def main() -> None:
    if "--large" in sys.argv:
        tiny.ARCHITECTURE |= LARGE
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        models = {"A": live.write_model(root / "A", 1), "B": live.write_model(root / "B", 1, change=0.01)}
        for model in models.values():
            live.describe(model)
        with live.serving(models["A"], 2, root) as servers:
            load = live.Load([server.url for server in servers], in_flight=32)
            reports, names = asyncio.run(exchange(load, models, [server.url for server in servers]))
        versions = {names[key]: models[key] for key in "AB"}
        largest, ties = live.distance(load.answers, live.full_forward(versions, load.answers), versions)
        heads = f"{'exchange':<34}{'bytes':>13}{'wait s':>8}{'write s':>9}{'pause s':>9}"
        print(f"{heads}{'pause/write':>13}{'with wait':>11}{'kept':>6}")
        for report in reports:
            for one in report.endpoints:
                write, pause = one.seconds["write"], one.seconds["pause"]
                wait = one.seconds["wait"]
                times = f"{wait:>8.3f}{write:>9.3f}{pause:>9.3f}{pause / write:>13.2f}{(wait + pause) / write:>11.2f}"
                print(f"{one.before} → {one.after:<19}{one.bytes:>13,}{times}{one.kept:>6}")
        failed = sum(answer.error is not None for answer in load.answers)
        spanning = sum(len(answer.spans) > 1 for answer in load.answers)
        print(f"requests   {len(load.answers)}, {failed} failed, {spanning} with tokens of two versions or more")
        print(f"log-probs  at most {largest:.1e} from a full forward of their version; {ties} answers behind a tie")


if __name__ == "__main__":
    main()
