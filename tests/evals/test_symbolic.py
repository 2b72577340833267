"""The grader's processes: an answer that hangs, or a process that dies, costs no other answer its verdict."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from beam_rl.evals import grader as grader_module
from beam_rl.evals.grader import Grader, Verdict

HANGS = r"\boxed{9^{9^{9^{9}}}}"
"""sympy computes this for longer than anyone waits."""


def test_grading_needs_no_alarm_signal(symbolic: Grader) -> None:
    fresh = Grader(workers=1, timeout=1.0)
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    alarms: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
    try:
        # a busy machine may need more than 1 s
        assert fresh.grade(r"\boxed{\dfrac{1}{2}}", "0.5") in (Verdict.correct, Verdict.timeout)
        assert fresh.grade(HANGS, "7") is Verdict.timeout
        assert symbolic.grade(r"\boxed{\dfrac{1}{2}}", "0.5") is Verdict.correct
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        fresh.close()
    assert not alarms


@pytest.mark.timeout(120)
def test_answer_that_hangs_sympy_costs_its_own_verdict_alone() -> None:
    grader = Grader(workers=2, timeout=6.0)
    good = [(f"\\boxed{{\\frac{{{2 * index + 1}}}{{2}}}}", f"{index}.5") for index in range(30)]
    try:
        with ThreadPoolExecutor(8) as threads:
            cases = [*good[:15], (HANGS, "7"), (HANGS, "7"), *good[15:]]
            verdicts = list(threads.map(lambda case: grader.grade(*case), cases))
    finally:
        grader.close()
    assert verdicts == [Verdict.correct] * 15 + [Verdict.timeout] * 2 + [Verdict.correct] * 15


def test_an_answer_that_a_busy_machine_kept_waiting_is_no_timeout() -> None:
    """The comparison is stopped from outside for longer than the timeout, as a busy machine would."""
    script = (
        "import os, signal, threading\n"
        "from beam_rl.evals import symbolic_worker as worker\n"
        "def slow(gold, answer):\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return gold == answer\n"
        "def go_on(after):\n"
        "    with open(f'/proc/self/task/{os.getpid()}/children') as children:\n"
        "        [os.kill(int(pid), signal.SIGCONT) for pid in children.read().split()]\n"
        "worker.equal = slow\n"
        "threading.Timer(3.0, go_on, (0,)).start()\n"
        "print(worker.compare('1', '1', 2.0))\n"
        "print(worker.compare('1', '1', 0.3))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["equal", "timeout"], "but one that never gets a processor is over in the end"


def test_killed_worker_is_replaced() -> None:
    grader = Grader(workers=1, timeout=3.0)
    try:
        assert grader.grade(r"\boxed{\frac12}", "0.5") is Verdict.correct
        (worker,) = list(grader._symbolic._slots.queue)
        assert worker is not None
        worker.kill()
        worker.wait()
        assert grader.grade(r"\boxed{\frac12}", "0.5") is Verdict.correct
        (worker,) = list(grader._symbolic._slots.queue)
        assert worker is not None
        killer = threading.Timer(0.5, worker.kill)  # while it compares: the answer is tried again with another
        killer.start()
        assert grader.grade(HANGS, "7") is Verdict.timeout
    finally:
        grader.close()


def test_killed_caller_leaves_no_process() -> None:
    script = (
        "from beam_rl.evals.grader import Grader\n"
        "g = Grader(workers=1, timeout=60.0)\n"
        "g.grade(r'\\boxed{\\frac12}', '0.5')\n"
        "print(list(g._symbolic._slots.queue)[0].pid, flush=True)\n"
        f"g.grade(r'{HANGS}', '7')\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    worker = int(caller.stdout.readline())
    comparisons: list[int] = []
    deadline = time.monotonic() + 30
    while not comparisons:
        assert time.monotonic() < deadline
        with open(f"/proc/{worker}/task/{worker}/children") as children:
            comparisons = [int(pid) for pid in children.read().split()]
    caller.kill()
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(_running, [worker, *comparisons])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_running, [worker, *comparisons]))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_fork_of_a_grading_process_gets_its_own_workers() -> None:
    before = grader_module._shared
    child = os.fork()
    if child == 0:
        os._exit(0 if grader_module._shared is not before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_interrupted_caller_does_not_leave_its_reply_to_the_next() -> None:
    grader = Grader(workers=1, timeout=20.0)
    try:
        grader.grade(r"\boxed{\frac12}", "0.5")
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            grader.grade(HANGS, "7")
        assert grader.grade(r"\boxed{\frac12}", "0.5") is Verdict.correct
    finally:
        grader.close()


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
