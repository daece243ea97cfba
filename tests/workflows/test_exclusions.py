"""Options that exclude each other: Python and the command read one table and use one wording."""

from pathlib import Path
from typing import Any

import pytest
from commands import Refused

import pipedream as pd
from pipedream.workflows.exclusions import EXCLUSIONS, as_flag, as_keyword

PROFILE = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 1000, 1000, 100),) * 4)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "2bw", "cuts": (2,), "update_delay": 1},
        {"strategy": "2bw", "shape": "straight"},
        {"schedule": "interleaved_1f1b", "shape": "1-1"},
        {"schedule": "1f1b", "chunks": 2},
        {"schedule": "auto", "cuts": (1, "layer2")},
        {"cuts": (2,), "shape": "data-parallel"},
    ],
    ids=str,
)
def test_python_and_the_command_refuse_alike(options: dict[str, Any], tmp_path: Path, refused: Refused) -> None:
    with pytest.raises(pd.errors.PlanError) as raised:
        pd.plan(PROFILE, pd.Cluster.flat(2), **options)
    in_python, reason = str(raised.value).split("; ")[0].split(", but ")
    keyword, *others = (as_keyword(name, value) for name, value in options.items())
    assert in_python == f"{keyword} was given with {' and '.join(others)}"
    flag, *others = flags = [as_flag(name, value) for name, value in options.items()]
    words = " ".join(flags).split()
    in_command = refused("plan", PROFILE.save(tmp_path / "profile.json"), "--workers", 2, *words)
    assert in_command.startswith(f"pipedream: {flag} was given with {' and '.join(others)}, but {reason};")


def test_a_run_takes_a_plan_or_a_shape() -> None:
    with pytest.raises(pd.PipelineError, match=r"plan=<Plan 1-1 .*> was given with shape='straight', but a plan has"):
        pd.run(pytest.fail, plan=pd.plan(PROFILE, pd.Cluster.flat(2)), shape="straight")  # the recipe is not made


def test_a_refusal_has_a_reason_and_says_what_to_do() -> None:
    for row in EXCLUSIONS:
        assert row.others, row.condition
        assert not row.reason.endswith("."), row.reason
        assert row.advice.split()[0] in ("give", "leave"), row.advice


def test_an_elastic_run_has_no_mesh(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "recipe.py").touch()
    mesh = ["--elastic", "--workers", "4", "--config", "1-1", "--mesh", "model:2"]
    assert "--elastic was given with --mesh model:2, but a mesh" in refused("train", str(tmp_path / "recipe.py"), *mesh)
