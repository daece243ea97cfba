"""Faults on purpose: whom they hit, when, and how often. tests/apps/training/test_restarts.py has a run with one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pipedream as pd
from pipedream.services.failure.simulated_fault import FaultInjector, SimulatedFault


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_hits_one_rank_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *of: sent.append(of))
    kind = {signal.SIGKILL: "kill", signal.SIGSTOP: "hang"}[number]
    fault = SimulatedFault.parse(f"kind={kind},rank=1,after=3")
    ranks = [FaultInjector(fault, rank, 2, restarts) for rank, restarts in ((0, 0), (1, 0), (1, 1))]
    for trained in range(1, 6):
        for rank in ranks:
            rank.finish_minibatch(trained)
        assert sent == ([(os.getpid(), number)] if trained >= 3 else [])


SLOW = """
import time
from pipedream.services.failure.simulated_fault import FaultInjector, SimulatedFault
injector = FaultInjector(SimulatedFault(0, 1, "slow"), 0, 1, 0)
injector.finish_minibatch(1)
time.sleep(600)
"""


def test_a_slow_rank_is_stopped_and_continued() -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW]) as process:
        for states in ("T", "RS", "T", "RS"):  # proc(5)
            while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] not in states:
                assert process.poll() is None
        (throttle,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    while Path(f"/proc/{throttle}").exists() and " Z " not in Path(f"/proc/{throttle}/stat").read_text():
        time.sleep(0.01)


@pytest.mark.parametrize(
    "text",
    ["", "rank=1,after=3", "rank=1,after=0,kind=kill", "rank=-1,after=1,kind=kill", "rank=0,after=1,kind=die",
     "rank=0,after=1,kind=hang,for=3"],
)  # fmt: skip
def test_refusals(text: str) -> None:
    with pytest.raises(
        pd.errors.RecipeError, match=r"was asked for; give rank=R,after=MINIBATCHES,kind=kill\|hang\|slow"
    ):
        SimulatedFault.parse(text)
    with pytest.raises(
        pd.errors.RecipeError, match="a fault of rank 2 was asked for, but the run has the processes 0 to 1"
    ):
        FaultInjector(SimulatedFault(2, 1, "kill"), 0, 2, 0)
