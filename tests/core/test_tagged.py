"""Tags and interpolated backwards of nF1B, against the order followed op by op and the papers' own claims."""

from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipedream.core.schedule.weights import Stamped
from pipedream.experimental.timeprest_interpolated import Interpolated


@pytest.mark.parametrize(
    ("parts", "changes", "message"),
    [
        (((1,), (1, 1), 2), {}, "each argument needs one number per stage, found 1 and 2"),
        (((1, 0), (3, 1), 2), {}, "an update holds a microbatch of each replica, found 2"),
        (((1, 2), (1, 1), 2), {}, r"no stage may have more warm-up microbatches than an earlier one, found \[1, 2\]"),
        (((1, 0), (1, 1), 2), {"backward_rule": "stash"}, "a backward rule is recompute, graph, found 'stash'"),
    ],
)
@pytest.mark.parametrize("kind", [Stamped, Interpolated])
def test_parts_that_do_not_go_together(kind: Any, parts: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*parts, **changes)


def read_old_weights(late: int, **share: float) -> float:
    """Returns what a backward reads of a weight that was 1, and is 0 after `late` updates."""
    old, newest, storage = (
        SimpleNamespace(version=version, leaves={"weight": torch.tensor(value)})
        for version, value in ((0, 1.0), (late, 0.0), (-1, 5.0))
    )
    versions = SimpleNamespace(peek=lambda: newest, make_storage=lambda: storage)
    read = Interpolated((1, 0), (1, 1), 2, **share).backward_reader(versions)(old if late else newest)
    assert (read is newest) == (not late)
    return float(read.leaves["weight"])


def test_a_share_decays_with_staleness() -> None:
    assert [read_old_weights(late) for late in (0, 1, 3)] == pytest.approx([0.0, exp(-1), exp(-3)])
    assert [read_old_weights(late, share=0.0) for late in (1, 2)] == [0.0, 0.0]
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="the share of the old weights must be between 0 and 1"):
            Interpolated((1, 0), (1, 1), 2, share=share)
