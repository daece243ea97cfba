"""docs/resuming.md as a reader follows it: its commands and its program, against a plain loop."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from training import assert_equal, loop

PAGE = (Path(__file__).parents[2] / "docs" / "resuming.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.processes
def test_the_commands_continue_a_run(tmp_path: Path) -> None:
    os.symlink(Path(__file__).parents[2] / "examples", tmp_path / "examples")
    (lines,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    for line in lines.splitlines():
        ended = commands.run("-m", *shlex.split(line), folder=tmp_path)
        assert ended.status == 0, ended.err
    first, second = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("first", "second")
    )
    assert (first["minibatches"], second["resumed_from"], second["minibatches"]) == (90, 90, 180)
    assert (first["schedule"], second["schedule"]) == ("1f1b", "pipedream_2bw")


def test_the_program_ends_with_the_weights_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    names: dict[str, Any] = {}
    exec(program, names)
    torch.manual_seed(0)
    exec(program.partition("torch.manual_seed(0)\n")[2].partition("profile =")[0], names)
    expected = loop(names["model"], 4 * names["train"], **names["how"]).state
    assert_equal({name: names["weights"][name] for name in expected}, expected)
