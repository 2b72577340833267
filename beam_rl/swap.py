"""Exchanging the weights of several servers: all of them or none, and at every failure each wholly on one version.

Two phases. First every server stages and verifies the weights while it goes on serving; only when all have, they are
exchanged, everywhere at once. A server whose model then does not score as exported goes back by itself; whatever
happens to one, the others are sent back, too. Nothing here is needed to repair a server: should this process die, its
lease runs out, and the next swap starts from whatever each server serves.
"""

import getpass
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from beam_rl.model.errors import BadInput
from beam_rl.rollout.manifest import Fingerprint

ADMIN = "/beam/admin/"
CONNECT_SECONDS = 10.0
SETTLE_SECONDS = 20.0
"""How long a server that did not answer is asked what it serves now."""

Progress = Callable[[str], None]
"""Called with the name of a phase that begins."""


class EndpointFailed(Exception):
    """A server did not do what it was asked to."""


class Refused(EndpointFailed):
    """A server does not take these weights."""


@dataclass(frozen=True)
class Wanted:
    """Weights to serve."""

    weights: Path | None
    """Folder of a checkpoint or an adapter; None for the full weights below the served adapter."""
    kind: Literal["checkpoint", "adapter"] = "checkpoint"
    label: str | None = None
    """Name for the version; by default its step, or the folder's name."""
    fingerprint: Fingerprint | None = None
    """The trainer's numbers, where the folder's manifest has none."""
    allow_older: bool = False
    """Take an earlier step of the run that is served."""
    drain_seconds: float | None = None
    """Let requests in flight finish first, at most so long; None keeps them."""
    tolerance: float | None = None
    """Of the probe, over the servers' default."""


@dataclass
class EndpointReport:
    """What happened at one server."""

    endpoint: str
    outcome: str = "unchanged"
    """unchanged, staged (dry run), already there, committed, rolled back, failed, or unreachable."""
    before: str | None = None
    after: str | None = None
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: stage; wait (for the running step to end, or draining); pause (from then until requests go on) and the
    write that is most of it; probe; rollback."""
    kept: int = 0
    """Requests that were in flight during the exchange and went on."""
    probe: dict[str, Any] | None = None
    verified: dict[str, Any] | None = None
    """The probe after a rollback, against what the server measured when it served the version before."""
    error: str | None = None


@dataclass
class Report:
    """What happened everywhere."""

    endpoints: list[EndpointReport]
    ok: bool = False
    refused: bool = False
    """The weights are to blame, not the servers."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Endpoint:
    """The control plane of one server."""

    def __init__(self, url: str, token: str, lease_seconds: float, timeout: float) -> None:
        """Raises BadInput: not the URL of a server."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise BadInput(f"--endpoint {url}: give a server's address, for example http://127.0.0.1:8000.")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.report = EndpointReport(self.url)
        self.timeout = timeout
        self.lease = {
            "lease": secrets.token_hex(16),
            "holder": f"{getpass.getuser()}@{socket.gethostname()} (process {os.getpid()})",
            "lease_seconds": lease_seconds,
        }
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    @property
    def exposes_token(self) -> bool:
        """Whether the token travels unencrypted over a network."""
        parts = urlsplit(self.url)
        try:
            local = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
        except ValueError:
            local = False
        return parts.scheme == "http" and not local

    def status(self) -> dict[str, Any]:
        """What the server serves. Raises EndpointFailed."""
        return self._call("GET", "status", None)

    def post(self, action: str, **content: Any) -> dict[str, Any]:
        """One operation under this client's lease. Raises EndpointFailed, or Refused."""
        return self._call("POST", action, self.lease | content)

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, action: str, content: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = self._client.request(method, ADMIN + action, json=content)
            answer = response.json()
        except httpx.HTTPError as error:
            raise EndpointFailed(f"{action}: {type(error).__name__}: {error}".rstrip(": ")) from error
        except ValueError as error:
            raise EndpointFailed(f"{action}: not a server of beam-rl serve (status {response.status_code})") from error
        if response.status_code != httpx.codes.OK or not isinstance(answer, dict):
            why = answer.get("error", answer) if isinstance(answer, dict) else answer
            kind = Refused if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY else EndpointFailed
            raise kind(f"{action}: {why}")
        return answer


