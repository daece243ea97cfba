"""The slowness of work whose cores others use, from made-up counters of the kernel."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pipedream.services.probe.core_times import CoreTimes

SECONDS = st.floats(0.1, 100.0)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def write_counters(proc: Path, waits_ns: dict[int, int], stat: str) -> None:
    for thread, wait_ns in waits_ns.items():
        folder = proc / "self" / "task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(f"5 {wait_ns} 7\n")
    (proc / "stat").write_text(stat)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_work_waits_for_cores(run_s: float, wait_s: float, others_s: float, stolen_s: float, before_s: float) -> None:
    """Work that takes `run_s` on a free core has as much less of it as it waits, and as a host takes."""
    wait_s = min(wait_s, others_s)
    used_s = run_s + others_s
    before = CoreTimes(before_s, before_s, before_s, before_s)
    after = CoreTimes(before_s + run_s, before_s + wait_s, before_s + used_s, before_s + stolen_s)
    share = run_s / (run_s + wait_s) * used_s / (used_s + stolen_s)
    assert before.slowness_until(after) == pytest.approx(1 / share)
    assert before.slowness_until(replace(before, run_s=before_s + run_s)) == 1
    assert before.slowness_until(CoreTimes(before_s + run_s)) == 1, "threads that ended take their waits along"


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_waiting_for_each_other_is_no_other_work(run_s: float, ours_s: float, wait_s: float, others_s: float) -> None:
    end = CoreTimes(run_s=run_s, wait_s=wait_s, used_s=run_s + ours_s)
    assert CoreTimes().slowness_until(end, run_s + ours_s) == pytest.approx(1)
    disturbed = replace(end, used_s=end.used_s + others_s)
    assert CoreTimes().slowness_until(disturbed, run_s + ours_s) == pytest.approx(1 + min(wait_s, others_s) / run_s)


def test_the_counters_are_those_of_all_threads_and_of_the_machine(tmp_path: Path) -> None:
    # user, nice, system, idle, waits for disks, interrupts of both kinds, steal, guests (which are part of user)
    write_counters(tmp_path, {1: 3_000_000_000, 2: 500_000_000}, "cpu  100 20 30 9999 9999 4 6 50 77 0\ncpu0 1 2\n")
    times = CoreTimes.now(tmp_path)
    assert (times.wait_s, times.used_s, times.stolen_s) == (3.5, 160 / TICKS_PER_S, 50 / TICKS_PER_S)
    assert times.run_s > 0


def test_a_system_that_does_not_say_has_free_cores(tmp_path: Path) -> None:
    write_counters(tmp_path, {}, "cpu  100\n")
    (tmp_path / "self" / "task" / "1").mkdir(parents=True)
    (tmp_path / "self" / "task" / "1" / "schedstat").write_text("\n")
    assert replace(CoreTimes.now(tmp_path), run_s=0.0) == CoreTimes()
