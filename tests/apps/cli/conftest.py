"""What the command answers, and the profile that it plans for."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Answer, Run

import pipedream as pd

LAYER = pd.LayerProfile(1.0, 2.0, output_bytes=1000, parameter_bytes=1000, activation_bytes=100)


@pytest.fixture
def answer(run_command: Run) -> Answer:
    """Returns a function: the arguments of a command -> the one object that it prints with --json."""

    def ask(*arguments: object) -> Any:
        status, out, error = run_command(*arguments, "--json")
        assert status == 0, error
        return json.loads(out)

    return ask


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working directory, with the profile of a chain of six layers and a plan for two workers."""
    monkeypatch.chdir(tmp_path)
    profile = pd.Profile.of_chain((LAYER,) * 6)
    profile.save("profile.json")
    pd.plan(profile, pd.Cluster.flat(2)).save("plan.json")
    return tmp_path
