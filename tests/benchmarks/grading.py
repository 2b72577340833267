"""How fast responses are graded, and what answers cost that never finish.

`.venv/bin/python tests/benchmarks/grading.py` prints gradings a second (plain integers in one thread, `beam-rl grade`
over a file, whole environments as a training step makes them), then the time for 1,000 symbolic answers of which 20
hang sympy, against its bound: the time without those 20, plus 20 x timeout / workers. Exit code 1 if a bound is missed.
"""

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import skyrl_gym

from beam_rl import environment
from beam_rl.eval_command import verdicts
from beam_rl.evals.arithmetic import generate, row, solution
from beam_rl.evals.grader import Grader, Verdict, grade

COUNT = 50_000
WANTED = 5_000
"""Plain integers a second, on two cores."""
HANGS = r"\boxed{9^{9^{9^{9}}}}"
ANSWERS, HANGING, TIMEOUT = 1_000, 20, 5.0


def main() -> int:
    start = time.perf_counter()
    for number in range(COUNT):
        grade(f"12+7=19\n19-5=\\boxed{{{number}}}", "14")
    plain = COUNT / (time.perf_counter() - start)
    print(f"plain integers  {plain:>9,.0f} a second (at least {WANTED:,})")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "responses.jsonl"
        line = json.dumps({"response": "Let me see. " * 500 + "\\boxed{042}", "answer": 42}) + "\n"
        file.write_text(line * COUNT)
        start = time.perf_counter()
        assert set(verdicts(file)) == {"correct"}
        print(f"grade FILE      {COUNT / (time.perf_counter() - start):>9,.0f} a second, of 6,000 characters each")

    environment.register()
    problems = generate(seed=1, train=512, held_out=64).train
    start = time.perf_counter()
    for problem in problems:
        skyrl_gym.make("beam_math", env_config={}, extras=row(problem)).step(solution(problem))
    print(f"environments    {len(problems) / (time.perf_counter() - start):>9,.0f} a second")
    return 0 if hanging() and plain >= WANTED else 1


def hanging() -> bool:
    """Grade with and without the answers that hang; whether the bound held and all others were right."""
    workers = len(os.sched_getaffinity(0))
    fine = [(f"\\boxed{{\\frac{{{2 * number + 1}}}{{2}}}}", f"{number}.5") for number in range(ANSWERS - HANGING)]
    every = ANSWERS // HANGING - 1
    mixed = [case for place in range(0, len(fine), every) for case in (*fine[place : place + every], (HANGS, "7"))]
    assert len(mixed) == ANSWERS
    without, _ = graded(fine, workers)
    taken, found = graded(mixed, workers)
    bound = without + HANGING * TIMEOUT / workers
    right, hung = found.count(Verdict.correct), found.count(Verdict.timeout)
    print(f"without hangs   {without:>9.1f} s for {len(fine)} symbolic answers, {workers} workers")
    print(f"with {HANGING} hangs   {taken:>9.1f} s (at most {bound:.1f}); right {right}, timeouts {hung}")
    return taken <= bound and (right, hung) == (len(fine), HANGING)


def graded(cases: list[tuple[str, str]], workers: int) -> tuple[float, list[Verdict]]:
    """Seconds and verdicts, by a fresh grader."""
    grader = Grader(workers=workers, timeout=TIMEOUT)
    try:
        with ThreadPoolExecutor(4 * workers) as threads:
            start = time.perf_counter()
            found = list(threads.map(lambda case: grader.grade(*case), cases))
            return time.perf_counter() - start, found
    finally:
        grader.close()


if __name__ == "__main__":
    sys.exit(main())
