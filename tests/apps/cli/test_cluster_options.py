"""Clusters on the command line: a file, a paper's name, workers of unequal machines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Answer, Refused, Run

import pipedream as pd
from pipedream.apps.cli import presets
from pipedream.apps.cli.options import make_cluster, read_cluster
from pipedream.apps.training import train

DIGITS = str(Path(__file__).parents[3] / "examples" / "digits.py")


def cluster(*workers: str, bandwidth: tuple[str, ...] = ()) -> pd.Cluster:
    return make_cluster(workers, bandwidth or ("1B/s",) * len(workers), 0.0, None)


def run(**options: Any) -> object:
    return pd.run(lambda: None, workers=2, quiet=True, **options)  # type: ignore[arg-type]


def named(text: str) -> pd.Cluster:
    return read_cluster(Path(text))


def test_unequal_machines_are_joined_by_plus() -> None:
    joined = cluster("4+4+2", "3", bandwidth=("12e9", "10Gbit/s"))
    assert joined.levels == (pd.Level(4, 12e9, sizes=(4, 4, 2)), pd.Level(3, 1.25e9))
    assert cluster("2,2", bandwidth=("2e0,1B/s",)).levels == (pd.Level(2, 2.0), pd.Level(2, 1.0))
    assert cluster("1+2,1+1,2", bandwidth=("3000", "2000", "1e0")).workers == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cluster("4+4", "3"), "level 0 has 3 groups, but sizes of 2"),
        (lambda: cluster("4+4+2"), "level 0 has 1 groups, but sizes of 3"),
        (lambda: cluster("4+", "2"), r"--workers 4\+ 2 was asked for; give a whole number"),
        (lambda: cluster("4+0", "2"), r"one for each, as in 4\+4\+2 3"),
        (lambda: cluster("0"), "--workers 0 was asked for"),
        (lambda: named("nowhere"), "cluster 'nowhere' is neither a file nor known by that name"),
        (lambda: named("pipedream-a:two"), "write NAME:MACHINES with a whole number"),
        (lambda: named("absent.json"), r"absent\.json"),
        (lambda: run(cluster=pd.Cluster.flat(3)), "the cluster has 3 workers, 2 were asked for; start as many as it"),
        (lambda: run(shape="2-1"), "the plan 2-1 is for 3 workers, 2 were asked for"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(pd.PipelineError, match=message):
        make()


def test_a_name_is_a_papers_cluster_unless_it_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("pipedream-b") == presets.cluster("pipedream-b")
    assert named("pipedream-a:2") == presets.cluster("pipedream-a", 2)
    monkeypatch.chdir(tmp_path)
    pd.Cluster.flat(3).save("pipedream-a")
    assert named("pipedream-a") == pd.Cluster.flat(3)


def test_a_plan_is_simulated_on_another_cluster(tmp_path: Path, answer: Answer, refused: Refused) -> None:
    rows = tuple(pd.Stage(s, s + 1, 1, 1.0, 1.0, output_bytes=1_250_000_000) for s in range(2))
    plan = pd.Plan(rows, (2, 1), pd.Cluster.flat(2), note="the fastest", bound_s=1.0)
    path = plan.save(tmp_path / "plan.json")
    for options, transfer_s in (((), 1.0), (("--cluster", "pipedream-b:1"), 1.25 / 150)):
        run = answer("simulate", path, "--minibatches", 1, *options)
        assert run["makespan_s"] == pytest.approx(4.0 + 2 * transfer_s)
    assert (plan.on(pd.Cluster.flat(2, 1.0)).note, plan.on(pd.Cluster.flat(2)).bound_s) == ("", 0.0)
    for arguments, message in (
        ((path, "--cluster", "pipedream-c:1"), "the stages take 2 workers, the cluster has 1; plan again for that"),
        (("--uniform", 2, "--cluster", "pipedream-c"), "a cluster is for the stages of a plan"),
    ):
        assert message in refused("simulate", *arguments)


def test_a_plan_for_a_papers_cluster(files: Path, run_command: Run) -> None:
    replace(pd.Profile.load("profile.json"), device="Titan X").save("profile.json")
    limits = "--cluster pipedream-c:3", "--cluster pipedream-c:3 --memory 9GB", "--workers 2+1 2 --bandwidth 1e9 1e8"
    for limit, cluster in zip((12 * 10**9, 9 * 10**9, None), limits, strict=True):
        assert run_command("plan", "profile.json", *cluster.split(), "-o", "out.json")[0] == 0
        assert pd.Plan.load("out.json").cluster.memories == (limit,) * 3


@pytest.mark.parametrize(
    ("arguments", "levels", "memory_bytes"),
    [
        ("", None, None),
        ("--memory 2GB", None, 2 * 10**9),
        ("--bandwidth 1Gbit/s", (pd.Level(4, 1.25e8),), None),
        ("--bandwidth 1e9 1e8 --latency 0.001", (pd.Level(2, 1e9, 1e-3), pd.Level(2, 1e8, 1e-3)), None),
        ("--bandwidth 1e9 25mbit/s+50ms", (pd.Level(2, 1e9), pd.Level(2, 3.125e6, 0.05)), None),
        ("--latency 0", (pd.Level(4, 1.25e9),), None),
        ("--cluster four --memory 3GB", (pd.Level(4, 7.0),), 3 * 10**9),
    ],
)
def test_training_gets_the_cluster_that_is_described(
    arguments: str, levels: Any, memory_bytes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Run
) -> None:
    """Two machines of two workers; what is not described is left to be found out."""
    received: dict[str, Any] = {}
    monkeypatch.setattr(train, "train_recipe", lambda make, **options: received.update(options))
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    pd.Cluster.flat(4, 7.0).save("four")
    assert run_command("train", DIGITS, *arguments.split())[0] == 0
    cluster = received.get("cluster")
    assert (cluster.levels if cluster else None, received.get("memory_bytes")) == (levels, memory_bytes)