def swap(wanted: Wanted, endpoints: Sequence[Endpoint], *, dry_run: bool = False, progress: Progress) -> Report:
    """Serve weights on all endpoints, or go on serving what each served. Failures are in the report."""
    report = Report([endpoint.report for endpoint in endpoints])
    with ThreadPoolExecutor(len(endpoints)) as threads:
        progress("stage and verify")
        prepared = list(threads.map(lambda one: _prepare(one, wanted, dry_run), endpoints))
        if dry_run or not all(prepared):
            list(threads.map(_release, endpoints))
            report.ok = dry_run and all(prepared)
            report.refused = any(one.report.outcome == "refused" for one in endpoints)
            return report
        progress("exchange")
        committed = list(threads.map(lambda one: _commit(one, wanted), endpoints))
        report.ok = all(committed)
        if not report.ok:
            progress("roll back")
            list(threads.map(_undo, endpoints))
        list(threads.map(_release, endpoints))
    return report


def rollback(endpoints: Sequence[Endpoint], progress: Progress) -> Report:
    """Serve the version before on all endpoints; where one cannot, the others go forward again."""
    report = Report([endpoint.report for endpoint in endpoints])
    with ThreadPoolExecutor(len(endpoints)) as threads:
        progress("roll back")
        done = list(threads.map(_rollback, endpoints))
        report.ok = all(done)
        if not report.ok:
            list(threads.map(_undo, [one for one, ok in zip(endpoints, done, strict=True) if ok]))
        list(threads.map(_release, endpoints))
    return report


def _prepare(endpoint: Endpoint, wanted: Wanted, dry_run: bool) -> bool:
    report = endpoint.report
    fingerprint = None if wanted.fingerprint is None else asdict(wanted.fingerprint)
    try:
        answer = endpoint.post(
            "prepare",
            weights=None if wanted.weights is None else str(wanted.weights.absolute()),
            kind=wanted.kind,
            label=wanted.label,
            fingerprint=fingerprint,
            allow_older=wanted.allow_older,
            dry_run=dry_run,
        )
    except EndpointFailed as error:
        report.outcome = "refused" if isinstance(error, Refused) else "failed"
        report.error = str(error)
        return False
    report.before = report.after = answer["before"]
    report.bytes = answer["bytes"]
    report.seconds["stage"] = answer["seconds"]
    report.outcome = "already there" if answer["already"] else "staged" if dry_run else "unchanged"
    if not answer["already"]:
        report.after = answer["version"]
    return True


def _commit(endpoint: Endpoint, wanted: Wanted) -> bool:
    report = endpoint.report
    if report.outcome == "already there":
        return True
    try:
        answer = endpoint.post("commit", drain_seconds=wanted.drain_seconds, tolerance=wanted.tolerance)
    except EndpointFailed as error:
        report.error = str(error)
        report.outcome = "failed"
        return False
    report.outcome, report.kept, report.probe = answer["outcome"], answer["kept"], answer["probe"]
    report.verified = answer.get("verified")
    report.seconds |= {name: answer[f"{name}_seconds"] for name in ("wait", "write", "pause", "probe")}
    if report.outcome == "committed":
        return True
    report.error = (
        f"{report.after} scores its prompt {report.probe['mean']:.3g} from the numbers of its {report.probe['against']}"
        f" (mean; at most {report.probe['tolerance']:.3g})"
    )
    report.after = report.before
    return False


def _undo(endpoint: Endpoint) -> bool:
    """Go back from the version that this swap brought, if it is served; a server that was not reached is waited for."""
    report = endpoint.report
    if report.outcome in ("already there", "refused") or (report.outcome == "rolled back" and report.error is not None):
        return True
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            answer = endpoint.post("rollback", undo=report.after)
            break
        except EndpointFailed as error:
            if time.monotonic() > end:
                report.outcome = "unreachable"
                report.error = f"{report.error}; then {error}" if report.error else str(error)
                return False
            time.sleep(1.0)
    report.after = answer["version"]
    report.outcome = "rolled back" if answer["outcome"] == "rolled back" else "unchanged"
    report.verified = answer.get("verified", report.verified)
    if "seconds" in answer:
        report.seconds["rollback"] = answer["seconds"]
    return True


def _rollback(endpoint: Endpoint) -> bool:
    report = endpoint.report
    try:
        answer = endpoint.post("rollback")
    except EndpointFailed as error:
        report.outcome, report.error = "failed", str(error)
        return False
    report.outcome, report.before, report.after = answer["outcome"], answer["before"], answer["version"]
    report.verified = answer["verified"]
    report.seconds["rollback"] = answer["seconds"]
    return True


def _release(endpoint: Endpoint) -> None:
    with suppress(EndpointFailed):  # the lease ends by itself
        endpoint.post("release")
