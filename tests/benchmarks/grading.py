"""Gradings a second in one thread: plain integers, and whole environments as a training step makes them.

`.venv/bin/python tests/benchmarks/grading.py`
"""

import time

import skyrl_gym

from beam_rl import environment
from beam_rl.evals.arithmetic import generate, row, solution
from beam_rl.evals.grader import grade

COUNT = 10_000


def main() -> None:
    start = time.perf_counter()
    for number in range(COUNT):
        grade(f"12+7=19\n19-5=\\boxed{{{number}}}", "14")
    print(f"plain integers  {COUNT / (time.perf_counter() - start):>9,.0f} a second")

    environment.register()
    problems = generate(seed=1, train=512, held_out=64).train
    start = time.perf_counter()
    for problem in problems:
        skyrl_gym.make("beam_math", env_config={}, extras=row(problem)).step(solution(problem))
    print(f"environments    {len(problems) / (time.perf_counter() - start):>9,.0f} a second")


if __name__ == "__main__":
    main()
