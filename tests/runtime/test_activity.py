"""SIGTERM: who gets it, and when it is recorded, raised, or ends the process."""

import os
import signal
from collections.abc import Iterator

import pytest

from pipedream.runtime.activity import Interrupts, Terminated


@pytest.fixture(params=[False, True])
def interrupts(request: pytest.FixtureRequest) -> Iterator[Interrupts]:
    users = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    started = Interrupts(patient=request.param)
    started.start()
    yield started
    started.stop()
    signal.signal(signal.SIGTERM, users)


def test_sigterm(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(signal.getsignal(number) is signal.SIG_DFL))
    other = Interrupts(patient=False)
    other.start()  # somebody else handles it
    signal.raise_signal(signal.SIGTERM)
    assert (other.count, interrupts.count, interrupts.is_terminated, ended) == (0, 1, True, [])
    if not interrupts._patient:
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    interrupts.give_up()
    assert ended == [True], "no drain can end"


def test_a_fork_may_be_ended(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    interrupts._process = 0
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]
