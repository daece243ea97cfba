"""Plans that a person edited: a valid one is predicted, an invalid one is refused with one message."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from hypothesis import given, settings, strategies as st

import pipedream as pd
from pipedream.workflows import check, methods

COSTS = {"output_bytes": 1000, "parameter_bytes": 100, "activation_bytes": 80}
ROWS = tuple(pd.LayerProfile(1.0 + i, 2.0, **COSTS) for i in range(6))
CHAIN = pd.Profile.of_chain(ROWS, batch=8, update_s=0.6, optimizer_bytes=60, input_shapes=((8, 5),))

Edit = Callable[[dict[str, Any]], None]
Edited = Callable[..., tuple[int, str]]


@pytest.fixture
def edited(tmp_path: Path, run_command: Run) -> Edited:
    """Returns what `pipedream plan --check` answers on a plan whose JSON was changed: exit status and text."""

    def checked(edit: Edit, *options: str, memory: int | None = None) -> tuple[int, str]:
        edit(data := json.loads(pd.plan(CHAIN, pd.Cluster.flat(4, memory_bytes=memory), shape="1-2-1").to_json()))
        profile = CHAIN.save(tmp_path / "profile.json")
        (tmp_path / "plan.json").write_text(json.dumps(data))
        words = [str(profile) if word == "PROFILE" else word for word in options]
        status, out, err = run_command("plan", "--check", tmp_path / "plan.json", *words)
        return status, out if status == 0 else err

    return checked


def nothing(data: dict[str, Any]) -> None:
    """Leaves a plan as it is."""


def move_a_layer(data: dict[str, Any]) -> None:
    first, second, _ = data["stages"]
    first["last"] = second["first"] = first["last"] + 1


def put(value: Any, *path: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        *before, last = path
        for key in before:
            data = data[key]
        data[last] = value

    return edit


@settings(max_examples=8)
@given(
    st.sampled_from(list(methods.select_methods(allow_asynchronous=True))),
    st.sampled_from(["4", "1-2-1", "2-1", "1-1-1-1"]),
    st.booleans(),
)
def test_what_the_planner_makes_is_valid(schedule: str, shape: str, deep: bool) -> None:
    how = {"schedule": schedule, "shape": shape, "in_flight": "full" if deep else "noam"}
    plan = pd.plan(CHAIN, pd.Cluster.flat(4), **how)
    if schedule == "pipedream_2bw" and deep:
        return  # its own split follows the depth
    result = check.check_plan(plan, profile=CHAIN)
    assert result.differences == ()
    assert result.plan.stages == plan.stages
    without = check.check_plan(plan)
    assert without.score == result.score
    for stage, row in zip(plan.stages[1:], without.plan.stages[1:], strict=True):
        assert stage.peak_bytes == row.peak_bytes


@pytest.mark.parametrize(("factor", "differs"), [(1.005, False), (1.02, True)])
def test_figures_may_differ_by_a_percent(factor: float, differs: bool) -> None:
    plan = pd.plan(CHAIN, pd.Cluster.flat(4))
    first, *rest = plan.stages
    edited = replace(plan, stages=(replace(first, forward_s=factor * first.forward_s), *rest))
    assert bool(check.check_plan(edited, profile=CHAIN).differences) is differs
    assert replace(plan, bound_s=1.1 * plan.slowest_stage_s).gap is None, "the plan is faster: that proves nothing"


def test_a_layer_that_was_moved_is_found_with_the_profile(edited: Edited) -> None:
    status, out = edited(move_a_layer, "PROFILE")
    assert status == 0
    assert "differs: stage 0, layers: the plan names" in out
    assert "differs: stage 0, forward_s: " in out
    status, alike = edited(move_a_layer, "PROFILE", "--json")
    assert (status, bool(json.loads(alike)["differences"])) == (0, True)


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (move_a_layer, "", "its boundary was moved, its figures were not; check it with the model's profile"),
        (put(1, "stages", 0, "last"), "", "a stage ends before layer 1, the next begins at"),
        (put([1, 3, 1], "in_flight"), "", "(5, 3, 1) would do"),
        (put([3, 2], "in_flight"), "", "give one count per stage"),
        (put(9, "stages", 2, "replicas"), "", "the stages take 12 workers, the cluster has 4"),
        (put(9, "stages", 2, "last"), "PROFILE", "the plan covers layers 0 to 8, the model has 6 layers"),
        (put(["x"], "stages", 0, "names"), "PROFILE", "names the layer 'x', but the profile of chain has no such"),
        (put("gpipe", "schedule"), "", "a stage has 2 replicas, and each takes part in every update"),
        (nothing, "--schedule dream", "schedule 'dream' is not known"),
        (nothing, "--schedule pipedream_2bw --microbatches 1", "split the minibatch further"),
        (put(-1.0, "stages", 0, "forward_s"), "", "forward_s cannot be negative"),
    ],
)
def test_an_invalid_plan_is_refused(edited: Edited, edit: Edit, options: str, message: str) -> None:
    status, err = edited(edit, *options.split())
    assert (status, err[:11]) == (2, "pipedream: ")
    assert message in " ".join(err.split())


def test_memory_is_that_of_the_method(edited: Edited) -> None:
    limit = max(stage.peak_bytes for stage in pd.plan(CHAIN, pd.Cluster.flat(4), shape="1-2-1").stages)
    assert edited(nothing, memory=limit)[0] == 0
    status, err = edited(put([6, 3, 1], "in_flight"), "PROFILE", memory=limit)
    assert status == 2
    assert "stage 1 of the plan (layers 2 to 4) holds 3 in flight and 3 versions under pipedream and needs" in err
    assert "a worker has " in err
    # A method that keeps one version needs less for the same depth.
    assert edited(put([6, 3, 1], "in_flight"), "PROFILE", "--schedule", "1f1b", memory=limit)[0] == 0
