"""The command `pipedream simulate`: its options for stragglers and for sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipedream import cli
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan, Stage


def asked(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capfd.readouterr()
    assert cli.main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_slow_ranks_and_jitter(capfd: pytest.CaptureFixture[str]) -> None:
    run = ("--uniform", "2", "--minibatches", "40")
    plain = asked(capfd, *run)
    assert plain["makespan_s"] == pytest.approx(40 * 3 + 3)
    assert [row["peak_bytes"] for row in plain["per_rank"]] == [3 + 2 + 3, 2 + 1 + 2 + 3]
    slow = asked(capfd, *run, "--slow", "0=1.5", "--slow", "1=2")
    assert slow["makespan_s"] == pytest.approx(40 * 6 + 4.5)
    first, again, other = (asked(capfd, *run, "--jitter", "0.2", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert first["makespan_s"] != plain["makespan_s"]


def test_sums_may_be_charged_whole(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = (Stage(0, 1, 2, 1.0, 27.0, parameter_bytes=9 << 20),)
    path = str(Plan(rows, (1,), Cluster.flat(2, 1 << 20)).save(tmp_path / "plan.json"))
    assert asked(capfd, path, "--minibatches", "2")["makespan_s"] == pytest.approx(28.0 + 4.0)
    assert asked(capfd, path, "--minibatches", "2", "--no-overlap")["makespan_s"] == pytest.approx(28.0 + 9.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "--slow '1' is not known; write RANK=FACTOR"),
        ("1=fast", "--slow '1=fast' is not known"),
        ("1=0", "found 0.0 for rank 1"),
        ("4=2", "the ranks are 0 to 1"),
    ],
)
def test_nonsense_is_refused(capfd: pytest.CaptureFixture[str], text: str, message: str) -> None:
    assert cli.main(["simulate", "--uniform", "2", "--slow", text]) == 2
    assert message in capfd.readouterr().err


def test_seconds_of_a_weight_gradient(capfd: pytest.CaptureFixture[str]) -> None:
    """m (f + i + w) + (p - 1)(f + i - w): by default each is half of the backward."""
    run = ("--uniform", "4", "--schedule", "zb_h1", "--microbatches", "8", "--backward-s", "2")
    assert asked(capfd, *run)["makespan_s"] == pytest.approx(8 * 3 + 3 * 1)
    assert asked(capfd, *run, "--weight-s", "0.5")["makespan_s"] == pytest.approx(8 * 3 + 3 * 2)
    assert [row["peak_in_flight"] for row in asked(capfd, *run)["per_rank"]] == [4, 4, 4, 4]
