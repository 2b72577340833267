"""Symbolic comparison of answers with a wall-clock bound, from any thread of any process.

math-verify bounds its time with SIGALRM, which raises outside the main thread: in a thread pool or a Ray actor every
answer then counts as wrong. Here the work is done by child processes that are started when first needed and fork for
every answer (`symbolic_worker`). They are plain subprocesses: they neither import the caller's `__main__` nor share
its threads, locks or signal handlers.
"""

import contextlib
import json
import queue
import subprocess
import sys
from typing import Literal, cast

Outcome = Literal["equal", "different", "timeout"]


class SymbolicPool:
    """Up to `workers` processes that compare LaTeX answers, each comparison bounded by `timeout` seconds.

    Safe to call from many threads at once; a caller waits for a free process, and that wait is not counted in the
    timeout. Not to be shared over a fork.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self._timeout = timeout
        # One entry a slot, None where no process was started yet; last in, first out keeps the number started low.
        self._slots: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        self._workers = workers
        for _ in range(workers):
            self._slots.put(None)

    def compare(self, gold: str, answer: str) -> Outcome:
        """Whether `answer` means the same as `gold`.

        Raises:
            RuntimeError: the process died twice on this answer (killed from outside, or it cannot start).
        """
        request = json.dumps({"gold": gold, "answer": answer})
        for _ in range(2):
            worker = self._slots.get()
            answered = False
            try:
                if worker is None:
                    worker = self._start()
                reply = _ask(worker, request)
                answered = reply != ""
            finally:
                # Also after KeyboardInterrupt: the next caller must not read the reply to this question.
                if not answered and worker is not None:
                    _stop(worker)
                    worker = None
                self._slots.put(worker)
            if answered:
                return cast(Outcome, reply)
        raise RuntimeError(f"the grader's process died twice while comparing an answer of {len(answer)} characters")

    def close(self) -> None:
        """Ends the processes; waits for comparisons in progress."""
        for _ in range(self._workers):
            worker = self._slots.get()
            if worker is not None:
                _stop(worker)
        for _ in range(self._workers):
            self._slots.put(None)

    def _start(self) -> subprocess.Popen[str]:
        # -P: a file called json.py in the working directory must not shadow the standard library's.
        command = [sys.executable, "-P", "-m", "beam_rl.evals.symbolic_worker", str(self._timeout)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            _stop(worker)
            raise RuntimeError(f"the grader's process did not start (exit code {worker.returncode}): see above")
        return worker


def _ask(worker: subprocess.Popen[str], request: str) -> str:
    """The worker's reply, empty when it is dead."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(request + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return ""
    return worker.stdout.readline().strip()


def _stop(worker: subprocess.Popen[str]) -> None:
    """Closes the pipes, upon which the worker kills the comparison in progress and ends."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # a request that a dead worker did not take is still buffered
        worker.stdin.close()
    worker.stdout.close()
    worker.wait()
