"""The trials of failures: which there are, and one of them."""

from pathlib import Path
from types import ModuleType

import commands
import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "failures" / "run.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RUN.parent))
    return commands.load_script(RUN)


def test_each_signal_goes_to_each_target_at_each_moment(run: ModuleType) -> None:
    for seed in (0, 1):
        trials = run.trials(seed)
        assert len({(trial.signal, trial.target, trial.moment) for trial in trials}) == len(trials) == 160
        assert {(trial.plan, trial.method, trial.training) for trial in trials} == set(run.CASES)
        assert trials == run.trials(seed)
    assert run.trials(0) != run.trials(1)


@pytest.mark.long
@pytest.mark.processes
def test_random_kills_end_as_one_process_does(tmp_path: Path) -> None:
    """The benchmark compares the weights."""
    ended = commands.run(str(RUN.with_name("lost.py")), "--kills", "--trials", "1", folder=tmp_path, timeout_s=300.0)
    assert ended.status == 0, ended.err
    assert "1 runs (seeds 0 to 0), " in ended.out
    assert "; 0 hangs, 0 orphans; failing seeds: none" in ended.out
