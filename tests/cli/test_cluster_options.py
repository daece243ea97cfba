"""Clusters on the command line: a file, a paper's name, workers of unequal machines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import pipedream as pd
from pipedream import cli
from pipedream.cli.options import make_cluster, read_cluster
from pipedream.core.errors import PlanError
from pipedream.core.hardware import presets
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.stage import Stage
from pipedream.options import TrainingOptions
from pipedream.recipe import load_recipe
from pipedream.training import train


def cluster(*workers: str, bandwidth: tuple[str, ...] = ()) -> Cluster:
    return make_cluster(workers, bandwidth, 0.0, None)


def test_unequal_machines_are_joined_by_plus() -> None:
    joined = cluster("4+4+2", "3", bandwidth=("12e9", "10Gbit/s"))
    assert joined.levels == (Level(4, 12e9, sizes=(4, 4, 2)), Level(3, 1.25e9))
    assert (joined.workers, joined.starts(1)) == (10, (0, 4, 8, 10))
    assert cluster("2,2", bandwidth=("2,1",)).levels == (Level(2, 2.0), Level(2, 1.0))
    assert cluster("1+2,1+1,2", bandwidth=("3", "2", "1")).workers == 3


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (("4+4", "3"), "level 0 has 3 groups, but sizes of 2"),
        (("4+4+2",), "level 0 has 1 groups, but sizes of 3"),
        (("4+", "2"), r"--workers 4\+ 2 was asked for; give a whole number"),
        (("4+0", "2"), r"one for each, as in 4\+4\+2 3"),
        (("0",), "--workers 0 was asked for"),
    ],
)
def test_what_makes_no_sense_is_refused(workers: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cluster(*workers, bandwidth=("1",) * len(workers))


def test_a_name_is_a_papers_cluster_unless_it_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(text: str) -> Cluster:
        return read_cluster(Path(text))

    assert named("pipedream-b") == presets.cluster("pipedream-b")
    assert named("pipedream-a:2") == presets.cluster("pipedream-a", 2)
    with pytest.raises(PlanError, match="cluster 'nowhere' is neither a file nor known by that name"):
        named("nowhere")
    with pytest.raises(PlanError, match="write NAME:MACHINES with a whole number"):
        named("pipedream-a:two")
    with pytest.raises(Exception, match=r"absent\.json"):
        named("absent.json")
    monkeypatch.chdir(tmp_path)
    Cluster.flat(3).save(tmp_path / "pipedream-a")
    assert named("pipedream-a") == Cluster.flat(3)


def test_a_plan_is_simulated_on_another_cluster(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    rows = tuple(Stage(s, s + 1, 1, 1.0, 1.0, output_bytes=1_250_000_000) for s in range(2))
    path = str(pd.Plan(rows, (2, 1), Cluster.flat(2), note="the fastest", bound_s=1.0).save(tmp_path / "plan.json"))

    def makespan_s(*arguments: str) -> float:
        assert cli.main(["simulate", path, "--minibatches", "1", "--json", *arguments]) == 0
        return float(json.loads(capfd.readouterr().out)["makespan_s"])

    assert makespan_s() == pytest.approx(4.0 + 2 * 1.0)
    assert makespan_s("--cluster", "pipedream-b:1") == pytest.approx(4.0 + 2 * 1.25 / 150)
    plan = pd.Plan.load(Path(path))
    assert (plan.on(Cluster.flat(2, 1.0)).note, plan.on(Cluster.flat(2)).bound_s) == ("", 0.0)
    assert "the stages take 2 workers, the cluster has 1; plan again for that cluster" in refused(
        "simulate", path, "--cluster", "pipedream-c:1"
    )
    assert "a cluster is for the stages of a plan" in refused("simulate", "--uniform", "2", "--cluster", "pipedream-c")


def test_a_plan_for_a_papers_cluster(tmp_path: Path) -> None:
    layer = LayerProfile(1.0, 2.0, output_bytes=1000, parameter_bytes=1000, activation_bytes=100)
    measured = Profile.of_chain((layer,) * 6, device="Titan X")
    profile, out = str(measured.save(tmp_path / "profile.json")), tmp_path / "plan.json"
    for cluster in (("--cluster", "pipedream-c:3"), ("--workers", "2+1", "2", "--bandwidth", "1e9", "1e8")):
        assert cli.main(["plan", profile, *cluster, "-o", str(out)]) == 0
        assert pd.Plan.load(out).cluster.workers == 3


DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")


@pytest.mark.parametrize(
    ("arguments", "levels", "memory_bytes"),
    [
        ("", None, None),
        ("--memory 2GB", None, 2 * 10**9),
        ("--bandwidth 1Gbit/s", (Level(4, 1.25e8),), None),
        ("--bandwidth 1e9 1e8 --latency 0.001", (Level(2, 1e9, 1e-3), Level(2, 1e8, 1e-3)), None),
        ("--latency 0", (Level(4, 1.25e9),), None),
        ("--cluster four", (Level(4, 7.0),), None),
    ],
)
def test_training_gets_the_cluster_that_is_described(
    arguments: str,
    levels: tuple[Level, ...] | None,
    memory_bytes: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two machines of two workers; what is not described is left to be found out."""
    training: list[TrainingOptions] = []
    monkeypatch.setattr(train, "train_recipe", lambda make, **options: training.append(TrainingOptions(**options)))
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Cluster.flat(4, 7.0).save(tmp_path / "four")
    assert cli.main(["train", DIGITS, *arguments.split()]) == 0
    assert (training[0].cluster.levels if training[0].cluster else None) == levels
    assert training[0].memory_bytes == memory_bytes


def test_training_with_links_that_make_no_sense(tmp_path: Path, refused: Callable[..., str]) -> None:
    Cluster.flat(3).save(tmp_path / "three.json")
    three = ["train", DIGITS, "--cluster", str(tmp_path / "three.json")]
    assert "the cluster determines these" in refused(*three, "--memory", "1GB")
    assert "a plan has its own stages, workers, links" in refused(
        "train", DIGITS, "--plan", "none.json", "--bandwidth", "1"
    )
    with pytest.raises(PlanError, match="the cluster has 3 workers, 2 were asked for; start as many as it has"):
        pd.run(lambda seed: load_recipe(DIGITS), cluster=Cluster.flat(3), workers=2, quiet=True)
