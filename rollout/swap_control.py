"""The weights of one running server: staged, exchanged under load, probed, rolled back; one client at a time.

A server is at every moment wholly on one version. What could fail is done before the engine stops (`swap_stage`);
while it is paused it only reads a file that was verified; and should that fail, the version before is read again. The
engine keeps its requests through a pause: what they have generated stays, their KV is computed anew under the new
weights, and prefixes cached under the old ones are dropped.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from beam_rl.rollout import swap_probe
from beam_rl.rollout.manifest import probe_tokens
from beam_rl.rollout.serve_settings import ServeSettings
from beam_rl.rollout.serve_versions import record
from beam_rl.rollout.swap_probe import Probe
from beam_rl.rollout.swap_stage import Wanted, stage
from beam_rl.rollout.swap_store import Unfit, Version, check_space

logger = logging.getLogger(__name__)


class Busy(Exception):
    """Another client holds the lease, or the caller's has expired."""


class Failed(Exception):
    """An exchange did not happen; the server serves what it served before."""


@dataclass(frozen=True)
class Lease:
    """A client's right to change the weights."""

    id: str
    holder: str
    seconds: float
    until: float = field(default=0.0)
    """On the clock `time.monotonic`."""


class Control:
    """State and operations; everything runs on the server's event loop, one operation at a time."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.in_flight = 0
        """Requests of the data plane that are being answered."""
        self.broken: str | None = None
        """Why the engine has no whole version any more; None as long as it has."""
        self.versions: dict[str, Version] = {}
        self.current = self.previous = self.staged = ""
        """Names of versions; empty where there is none."""
        self.lease: Lease | None = None
        self.packed = 0
        """Files packed so far, for their names."""
        self._lock = asyncio.Lock()
        self._pausing: set[asyncio.Task[None]] = set()

    async def start(self, engine: Any) -> None:
        """Take hold of an engine that has just loaded its first version."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        record(engine)
        self.engine = engine
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        initial = Version.of_file(Path(self.settings.initial))
        self.versions[initial.name] = initial
        self.current = initial.name
        await engine.update_weight_version(initial.name)
        probe = await self._probe(initial, None)
        if not probe.fits:
            logger.warning(
                "version %s scores its prompt %.3g from the numbers of its %s (mean; at most %.3g was expected)",
                initial.name, probe.mean, probe.against, probe.tolerance,
            )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """What the server serves and what it could go back to."""
        lease = self._valid_lease()
        return {
            "version": self.current,
            "digest": self.versions[self.current].manifest.digest,
            "base": self._base().name,
            "previous": self.previous or None,
            "staged": self.staged or None,
            "lease": lease and {"holder": lease.holder, "expires_in": lease.until - time.monotonic()},
            "in_flight": self.in_flight,
            "broken": self.broken,
        }

    # Operations of a client that holds the lease

    async def prepare(self, lease: Lease, wanted: Wanted | None, dry_run: bool) -> dict[str, Any]:
        """Take the lease and stage weights; None stages the full weights that the served adapter was merged into.

        Raises:
            Busy: another client has the lease.
            Unfit: the weights cannot be served here; the lease is free again. Failed: there is no engine any more.
        """
        if self.engine.errored:
            raise Failed("the engine is dead")
        self._take(lease, new=True)
        async with self._lock:
            self._unstage()
            started = time.monotonic()
            out = Path(self.settings.store) / f"{self.settings.prefix}-{self.packed + 1}.safetensors"
            base = self._base()
            try:
                if wanted is None:
                    version = base
                else:
                    check_space(out.parent, base.manifest.bytes)
                    args = (wanted, Path(self.settings.model), self.versions[self.current], base)
                    version = await asyncio.to_thread(stage, *args, None if dry_run else out)
                    self._check_prompt(version)
            except BaseException:
                self.lease = None
                raise
            self.packed += 1
            already = version.manifest.digest == self.versions[self.current].manifest.digest
            name = self.current if already else version.name
            if not already and not dry_run:
                self._keep(version)
                self.staged = name
            elif already and wanted is not None and not dry_run:
                version.remove()
            self._take(lease)
        return {
            "before": self.current,
            "version": name,
            "already": already,
            "bytes": version.manifest.bytes,
            "fingerprint": version.manifest.fingerprint and version.manifest.fingerprint.source,
            "seconds": time.monotonic() - started,
        }

    async def commit(self, lease: Lease, drain_seconds: float | None, tolerance: float | None) -> dict[str, Any]:
        """Serve the staged version, or, if its model is not the one exported, the version before as before.

        Args:
            drain_seconds: let requests in flight finish first, waiting at most so long; None keeps them through it.
            tolerance: of the probe, over the engine's default.

        Raises:
            Busy: the lease has expired. Failed: nothing staged, or the exchange failed; the version before is served.
        """
        self._take(lease)
        async with self._lock:
            if not self.staged:
                raise Failed("nothing is staged")
            before, older, new = self.current, self.previous, self.versions[self.staged]
            timing = await self._exchange(new, drain_seconds)
            self.current, self.previous, self.staged = new.name, before, ""
            started = time.monotonic()
            probe = await self._probe(new, tolerance)
            report: dict[str, Any] = {"before": before, "version": new.name, "probe": asdict(probe)}
            report |= timing | {"probe_seconds": time.monotonic() - started}
            if probe.fits:
                self._prune()
                self._take(lease)
                return report | {"outcome": "committed"}
            self.previous = older
            back = await self._return_to(before)
            self._prune()
            self._take(lease)
            return report | {"outcome": "rolled back", "verified": asdict(back)}

    async def rollback(self, lease: Lease, undo: str | None) -> dict[str, Any]:
        """Serve the version before again, verified against what this server measured when it served it.

        Args:
            undo: do so only if this version is served, and else report that nothing was to be undone.

        Raises:
            Busy: another client has the lease. Failed: there is no version before, or the exchange failed.
        """
        self._take(lease, new=True)
        async with self._lock:
            self._unstage()
            left = self.current
            if undo is not None and undo != left:
                return {"outcome": "nothing to undo", "version": left}
            if not self.previous:
                raise Failed("there is no version before the one served")
            started = time.monotonic()
            probe = await self._return_to(self.previous)
            self.previous = left if undo is None else ""  # what was undone is nothing to go back to
            self._prune()
            self._take(lease)
            seconds = time.monotonic() - started
            return {
                "outcome": "rolled back", "before": left, "version": self.current,
                "verified": asdict(probe), "seconds": seconds,
            }  # fmt: skip

    async def release(self, lease: Lease) -> dict[str, Any]:
        """Give the lease back; what is still staged is dropped. Raises Busy: it is another client's."""
        held = self._valid_lease()
        if held is not None and held.id != lease.id:
            raise Busy(f"{held.holder} holds the lease")
        async with self._lock:
            self.lease = None
            self._unstage()
        return {"version": self.current}

    # The engine

    async def _exchange(self, version: Version, drain_seconds: float | None) -> dict[str, Any]:
        """Pause, write, resume. Raises Failed: the version that was served is served again."""
        if not version.intact:
            raise Failed(f"{version.path} is gone or cut off: {version.name} must be staged again")
        kept, started = self.in_flight, time.monotonic()
        try:
            await self._pause(drain_seconds)
            paused = time.monotonic()
            try:
                await self._write(version)
            except Exception as error:
                await self._recover(error)
                raise Failed(f"the engine did not take {version.name}: {error}") from error
            written = time.monotonic()
            self.broken = None
        finally:
            await self.engine.resume_generation()
        return {
            "kept": kept if drain_seconds is None else 0,
            # The step that runs when the exchange begins still makes tokens; from its end on nothing does.
            "pause_seconds": time.monotonic() - paused,
            "write_seconds": written - paused,
            "wait_seconds": paused - started,
        }

    async def _pause(self, drain_seconds: float | None) -> None:
        """Return when no step runs any more and no KV of the old weights is left. Raises Failed: not drained in time.

        The engine's own method is called, not the client's, which adds 20 ms to let outputs pass that bear their
        weights' version anyway.
        """
        core = self.engine.engine_core
        mode = "keep" if drain_seconds is None else "wait"
        task = asyncio.ensure_future(core.pause_scheduler_async(mode=mode, clear_cache=True))
        self._pausing.add(task)
        task.add_done_callback(self._pausing.discard)
        await asyncio.wait({task}, timeout=drain_seconds)
        if not task.done():
            raise Failed(f"requests in flight did not finish within {drain_seconds:g} s")
        await task

    async def _write(self, version: Version) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.engine.start_weight_update()
        await self.engine.update_weights(WeightTransferUpdateRequest(update_info={"path": str(version.path)}))
        await self.engine.finish_weight_update(version.name)

    async def _recover(self, error: Exception) -> None:
        """After a failed write: the receiver checks before it writes, but nobody knows how far it came."""
        try:
            await self._write(self.versions[self.current])
        except Exception as second:
            self.broken = f"the engine lost its weights: {error}; and reading {self.current} again failed: {second}"
            logger.error("%s", self.broken)
            with suppress(Exception):  # those requests would get nonsense, or nothing ever
                await self.engine.pause_generation(mode="abort")

    async def _return_to(self, name: str) -> Probe:
        """Serve a version that was served before. Raises Failed: it does not come out as it was."""
        version = self.versions[name]
        await self._exchange(version, None)
        self.current = name
        assert version.own is not None  # it was served
        tokens, own = version.own
        found = await swap_probe.measure(self.engine, tokens)
        limit = swap_probe.tolerance(self.settings.dtype, own)
        probe = swap_probe.compare(found, own, limit, "this server, when it served the version")
        if not probe.fits:
            raise Failed(f"{name} is loaded again, but scores its prompt {probe.mean:.3g} from what it did before")
        return probe

    async def _probe(self, version: Version, tolerance: float | None) -> Probe:
        """Measure a version that has just been loaded, against its fingerprint if it has one."""
        known = version.manifest.fingerprint
        tokens = probe_tokens(self.engine.model_config.get_vocab_size()) if known is None else known.tokens
        found = await swap_probe.measure(self.engine, tokens)
        self.versions[version.name] = version.with_own(tokens, found)
        expected, source = (
            (found, "nothing: it has no fingerprint") if known is None else (known.logprobs, known.source)
        )
        limit = swap_probe.tolerance(self.settings.dtype, expected) if tolerance is None else tolerance
        return swap_probe.compare(found, expected, limit, source)

    def _check_prompt(self, version: Version) -> None:
        """Raise Unfit: the fingerprint's prompt is too long for this server."""
        known, longest = version.manifest.fingerprint, self.engine.model_config.max_model_len
        if known is not None and len(known.tokens) >= longest:
            version.remove()
            raise Unfit(f"the fingerprint's prompt has {len(known.tokens)} tokens, the server takes {longest - 1}")

    # Lease and files

    def _valid_lease(self) -> Lease | None:
        if self.lease is not None and self.lease.until < time.monotonic() and not self._lock.locked():
            self.lease = None
            self._unstage()
        return self.lease

    def _take(self, asked: Lease, new: bool = False) -> None:
        """Renew the caller's lease, or take a free one if `new`. Raises Busy."""
        held = self._valid_lease()
        if held is not None and held.id != asked.id:
            left = max(0.0, held.until - time.monotonic())
            raise Busy(f"{held.holder} is exchanging weights; its lease ends within {left:.0f} s")
        if held is None and not new:
            raise Busy("the lease has expired: prepare again")
        until = time.monotonic() + asked.seconds
        self.lease = Lease(asked.id, asked.holder, asked.seconds, until)
        # So that what a dead client staged does not wait for the next one.
        asyncio.get_running_loop().call_later(asked.seconds + 0.1, self._valid_lease)

    def _base(self) -> Version:
        """Full weights without an adapter: those served, or those that the served adapter was merged into."""
        return self.versions[self.versions[self.current].base or self.current]

    def _keep(self, version: Version) -> None:
        """Add a version; what was known under its name are the same weights, in a file that may be gone."""
        known = self.versions.get(version.name, version)
        self.versions[version.name] = version if known.own is None else version.with_own(*known.own)
        if known.path != version.path:
            known.remove()

    def _unstage(self) -> None:
        self.staged = ""
        self._prune()

    def _prune(self) -> None:
        """Delete versions that nothing goes back to."""
        used = {self.current, self.previous, self.staged}
        used |= {version.base or "" for name, version in self.versions.items() if name in used}
        for name in [name for name in self.versions if name not in used]:
            self.versions.pop(name).remove()
