"""A training run's versions go into live servers as they are made (`beam.publish`).

Training itself writes the checkpoint, with digests and a fingerprint, between two steps. A thread of its own exchanges
the weights, and whatever happens to a server there, training hears of it as a note: it never waits for a server, and
never ends because of one. While a server is slow, versions in between are left out: the newest goes next.
"""

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from beam_rl import secret
from beam_rl.model.errors import BadInput
from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import Origin
from beam_rl.settings import BeamSettings
from beam_rl.swap import Endpoint, Wanted, swap

Note = Callable[[str], None]
"""Tells the user a line; called from the publisher's thread, too."""
LEASE_SECONDS = 60.0


def admin_token(beam: BeamSettings) -> str:
    """The token of the servers that a recipe publishes to.

    Raises:
        BadInput: there is none, or an address is not one.
    """
    file = Path(beam.publish_token_file).expanduser() if beam.publish_token_file else None
    token = secret.read("beam.publish_token_file", file, secret.ADMIN_VARIABLE)
    if token is None:
        raise BadInput(
            "beam.publish: the servers' admin token is wanted. Name its file in beam.publish_token_file, or set "
            f"{secret.ADMIN_VARIABLE}."
        )
    for url in beam.endpoints:
        try:
            Endpoint(url, token, LEASE_SECONDS, 1.0).close()
        except BadInput as error:
            raise BadInput(f"beam.publish: {error}") from error
    return token


class Publisher:
    """Exchanges versions, one at a time, newest first."""

    def __init__(
        self, endpoints: Sequence[str], token: str, run_dir: Path, note: Note, *, every: int = 1, timeout: float = 600.0
    ) -> None:
        """Start the thread.

        Args:
            endpoints: addresses of servers that `beam-rl serve` started.
            token: their admin token (`secret.read`).
            run_dir: the run's folder; checkpoints in transit lie in its `publish/`.
            every: publish after every so many steps.
            timeout: seconds after which an answer of a server is given up.

        Raises:
            BadInput: an endpoint is not an address.
        """
        for url in endpoints:
            Endpoint(url, token, LEASE_SECONDS, timeout).close()
        self.endpoints, self.token, self.note, self.every, self.timeout = endpoints, token, note, every, timeout
        self.run_dir = run_dir
        self.published: int | None = None
        """Step of the last version that all servers took."""
        self.failures = 0
        """Versions that they did not take."""
        self._next: tuple[int, Path] | None = None
        self._closing = False
        self._changed = threading.Condition()
        shutil.rmtree(run_dir / "publish", ignore_errors=True)  # of a run that was killed
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
        self._thread.start()

    def step(self, step: int, export: Callable[[Path], None]) -> None:
        """After a training step: write its checkpoint and leave the rest to the thread. Never raises.

        Args:
            step: the training step that was done.
            export: writes the current weights as a checkpoint with a manifest to a folder.
        """
        if step % self.every:
            return
        folder = self.run_dir / "publish" / f"step-{step}"
        try:
            export(folder)
            manifest.add_origin(folder, Origin(self.run_dir.resolve().name, step))
        except Exception as error:
            self.failures += 1
            self.note(f"publish: step {step} could not be written: {error}")
            shutil.rmtree(folder, ignore_errors=True)
            return
        with self._changed:
            overtaken, self._next = self._next, (step, folder)
            self._changed.notify()
        if overtaken is not None:
            shutil.rmtree(overtaken[1], ignore_errors=True)

    def close(self, seconds: float = 60.0) -> None:
        """Finish what was written, waiting at most so long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.note("publish: the servers did not answer; the last version was not published")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                if self._next is None:
                    return
                (step, folder), self._next = self._next, None
            try:
                self._publish(step, folder)
            except Exception as error:
                self.failures += 1
                self.note(f"publish: step {step}: {type(error).__name__}: {error}")
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, step: int, folder: Path) -> None:
        endpoints = [Endpoint(url, self.token, LEASE_SECONDS, self.timeout) for url in self.endpoints]
        try:
            # A resumed run comes to steps again that are served already, and must be able to go on from there.
            report = swap(Wanted(folder, allow_older=True), endpoints, progress=lambda phase: None)
        finally:
            for endpoint in endpoints:
                endpoint.close()
        if report.ok:
            self.published = step
            return
        self.failures += 1
        why = "; ".join(f"{one.endpoint}: {one.error}" for one in report.endpoints if one.error)
        self.note(f"publish: step {step} is not served: {why}")
