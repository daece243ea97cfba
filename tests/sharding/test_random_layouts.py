"""Every legal layout of a random model trains as one process does; another one is refused with the reason."""

import re

import hypothesis
import processes
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from random_layouts import LaidOut, laid_out, trained

import pipedream as pd

# Each example trains a model: a failing one is shown as it was drawn.
FEW = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], max_examples=5)


def _check(case: LaidOut, count: int) -> None:
    assert case.processes == count
    ends = processes.team(count).launch(trained, case, case.mesh)
    errors = [end.error for end in ends if end.error is not None]
    if errors:
        hypothesis.event("refused")
        refusal = next((error for error in errors if isinstance(error, pd.PipelineError)), None)
        assert refusal is not None, errors
        assert not re.search(r"(Runtime|Type|Value|Assertion|NotImplemented)Error", str(refusal)), refusal
        return
    hypothesis.event(f"trained on {case.mesh}")
    losses, weights, scores = trained(case, "")
    for pipeline_losses, state, evaluated in (end.value for end in ends):
        assert pipeline_losses == pytest.approx(losses, abs=1e-10)
        assert evaluated == pytest.approx(scores, abs=1e-10)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestSomeLayouts:
    @FEW
    @given(case=laid_out(2))
    def test_two_processes(self, case: LaidOut) -> None:
        _check(case, 2)

    @FEW
    @given(case=laid_out(4))
    def test_four_processes(self, case: LaidOut) -> None:
        _check(case, 4)
