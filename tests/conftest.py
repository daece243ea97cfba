"""What every test stands on: fixed seeds, one thread, and a word on what the machine lacks."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings

# No deadline and no complaint about slow examples: shared cores are sometimes slow. In CI the same examples each time.
settings.register_profile(
    "house",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("house")


def _succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def _lacking(marker: str) -> str | None:
    """Returns what the machine lacks for tests with this marker, or None."""
    if marker == "gpu" and not _succeeds("nvidia-smi", "-L"):
        return "no GPU: nvidia-smi -L fails"
    if marker == "browser" and not shutil.which("chromium"):
        return "no chromium on the path"
    if marker == "network":
        if missing := [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]:
            return f"no {' and no '.join(missing)} on the path"
        if not _succeeds("unshare", "--net", "true"):
            return "network namespaces need root"
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for its groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what the machine cannot run, and says what is missing.

    Where tests run side by side, those that start processes stay with one of the runners: they would take each
    other's time, and some of them measure it. They come first, for they are the longest row.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("processes"):
                item.add_marker(pytest.mark.xdist_group("processes"))
        items.sort(key=lambda item: item.get_closest_marker("processes") is None)
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
        torch.manual_seed(0)
        torch.set_num_threads(1)
