"""Runs cases over real processes, joined by gloo, and compares each with one process that has all workers."""

from __future__ import annotations

from collections.abc import Sequence

import cases
import processes
from cases import Case, check_same, per_worker, run

__all__ = ["check_processes"]


def check_processes(workers: int, chosen: Sequence[Case]) -> None:
    """Checks that so many processes, started once for all cases, give to the bit what one gives."""
    short = [per_worker(case) for case in chosen]
    of_ranks = processes.results(cases.run_all, workers, short)
    for number, case in enumerate(short):
        alone = run(case)
        for rank, outcomes in enumerate(of_ranks):
            check_same(outcomes[number], alone, rank)
