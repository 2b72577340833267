"""The process behind `evals.symbolic`: compares LaTeX answers with math-verify, each one in a fork that can be killed.

It imports sympy once and forks for every answer: a fork takes milliseconds, so killing one costs the next answer
nothing, and neither memory exhaustion nor a crash inside sympy reaches beyond its own answer. Timeouts are the
waiting parent's, so no signal handler and no alarm is involved. A busy machine that gives an answer no processor gives
it more time: a timeout says something about the answer.

Protocol: one JSON object `{"gold", "answer"}` a line on stdin, one word a line on stdout; end of stdin ends it.
Run as `python -m beam_rl.evals.symbolic_worker TIMEOUT_SECONDS`.
"""

import gc
import json
import logging
import os
import resource
import select
import signal
import sys
import time

from math_verify import LatexExtractionConfig, parse, verify

from beam_rl.evals.symbolic import Outcome

MEMORY_LIMIT = 4 << 30
"""Bytes of address space for one comparison: `9^{9^{9^9}}` must not take the machine's memory."""
OWN_SHARE = 0.9
"""Share of the timeout after which a comparison is ended; the rest is for starting and ending it."""
WORKED_SHARE = 0.2
"""Share of the timeout that it must have had a processor by then, and gets otherwise: most need a hundredth of it."""
PATIENCE = 4.0
"""After this many timeouts it is over in any case."""
RESOLUTION = 0.05
"""Seconds of processor time that do not matter: the kernel counts in hundredths."""

_WARM_UP = (
    (r"-\frac{1}{2}", r"0.5"),
    (r"\sqrt{2}+x^{2}", r"x^2+2^{1/2}+1"),
    (r"\{1,2\}", r"(2,1)"),
    (r"x=5", r"42\text{ cm}"),
    (r"\left[0,1\right)", r"\log 2+2\pi i"),
)
"""The LaTeX parser fills its tables as it meets constructs; what is met before the first fork, every fork has."""


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX answers mean the same (math-verify, without its alarm-based timeouts)."""
    config = [LatexExtractionConfig()]
    parsed = [
        parse(f"${text}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (gold, answer)
    ]
    return all(parsed) and verify(parsed[0], parsed[1], timeout_seconds=None)


def compare(gold: str, answer: str, timeout: float) -> Outcome:
    """Runs `equal` in a fork; kills the fork within `timeout` seconds, or as soon as nobody reads the result.

    A fork that a busy machine kept waiting has more, `PATIENCE` timeouts at most.
    """
    child = os.fork()
    if child == 0:
        # Should this process itself be killed, its caller must see the pipes close and the kernel must end the fork.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, sys.stdin.fileno())
        os.dup2(null, sys.stdout.fileno())
        cpu_seconds = int(timeout) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        status = 2
        try:
            status = 0 if equal(gold, answer) else 1
        finally:
            os._exit(status)  # whatever was raised (MemoryError, RecursionError): not shown to be equal
    descriptor, reader = os.pidfd_open(child), sys.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(reader, 0)  # reports an error once the other end is closed
    events = wait(poll, child, timeout)
    os.close(descriptor)
    finished = descriptor in events
    if not finished:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if reader in events:
        raise SystemExit
    if not finished:
        return "timeout"
    return "equal" if os.waitstatus_to_exitcode(status) == 0 else "different"


def wait(poll: select.poll, child: int, timeout: float) -> dict[int, int]:
    """What `poll` reports before the child's time is up; empty when it is."""
    end, pause = time.monotonic() + PATIENCE * timeout, OWN_SHARE * timeout
    while not (events := dict(poll.poll(pause * 1000))):
        pause = min(WORKED_SHARE * timeout - processor_seconds(child), end - time.monotonic())
        if pause <= RESOLUTION:
            break
    return events


def processor_seconds(pid: int) -> float:
    """Processor time of a process."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()  # after the name, which may hold anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Serves comparisons until stdin ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the mask is inherited: whatever the caller blocks is unblocked
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback when the caller is gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's; this process ends with its stdin
    logging.disable()  # math-verify warns that its own timeouts are off
    timeout = float(sys.argv[1])
    for gold, answer in _WARM_UP:
        equal(gold, answer)
    gc.freeze()  # forks share these pages
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(compare(request["gold"], request["answer"], timeout), flush=True)


if __name__ == "__main__":
    main()
