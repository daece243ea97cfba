"""Experimental methods: found by scanning their folder, needed by nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipedream
from pipedream.schedules import METHODS

PACKAGE = Path(pipedream.__file__).parent

ELSEWHERE = """
import importlib, pkgutil, sys
import pipedream
from pipedream import cli
from pipedream.core.errors import ScheduleError
from pipedream.schedules import ALIASES, METHODS, SCHEDULES, build

assert pipedream.__path__ == [sys.argv[1]], pipedream.__path__
for module in pkgutil.walk_packages(pipedream.__path__, "pipedream."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in SCHEDULES:
    assert cli.main(["show", name, "--verify"]) == 0
try:
    build("roundpipe", None)
except ScheduleError as error:
    assert "is not known; choose one of" in str(error)
print(*METHODS)
"""


def test_they_are_listed() -> None:
    assert {"roundpipe", "timeprest_interpolated"} <= set(METHODS)


def test_nobody_imports_them() -> None:
    text = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    importers = {name for name, source in text.items() if "pipedream.experimental" in source}
    assert {name for name in importers if not name.startswith("experimental/")} == {"schedules/registry.py"}
    for word in ("Interpolated", "timeprest_interpolated"):
        assert not [name for name, source in text.items() if word in source and not name.startswith("experimental/")]


@pytest.mark.processes
@pytest.mark.slow
def test_everything_else_works_without_them(tmp_path: Path) -> None:
    copy = tmp_path / "pipedream"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("experimental", "__pycache__"))
    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(copy)],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    left = ended.stdout.splitlines()[-1].split()
    assert set(left) == set(METHODS) - {"roundpipe", "timeprest_interpolated"}
