"""The papers' clusters: their figures, and what is said of a name that is not among them."""

from __future__ import annotations

import pytest

from pipedream.core.errors import PlanError
from pipedream.core.hardware import presets
from pipedream.core.hardware.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_as_many_machines_as_in_the_paper_or_as_wanted(name: str) -> None:
    preset = PRESETS[name]
    default, three = presets.cluster(name), presets.cluster(name, 3)
    assert (default.workers, three.workers) == (preset.machines * preset.workers, 3 * preset.workers)
    assert set(default.memories) == {preset.memory_bytes}
    assert three.levels[-1].bandwidth_bytes_per_s == preset.between_bytes_per_s
    assert three.reach(0, three.workers - 1) == len(three.levels) - 1
    assert name in str(presets.__doc__)
    assert preset.device in str(default)


def test_figures() -> None:
    a, b, c, w = (presets.cluster(name) for name in ("pipedream-a", "pipedream-b", "pipedream-c", "pipedream-2bw"))
    assert [level.bandwidth_bytes_per_s for level in a.levels] == pytest.approx([15.75e9, 1.25e9], rel=1e-3)
    assert [level.bandwidth_bytes_per_s for level in b.levels] == [150e9, 3.125e9]
    assert [level.width for level in w.levels] == [8, 8]
    assert [(level.width, level.bandwidth_bytes_per_s) for level in c.levels] == [(4, 5e9)]
    assert [level.width for level in presets.cluster("pipedream-a", 1).levels] == [4]
    assert [level.width for level in presets.cluster("pipedream-c", 1).levels] == [1]


@pytest.mark.parametrize("machines", [0, -1, 10**9])
def test_machines_that_make_no_sense(machines: int) -> None:
    with pytest.raises(PlanError, match=f"{machines} machines of cluster 'pipedream-a' were asked for; give a number"):
        presets.cluster("pipedream-a", machines)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(PlanError) as caught:
        presets.cluster("pipedream-z")
    assert all(name in str(caught.value) for name in PRESETS)
