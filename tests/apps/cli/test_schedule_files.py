"""A schedule's file in PyTorch's notation, wherever the command takes a method's name."""

from pathlib import Path

import pytest
from commands import Answer, Refused, Run
from zoo import alike_layers

import pipedream as pd
from pipedream.extensions.torch_csv.notation import write as to_torch_csv
from tests.apps.cli import test_data_runs_no_code


@pytest.fixture
def looped(tmp_path: Path) -> str:
    """Returns a file of interleaved 1F1B: four stages on two ranks, four microbatches."""
    path = tmp_path / "looped.csv"
    built = pd.schedules.build("interleaved_1f1b", pd.schedules.uniform("interleaved_1f1b", 2), 4)
    path.write_text(to_torch_csv(built))
    return str(path)


def test_show_writes_and_reads(run_command: Run, answer: Answer, tmp_path: Path, refused: Refused) -> None:
    file, svg = tmp_path / "mine.csv", tmp_path / "mine.svg"
    status, drawn, _ = run_command("show", "1f1b", "--stages", 3, "--microbatches", 4, "--csv", file)
    assert status == 0
    assert file.read_text().splitlines()[0] == "0F0,0F1,0F2,,,0B0,0F3,0B1,,0B2,,0B3"
    status, again, _ = run_command("show", file, "--verify", "--svg", svg)
    assert status == 0
    assert again.startswith(drawn.rstrip("\n"))
    assert f"Proof of {file}, plan 1-1-1" in again
    assert "3 stages" in svg.read_text()
    rows = answer("show", file, "--minibatches", 2)
    assert rows["proof"]["peak_in_flight"] == [3, 2, 1]
    assert "F7" in rows["grid"][1], "a second minibatch"
    refusal = refused("show", "pipedream", "--csv", file, "--svg", tmp_path / "new" / "drawn.svg")
    assert ("updates without a flush" in refusal, (tmp_path / "new" / "drawn.svg").is_file()) == (True, True)
    assert "is for 3 workers, and 2 were asked for" in refused("show", file, "--stages", 2)
    assert "the file itself says which stages a worker has" in refused("show", file, "--chunks", 2)
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert "wait for each other for ever" in refused("show", file)


def test_simulate(answer: Answer, looped: str, tmp_path: Path, refused: Refused) -> None:
    run = ("simulate", "--uniform", 2, "--schedule")
    by_name = answer(*run, "interleaved_1f1b", "--microbatches", 4)
    assert answer(*run, looped) == by_name
    assert answer(*run, looped, "--minibatches", 2)["makespan_s"] == 2 * by_name["makespan_s"]
    assert "the file has 4" in refused(*run, looped, "--microbatches", 8)
    error = refused("simulate", pd.Plan.uniform(4).save(tmp_path / "straight.json"), "--schedule", looped)
    assert "4 stages on ranks 0, 1, 0, 1, the plan 1-1-1-1 on 0, 1, 2, 3" in error


def cuts_of(plan: pd.Plan) -> list[tuple[int, int]]:
    return [(stage.first, stage.last) for stage in plan.stages]


def test_plans_of_files(looped: str, tmp_path: Path) -> None:
    def plan(workers: int = 2, memory_bytes: int | None = None, **options: object) -> pd.Plan:
        cluster = pd.Cluster.flat(workers, memory_bytes=memory_bytes)
        return pd.plan(alike_layers(8), cluster, **{"schedule": looped} | options)

    even = plan()
    assert cuts_of(even) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert (even.worker_order, even.schedule, even.microbatches) == ((0, 1, 0, 1), looped, 4)
    by_hand = plan(cuts=(1, 2, 5))
    assert cuts_of(by_hand) == [(0, 1), (1, 2), (2, 5), (5, 8)]
    most = max(sum(stage.peak_bytes for stage in by_hand.stages[rank::2]) for rank in (0, 1))
    assert plan(cuts=(1, 2, 5), memory_bytes=most).stages
    for options, message in (
        ({"cuts": (1,)}, "has 4 stages, the cuts make 2"),
        ({"workers": 4}, r"has 2 ranks, and a plan for 4 workers was asked for; ask for 2"),
        ({"microbatches": 3}, "3 microbatches"),
        ({"microbatches": 8}, "with 8 microbatches a minibatch: the file has 4"),
        ({"shape": "data-parallel"}, "data-parallel"),
        ({"cuts": (1, 2, 5), "memory_bytes": most - 1}, r"stages \d, \d of worker \d need up to"),
    ):
        with pytest.raises(pd.PipelineError, match=message):
            plan(**options)
    # A straight file is planned as its method is.
    path = tmp_path / "straight.csv"
    path.write_text(to_torch_csv(pd.schedules.build("gpipe", pd.Plan.uniform(2), 4)))
    straight = pd.plan(alike_layers(7), pd.Cluster.flat(2), schedule=str(path))
    assert (cuts_of(straight), straight.worker_order) == ([(0, 3), (3, 7)], ())


RECIPE = test_data_runs_no_code.RECIPE.replace(
    "nn.Linear(3, 2)", "nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)), nn.Linear(3, 2))"
)


def test_train(looped: str, tmp_path: Path, answer: Answer, started: list[int]) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE)
    summary = answer("train", recipe, "--schedule", looped, "--epochs", 1, "--out", tmp_path / "run")
    assert started == [2]
    chosen = summary["configuration"]
    assert (chosen["workers"], chosen["microbatches"], chosen["schedule"]) == (2, 4, looped)
    assert [row["rank"] for row in summary["stages"]] == [0, 1, 0, 1]
