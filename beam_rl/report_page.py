"""The page that `report` fills: markup, style and hover, with nothing loaded from anywhere."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ run.name }} · beam-rl</title>
<style>
:root { --ink: #1b1d22; --soft: #667085; --faint: #e4e7ec; --page: #f7f8fa; --card: #fff; --good: #12805c;
  --bad: #c4320a; --warn: #a15c07; --c1: #2f6fde; --c2: #12917a; --c3: #d9822b; --c4: #8b5cd6; --c5: #d1487f; --c6: #8a94a6; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef2; --soft: #98a2b3; --faint: #2b303a; --page: #111318;
  --card: #191c23; --good: #4cc79b; --bad: #ff8a65; --warn: #f0b357; --c1: #6ea0ff; --c2: #45c4ac; --c3: #f0a858;
  --c4: #b592f5; --c5: #f080ab; --c6: #7d8797; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 2px; }
.sub, .note { color: var(--soft); margin: 4px 0 0; }
.note { font-size: 13px; margin: 0 0 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 24px 0 14px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
.card { background: var(--card); border: 1px solid var(--faint); border-radius: 12px; padding: 16px 18px; min-width: 0; }
.tile b { display: block; font-size: 25px; font-weight: 600; letter-spacing: -.02em; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
section.card { margin-top: 14px; overflow-x: auto; }
figure { margin: 0; position: relative; }
svg { width: 100%; height: auto; display: block; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 12px; }
svg path { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--faint); } .axis { stroke: var(--soft); } .cursor { stroke: var(--soft); stroke-dasharray: 2 3; }
.line { stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; } .error { stroke-width: 1.5; opacity: .7; }
.limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4; } .resume { stroke: var(--warn); stroke-dasharray: 1 4; }
{% for n in range(1, 7) %}.line.c{{ n }}, .error.c{{ n }} { stroke: var(--c{{ n }}); } svg .fill.c{{ n }} { fill: var(--c{{ n }}); }
.key.c{{ n }}::before { background: var(--c{{ n }}); }
{% endfor %}
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); min-height: 20px; margin-bottom: 4px; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: middle; }
.key.dot::before { width: 8px; height: 8px; border-radius: 50%; } .key.box::before { width: 10px; height: 10px; }
.key.dash::before { height: 0; border-top: 2px dashed var(--bad); border-radius: 0; }
.tip { position: absolute; pointer-events: none; background: var(--ink); color: var(--card); font-size: 12px; line-height: 1.45;
  padding: 6px 9px; border-radius: 7px; white-space: nowrap; top: 30px; z-index: 1; }
.tip i { font-style: normal; opacity: .7; margin-right: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; margin-top: 6px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--faint); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.num { text-align: right; }
.state { white-space: nowrap; font-weight: 500; }
summary { cursor: pointer; font-weight: 600; } pre { font: 12.5px/1.5 ui-monospace, monospace; overflow-x: auto; }
.empty { color: var(--soft); padding: 60px 0; text-align: center; }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<h1>{{ run.name }}</h1>
<p class="sub">{{ status }}</p>
<div class="tiles">
{% for tile in tiles %}<div class="card tile"><span>{{ tile.label }}</span><b class="{{ tile.tone }}">{{ tile.value }}</b><span>{{ tile.detail }}</span></div>
{% endfor %}</div>
<div class="charts">
{% for chart in charts %}<figure class="card"><h2>{{ chart.title }}</h2><p class="note">{{ chart.note }}</p>{{ chart.svg | safe }}</figure>
{% endfor %}</div>
<section class="card"><h2>Before and after</h2>
{% if comparison %}<table><thead><tr><th></th><th class="num">before</th><th class="num">after</th><th class="num">change</th></tr></thead>
<tbody>{% for row in comparison %}<tr><td>{{ row[0] }}</td>{% for cell in row[1:] %}<td class="num">{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table>
{% else %}<p class="note">Appears with the second evaluation.</p>{% endif %}</section>
<section class="card"><h2>Is this run healthy?</h2><p class="note">Averages over the last {{ window }} steps unless it says otherwise.</p>
<table><thead><tr><th>metric</th><th>now</th><th>healthy</th><th>red flag</th><th>state</th></tr></thead>
<tbody>{% for check in checks %}<tr><td>{{ check.metric }}</td><td>{{ check.now }}</td><td>{{ check.healthy }}</td><td>{{ check.red_flag }}</td>
<td class="state {{ tones[check.state] }}">{{ check.state }}</td></tr>{% endfor %}</tbody></table></section>
{% if summary %}<section class="card"><h2>Summary</h2>
<table><tbody>{% for key, value in summary %}<tr><td>{{ key }}</td><td class="num">{{ value }}</td></tr>{% endfor %}</tbody></table></section>{% endif %}
{% if run.recipe %}<section class="card"><details><summary>Settings (resolved recipe)</summary><pre>{{ run.recipe }}</pre></details></section>{% endif %}
</main>
<script>
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const points = JSON.parse(svg.dataset.points), figure = svg.closest("figure"), cursor = svg.querySelector(".cursor");
  const tip = document.createElement("div"); tip.className = "tip"; tip.hidden = true; figure.append(tip);
  const leave = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const [step, x, rows] = points.reduce((a, b) => Math.abs(b[1] - at) < Math.abs(a[1] - at) ? b : a);
    cursor.setAttribute("d", `M${x},{{ top }}V{{ bottom }}`);
    tip.replaceChildren(`step ${step}`, ...rows.flatMap(([name, value]) => {
      const label = document.createElement("i"); label.textContent = name; return [document.createElement("br"), label, value]; }));
    tip.hidden = false;
    const left = x / svg.viewBox.baseVal.width * box.width + svg.offsetLeft + (box.left - figure.getBoundingClientRect().left);
    tip.style.left = `${left + tip.offsetWidth + 24 < figure.clientWidth ? left + 12 : Math.max(4, left - tip.offsetWidth - 12)}px`;
  });
}
</script>
</body>
</html>
"""  # noqa: E501
