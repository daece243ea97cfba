"""Settings of all tests: fixed seeds, one thread, and reasons to skip what the machine cannot run."""

import ast
import gc
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of commands, too: threads that wait for busy cores spin on them

PROCESSES = "pytest.mark.processes"
_NUMBERS = ("compensation", "couplings", "delayed", "examples", "models", "model_features", "replicas", "transparency")
COMPUTING = (
    *("tests/services/checkpoint/", "tests/schedules/", "tests/extensions/meshes/sharding/", "tests/test_packaging.py"),
    *("tests/apps/training/test_restarts.py", "tests/apps/training/test_resume.py"),
    *(f"tests/end_to_end/test_{name}.py" for name in _NUMBERS),
)
"""Files whose processes are compared by their numbers, however long they take."""

_STARTED = pytest.StashKey[float]()
_PROCESSOR_S: dict[str, float] = {}  # of each test
_modules_frozen = 0

# No deadline and no complaint about slow examples: shared cores are sometimes slow. In CI the same examples each time.
# HYPOTHESIS_PROFILE=thorough draws 400 where a test does not name a number.
settings.register_profile(
    "house",
    max_examples=12,
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("house"), max_examples=400, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


def _lacking(marker: str) -> str | None:
    """Returns what the machine lacks for tests with this marker, or None."""
    if marker == "gpu" and subprocess.run("nvidia-smi -L", shell=True, capture_output=True).returncode:
        return "no GPU: nvidia-smi -L fails"
    if marker == "browser" and not shutil.which("chromium"):
        return "no chromium on the path"
    if marker == "network":
        from pipedream.slow_links import why_not  # here: most runs need it not

        return why_not()
    return None


class _TestsTogether(LoadScopeScheduling):
    """Where tests run side by side, those that start processes stay with one of the runners, or up to four.

    They would take each other's time, and some of them measure it; those that only compute have a runner of their own,
    and so have those that start whole runs, which mostly wait.
    Tests that share what takes long stay with one runner, too, which makes it once; so do those of Hugging Face, whose
    import takes seconds.
    pytest-xdist's own groups do not work with this pytest, which no longer lets names of tests be changed; here the
    marks are read off the files.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if re.split(r"::|\[", test)[0] in _starting_processes(file):
            if file.startswith(COMPUTING):
                return "processes that compute"
            folder = next((folder for folder in ("end_to_end", "pages") if file.startswith(f"tests/{folder}/")), "")
            return f"processes {folder}"
        if re.search(r'needs_hf|"transformers"', _read(file)):
            return "Hugging Face"
        return file if re.search(r"^@(functools\.)?cache$|scope=.module", _read(file), re.M) else nodeid


@cache
def _read(file: str) -> str:
    return (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


@cache
def _starting_processes(file: str) -> frozenset[str]:
    """Returns the tests of a file, and the classes of tests, that are marked `processes`, one by one or all of them."""
    parsed = ast.parse(_read(file)).body
    tests = [
        node
        for node in parsed
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith(("test_", "Test"))
    ]
    marks = [node for node in parsed if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    if any(PROCESSES in ast.unparse(node) for node in marks):
        return frozenset(test.name for test in tests)
    return frozenset(test.name for test in tests if any(ast.unparse(mark) == PROCESSES for mark in test.decorator_list))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Deals the tests to the runners, the longest row first."""
    return _TestsTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what the machine cannot run, and says what is missing."""
    for marker in ("gpu", "browser", "network"):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := _lacking(marker)):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Seeds all generators before each test; torch, where a test uses it, computes on one thread."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # all that is here: torch.manual_seed asks every kind of device
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps progress off standard error, where tests count lines, on however slow a machine."""
    if progress := sys.modules.get("pipedream.core.progress"):
        monkeypatch.setattr(progress, "QUIET_S", 3600.0)


@pytest.fixture
def in_double() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def run_command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Returns the command as a function: arguments -> exit status, standard output, standard error."""
    from pipedream.apps import cli  # here: most tests need it not

    def ask(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        return cli.main([str(argument) for argument in arguments]), *capfd.readouterr()

    return ask


@pytest.fixture
def refused(run_command: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Returns a function: the arguments of a command that is refused -> its message on standard error."""

    def refuse(*arguments: object) -> str:
        status, out, error = run_command(*arguments)
        assert (status, out) == (2, ""), error
        return error

    return refuse


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets `train` run all workers in this process; returns the numbers of processes that it would have started."""
    from pipedream.apps.cli import train

    counts: list[int] = []
    monkeypatch.setattr(train, "start_workers", lambda count, *_, **__: counts.append(count))
    return counts


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Notes the processor time before a test and its fixtures."""
    _freeze_imports()
    item.stash[_STARTED] = _processor_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Adds to the last report of a test the processor time that it and the processes that it started took."""
    report = yield
    if call.when == "teardown" and _STARTED in item.stash:
        report.processor_s = _processor_s() - item.stash[_STARTED]
    return report


def _processor_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_runtest_logreport(report: Any) -> None:
    """Collects the processor times of all runners."""
    if hasattr(report, "processor_s"):
        _PROCESSOR_S[report.nodeid] = report.processor_s


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """In CI, and with `--durations`, lists the tests that took most processor time."""
    count = config.option.durations or ("CI" in os.environ and 20)
    if count and _PROCESSOR_S:
        terminalreporter.section(f"most processor time, of {sum(_PROCESSOR_S.values()):.0f} s in all tests")
        for name, seconds in sorted(_PROCESSOR_S.items(), key=lambda item: -item[1])[:count]:
            terminalreporter.write_line(f"{seconds:7.2f} s  {name}")


def pytest_collection() -> None:
    """Collects no garbage while tests are imported: there is hardly any, and looking for it takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collects garbage again."""
    gc.enable()


def _freeze_imports() -> None:
    """Leaves what was imported out of collections of garbage: torch._dynamo takes a tenth of a second of each."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen + 50:
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
