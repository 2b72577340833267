"""`beam-rl swap`: find out what WEIGHTS is, exchange, report."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from beam_rl import fingerprint, secret
from beam_rl.model.errors import BadInput
from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import Fingerprint
from beam_rl.swap import Endpoint, EndpointFailed, EndpointReport, Report, Wanted, rollback, swap


def run(options: argparse.Namespace) -> int:
    """One command; 0 when every server does what was asked, 1 when none changed or all went back, 2 for bad input."""
    token = secret.read("--admin-token-file", options.admin_token_file, secret.ADMIN_VARIABLE)
    if token is None:
        raise BadInput(f"swap: the servers' admin token is needed: --admin-token-file, or {secret.ADMIN_VARIABLE}.")
    if not (options.lease > 0 and options.timeout > 0) or (options.drain is not None and not options.drain > 0):
        raise BadInput("--lease, --timeout and --drain must be positive.")
    without = options.status or options.rollback or options.remove_adapter
    if (options.weights is None) != without:
        raise BadInput("swap: give WEIGHTS, or one of --status, --rollback and --remove-adapter.")
    endpoints = [Endpoint(url, token, options.lease, options.timeout) for url in dict.fromkeys(options.endpoint)]
    for endpoint in endpoints:
        if endpoint.exposes_token:
            say(f"note: the admin token goes to {endpoint.url} unencrypted; put TLS in front of it")
    try:
        if options.status:
            return _status(endpoints, options.json)
        if options.rollback:
            report = rollback(endpoints, say)
        else:
            wanted = _wanted(options)
            report = swap(wanted, endpoints, dry_run=options.dry_run, progress=say)
    finally:
        for endpoint in endpoints:
            endpoint.close()
    print(json.dumps(report.to_dict(), indent=1) if options.json else "\n".join(_lines(report)))
    if report.refused:
        return 2
    return 0 if report.ok else 1


def _wanted(options: argparse.Namespace) -> Wanted:
    """What is to be served. Raises BadInput."""
    common = {
        "label": options.label,
        "allow_older": options.allow_older,
        "drain_seconds": options.drain,
        "tolerance": options.tolerance,
    }
    if options.weights is None:
        return Wanted(None, **common)
    folder = options.weights
    if (folder / "adapter_config.json").is_file():
        return Wanted(folder, "adapter", **common)
    if (folder / "recipe.yaml").is_file():
        folder = _exported(folder)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder}: neither a checkpoint (config.json), a run (recipe.yaml) nor an adapter.")
    return Wanted(folder, fingerprint=None if options.no_fingerprint else _fingerprint(folder), **common)


def _exported(run_dir: Path) -> Path:
    """The export of a run's last checkpoint, made now if there is none or it is of an earlier one."""
    if fingerprint.is_current(run_dir):
        return run_dir / "export"
    from beam_rl import scoring

    say(f"export the last checkpoint of {run_dir}")
    return scoring.export(run_dir, None)


def _fingerprint(folder: Path) -> Fingerprint | None:
    """The trainer's numbers for weights that were exported without; None where the manifest has them."""
    known = manifest.read(folder)
    if known is not None and known.fingerprint is not None:
        return None
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > fingerprint.SMALL_BYTES:
        say(f"note: {folder} has no fingerprint, and is too large to make one here: the probe compares with nothing")
        return None
    say(f"score the probe's prompt with the trainer's engine: {folder} has no fingerprint")
    return fingerprint.apart(folder)


def _status(endpoints: Sequence[Endpoint], as_json: bool) -> int:
    states: dict[str, dict[str, object]] = {}
    for endpoint in endpoints:
        try:
            states[endpoint.url] = endpoint.status()
        except EndpointFailed as error:
            states[endpoint.url] = {"error": str(error)}
    if as_json:
        print(json.dumps(states, indent=1))
    else:
        for url, state in states.items():
            print(url)
            for name, value in state.items():
                if value is not None:
                    print(f"  {name:<10}{value}")
    return int(any("error" in state or state["broken"] for state in states.values()))


def _lines(report: Report) -> list[str]:
    """The report for people."""
    return [line for one in report.endpoints for line in _endpoint_lines(one)]


def _endpoint_lines(one: EndpointReport) -> list[str]:
    lines = [f"{one.endpoint}: {one.outcome}"]
    if one.before is not None:
        lines.append(f"  version   {one.before} → {one.after}, {one.bytes:,} bytes")
    if one.seconds:
        lines.append("  seconds   " + ", ".join(f"{name} {value:.3f}" for name, value in one.seconds.items()))
    if "pause" in one.seconds:
        lines.append(f"  pause     {one.seconds['pause']:.3f} s with {one.kept} requests in flight kept")
    for name, probe in (("probe", one.probe), ("verified", one.verified)):
        if probe is not None:
            lines.append(f"  {name:<10}mean {probe['mean']:.2e}, max {probe['max']:.2e} from {probe['against']}")
    if one.error is not None:
        lines.append(f"  error     {one.error}")
    return lines


def say(line: str) -> None:
    """Progress goes to standard error: standard output is the report."""
    print(f"beam-rl swap: {line}", file=sys.stderr, flush=True)
