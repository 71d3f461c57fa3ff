"""The time of several functions, called in turns so that each meets the same machine."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

LEAST = 2  # rounds


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    budget: float,
    least: int = LEAST,
    warm_up: int = 2,
) -> dict[str, dict[str, float]]:
    """Times each function in every round, forwards and then backwards.

    Args:
        functions: What is timed, by name.
        rounds: How many rounds at most.
        budget: Seconds after which no further round begins.
        least: How many rounds are run however long they take.
        warm_up: How often each is called first.

    Returns:
        For each the seconds of its fastest call ("best_s"), their median ("median_s"), the median
        of the CPU seconds ("cpu_s"), and the number of rounds ("rounds").
    """
    for _ in range(warm_up):
        for function in functions.values():
            function()
    clock, cpu = ({name: [] for name in functions} for _ in range(2))
    begin = time.perf_counter()
    for i in range(rounds):
        for name in list(functions)[:: -1 if i % 2 else 1]:
            start, used = time.perf_counter(), time.process_time()
            functions[name]()
            clock[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
        if i + 1 >= least and time.perf_counter() - begin > budget:
            break
    return {
        name: {
            "best_s": min(clock[name]),
            "median_s": statistics.median(clock[name]),
            "cpu_s": statistics.median(cpu[name]),
            "rounds": len(clock[name]),
        }
        for name in functions
    }
