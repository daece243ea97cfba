"""One of the trials of failures."""

from pathlib import Path

import commands
import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "failures" / "run.py"


@pytest.mark.long
@pytest.mark.processes
def test_random_kills_end_as_one_process_does(tmp_path: Path) -> None:
    """The benchmark compares the weights."""
    ended = commands.run(str(RUN.with_name("lost.py")), "--kills", "--trials", "1", folder=tmp_path, timeout_s=300.0)
    assert ended.status == 0, ended.err
    assert "1 runs (seeds 0 to 0), " in ended.out
    assert "; 0 hangs, 0 orphans; failing seeds: none" in ended.out
