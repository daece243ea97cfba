"""Progress bars: where they are shown, and that one is shown at a time."""

import io
import sys
import threading
from typing import Any

import pytest
from rich.console import Console

import pipedream as pd
from pipedream.core.progress import is_live, progress

CHAIN = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 1, 1),) * 4, batch=8)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Makes standard error a terminal; in the test itself, because pytest sets it anew after the fixtures."""
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    return shown


def test_planning_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pd.plan(CHAIN, pd.Cluster.flat(2), schedule="1f1b")
    assert capsys.readouterr() == ("", ""), "it takes less than a line in a log is for"
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        terminal = on_a_terminal(monkeypatch)
        pd.plan(CHAIN, pd.Cluster.flat(2), schedule="1f1b")
        assert ("planning" in terminal.getvalue()) == (rank == "0")


def test_what_takes_long_is_said_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pipedream.core.progress.QUIET_S", 2.0)
    now_s = 0.0
    monkeypatch.setattr("pipedream.core.progress.time.monotonic", lambda: now_s)
    with progress("profiling Large", 200) as advance, progress("inside", 10) as inside:
        for _ in range(200):
            now_s += 1.5
            advance()
            inside()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["profiling Large: 2 of 200, about 297 s left", "profiling Large: 4 of 200, about 294 s left"]
    assert len(lines) < 12, "the later, the rarer"
    monkeypatch.setenv("RANK", "1")
    with progress("profiling Large", 2) as advance:
        now_s += 10.0
        advance()
    assert not capsys.readouterr().err


def test_a_first_step_that_is_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    is_said, lines = threading.Event(), io.StringIO()
    monkeypatch.setattr(lines, "flush", is_said.set)
    monkeypatch.setattr(sys, "stderr", lines)
    monkeypatch.setattr("pipedream.core.progress.QUIET_S", 0.01)
    with progress("planning"):
        assert is_said.wait(60)
    assert lines.getvalue() == "planning ...\n"


def test_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with progress("outer", 2) as advance, progress("inner", 3) as inside:
        advance()
        inside()
    assert "outer" in terminal.getvalue()
    assert "inner" not in terminal.getvalue()
    with pytest.raises(ZeroDivisionError), progress("failed"):
        print(1 // 0)
    with progress("again"):
        pass
    assert "again" in terminal.getvalue()


def test_a_notebook_needs_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    console: Any = type("Console", (), {"is_terminal": False, "is_jupyter": True})
    for spec in (None, object()):
        monkeypatch.setattr("pipedream.core.progress.find_spec", lambda name, spec=spec: spec)
        assert is_live(console) is (spec is not None)
    assert not is_live(Console(file=io.StringIO()))
