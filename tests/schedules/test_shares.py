"""A flushing method gives each replica a part in every update."""

import pytest

from pipedream.core.errors import ScheduleError
from pipedream.core.plan import Plan
from pipedream.schedules import build


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_fewer_microbatches_than_replicas_are_refused(name: str) -> None:
    plan = Plan.uniform(2, replicas=(3, 1))
    with pytest.raises(ScheduleError, match="a stage has 3 replicas"):
        build(name, plan, 2)
    assert build(name, plan, 3).microbatches == 3
    assert build(name, plan).microbatches >= 3
