"""The page of one evaluation: one file, opens offline."""

from typing import Any, NamedTuple

from jinja2 import Environment

from beam_rl.charts import percent
from beam_rl.eval_lines import accuracy, count, seconds, share
from beam_rl.evals.results import ProblemResult, Results, Sample

TAIL = 600
"""Characters of the end of a response that the page shows; `results.json` has all of it."""


class Row(NamedTuple):
    """One problem with its samples."""

    result: ProblemResult
    samples: list[Sample]


def render(results: Results) -> str:
    """The page as text."""
    samples: dict[str, list[Sample]] = {}
    for one in results.samples:
        samples.setdefault(one.problem, []).append(one)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    return template.render(
        results=results,
        k=results.sampling.samples,
        tiles=tiles(results),
        rows=[Row(result, samples.get(result.id, [])) for result in results.problems],
        facts=facts(results),
        percent=percent,
        count=count,
        tail=TAIL,
    )


def tiles(results: Results) -> list[tuple[str, str, str]]:
    """Headline numbers: label, value, detail."""
    summary, k = results.summary, results.sampling.samples
    errors = summary.verdicts.get("error", 0)
    return [
        (f"avg@{k}", accuracy(summary), f"{results.task.problems} problems, standard error clustered by problem"),
        (f"pass@{k}", share(summary.pass_k), "at least one sample right"),
        (f"maj@{k}", share(summary.maj_k), "the most frequent answer right"),
        ("truncated", share(summary.truncated_share), f"no answer {share(summary.no_answer_share)}, errors {errors}"),
        ("tokens a response", count(summary.tokens_mean), f"95 % have at most {count(summary.tokens_p95)}"),
        ("wall time", seconds(summary.wall_seconds), f"{count(summary.tokens_per_second)} tokens/s"),
    ]


def facts(results: Results) -> list[tuple[str, Any]]:
    """Everything that tells this run from another."""
    sampling, model = results.sampling, results.model
    rows = [
        ("task", f"{results.task.name}, from {results.task.source}"),
        ("text hash", results.task.text_hash),
        ("prompt", results.task.prompt),
        ("model", model.path or model.model),
        ("config hash", model.config_hash),
        ("weights hash", model.weights_hash),
        ("weight versions", ", ".join(model.weight_versions) or None),
        ("server", model.server),
        ("temperature, top-p", f"{sampling.temperature:g}, {sampling.top_p:g}"),
        ("longest response", f"{sampling.max_tokens:,} tokens"),
        ("reasoning effort", sampling.reasoning_effort),
        ("seed policy", results.seed_policy),
        ("sessions", f"{len(results.sessions)}"),
        ("software", ", ".join(f"{name} {version}" for name, version in results.software.items())),
    ]
    return [(name, value) for name, value in rows if value is not None]


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ results.task.name }} avg@{{ k }} · beam-rl</title>
<style>
:root { --ink: #1b1d22; --soft: #667085; --faint: #e4e7ec; --page: #f7f8fa; --card: #fff; --warn: #a15c07;
  --correct: #12805c; --wrong: #d5d9e0; --no_answer: #8a94a6; --truncated: #d9822b; --timeout: #8b5cd6; --error: #c4320a; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef2; --soft: #98a2b3; --faint: #2b303a; --page: #111318;
  --card: #191c23; --warn: #f0b357; --correct: #4cc79b; --wrong: #3b414d; --no_answer: #7d8797; --truncated: #f0a858;
  --timeout: #b592f5; --error: #ff8a65; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; } h2 { font-size: 15px; margin: 0 0 6px; }
.sub { color: var(--soft); margin: 4px 0 0; overflow-wrap: anywhere; } .warn { color: var(--warn); margin: 4px 0 0; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 14px; margin: 24px 0 14px; }
.card { background: var(--card); border: 1px solid var(--faint); border-radius: 12px; padding: 16px 18px; min-width: 0; }
.tile b { display: block; font-size: 23px; font-weight: 600; letter-spacing: -.02em; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 13px; }
section.card { margin-top: 14px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--faint); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; } .num { text-align: right; white-space: nowrap; }
.dots { white-space: nowrap; } .legend { color: var(--soft); font-size: 13px; }
i { display: inline-block; width: 13px; height: 13px; border-radius: 3px; margin-right: 3px; vertical-align: -1px; border: 1px dashed var(--faint); }
{% for verdict in ["correct", "wrong", "no_answer", "truncated", "timeout", "error"] %}
i.{{ verdict }} { background: var(--{{ verdict }}); border: 0; }
{% endfor %}
summary { cursor: pointer; } pre { font: 12.5px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 12px; }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<h1>{{ results.task.name }}: avg@{{ k }} of {{ results.model.path or results.model.model }}</h1>
<p class="sub">{{ results.status }} · {{ results.samples | length }} of {{ results.summary.expected }} samples</p>
{% for warning in results.warnings %}<p class="warn">{{ warning }}</p>
{% endfor %}
<div class="tiles">
{% for label, value, detail in tiles %}<div class="card tile"><span>{{ label }}</span><b>{{ value }}</b><span>{{ detail }}</span></div>
{% endfor %}</div>
<section class="card"><h2>By problem</h2>
<p class="legend">{% for verdict in ["correct", "wrong", "no_answer", "truncated", "timeout", "error"] %}<i class="{{ verdict }}"></i>{{ verdict | replace("_", " ") }} {{ results.summary.verdicts.get(verdict, 0) }} &nbsp; {% endfor %}</p>
<table><thead><tr><th>problem</th><th>label</th><th>samples</th><th class="num">right</th><th>most frequent answer</th><th class="num">tokens</th></tr></thead><tbody>
{% for row in rows %}<tr><td>{{ row.result.id }}</td><td>{{ row.result.answer | truncate(40) }}</td>
<td class="dots">{% for verdict in row.result.verdicts %}<i class="{{ verdict or "" }}" title="sample {{ loop.index0 }}: {{ verdict or "missing" }}"></i>{% endfor %}</td>
<td class="num">{{ "-" if row.result.avg is none else percent(row.result.avg) }}</td><td>{{ row.result.majority | join(", ") | truncate(60) or "-" }}</td>
<td class="num">{{ count(row.result.tokens_mean) }}</td></tr>
{% endfor %}</tbody></table></section>
<section class="card"><h2>Samples</h2><p class="legend">The end of each response; results.json has all of it.</p>
{% for row in rows %}<details><summary>{{ row.result.id }} · label {{ row.result.answer | truncate(40) }}</summary>
{% for sample in row.samples %}<p class="legend"><i class="{{ sample.verdict }}"></i>sample {{ sample.sample }}: {{ sample.verdict }}
{% if sample.answer is not none %}· answer {{ sample.answer | truncate(80) }}{% endif %} · {{ count(sample.tokens) }} tokens · {{ sample.finish_reason or sample.error }}</p>
<pre>{{ "…" if sample.response | length > tail else "" }}{{ sample.response[-tail:] }}</pre>
{% endfor %}</details>
{% endfor %}</section>
<section class="card"><h2>Run</h2><table><tbody>
{% for name, value in facts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></section>
</main>
</body>
</html>
"""  # noqa: E501
