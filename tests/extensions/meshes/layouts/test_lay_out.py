"""Layouts by name: those of a transformer, exhaustive search, and what is refused."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from tests.extensions.meshes.layouts.steps import steps, transformer

PRODUCT = pd.Operators({"x": (10, 5), "y": (5, 20), "z": (10, 20)}, "z[a, c] += x[a, b] * y[b, c]")  # of auto_mtf
MESH = pd.Mesh("m1:4,m2:2")
meshes = st.sampled_from(["m:2", "m:4,n:2", "m:2,n:2", "m:3,n:2", "m:2,n:2,o:1"]).map(pd.Mesh)


def all_reports(ops: pd.Operators, mesh: pd.Mesh, fixed: str = "") -> Iterator[tuple[pd.Layout, Any]]:
    """Yields every layout that is not refused."""
    names = sorted({name for step in ops.steps for name in step.sizes} - {*fixed})
    for dimensions in product(["", *mesh.dimensions], repeat=len(names)):
        layout = pd.Layout(",".join(f"{name}:{over}" for name, over in zip(names, dimensions, strict=True) if over))
        try:
            yield layout, ops.report(layout, mesh)
        except pd.errors.PlanError:
            continue


rates = st.lists(st.sampled_from([0.1, 1.0, 30.0]), min_size=3, max_size=3)


@given(steps, meshes, st.sampled_from(["", "", "a", "bc"]))
def test_the_least_peak_equals_exhaustive_search(ops: pd.Operators, mesh: pd.Mesh, fixed: str) -> None:
    everything = list(all_reports(ops, mesh, fixed))
    least = min(report.peak for _, report in everything)
    most = max(len(layout.over) for layout, report in everything if report.peak == least)
    layout = pd.lay_out(ops, mesh, fixed=[name for name in fixed if any(name in step.sizes for step in ops.steps)])
    assert (ops.report(layout, mesh).peak, len(layout.over)) == (least, most)


@pytest.mark.slow
@given(steps, meshes, st.sampled_from([0.1, 1.0, 20.0]), rates, st.floats(0, 1))
def test_the_fewest_seconds_equal_exhaustive_search(
    ops: pd.Operators, mesh: pd.Mesh, operations_per_s: float, rates: list[float], share: float
) -> None:
    elements_per_s = dict(zip(mesh.dimensions, rates, strict=False))
    everything = [
        (report.seconds(operations_per_s, elements_per_s), report.peak) for _, report in all_reports(ops, mesh)
    ]
    peaks = sorted(peak for _, peak in everything)
    fits = peaks[int(share * (len(peaks) - 1))]
    least = min(seconds for seconds, peak in everything if peak <= fits)
    peak = min(peak for seconds, peak in everything if peak <= fits and seconds <= least * (1 + 1e-9))
    settings: dict[str, Any] = {"operations_per_s": operations_per_s, "elements_per_s": elements_per_s}
    report = ops.report(pd.lay_out(ops, mesh, "time", memory_elements=fits, **settings), mesh)
    assert report.seconds(operations_per_s, elements_per_s) == pytest.approx(least, rel=1e-6)
    assert report.peak == peak


FAST = {"objective": "time", "operations_per_s": 1e13}
WIDE, SMALL = {"d_ff": 65536, "heads": 128}, {"d_ff": 4096, "heads": 16, "d_kv": 64}  # T5's 11B and large
TWO = "batch:batch,d_ff:model,heads:model,vocab:model"
DATA, MODEL = "batch:batch", "d_ff:model,heads:model,vocab:model"


@pytest.mark.parametrize(
    ("sizes", "mesh", "arguments", "rules"),
    [
        (SMALL | {"batch": 256}, "all:256", FAST | {"elements_per_s": 1e9}, "batch:all"),
        (SMALL | {"batch": 256}, "all:8", {}, "batch:all"),
        (WIDE | {"batch": 8}, "model:8", FAST | {"elements_per_s": 1e9}, MODEL),
        (WIDE | {"batch": 8}, "model:8", {}, MODEL),
        (WIDE | {"batch": 256}, "batch:32,model:8", FAST | {"elements_per_s": 1e9}, TWO),
        (WIDE | {"batch": 256}, "batch:32,model:8", {}, TWO),
        # Where the links of one dimension are so slow that it is better left alone:
        (WIDE | {"batch": 256}, "batch:32,model:8", FAST | {"elements_per_s": {"batch": 1e9, "model": 1e3}}, DATA),
        (WIDE | {"batch": 32}, "batch:32,model:8", FAST | {"elements_per_s": {"batch": 1e3, "model": 1e9}}, MODEL),
    ],
)
def test_the_published_layouts_of_t5(sizes: dict[str, int], mesh: str, arguments: dict[str, Any], rules: str) -> None:
    assert pd.lay_out(transformer(3, **sizes), pd.Mesh(mesh), **arguments).rules == rules


def test_a_memory_limit_forces_more_cuts() -> None:
    ops, mesh = transformer(2, batch=8, **WIDE), pd.Mesh("batch:8,model:8")
    rates = {"operations_per_s": 1e13, "elements_per_s": {"batch": 1e9, "model": 1e3}}
    free = pd.lay_out(ops, mesh, "time", **rates)
    limit = ops.report(free, mesh).peak - 1
    bound = pd.lay_out(ops, mesh, "time", memory_elements=limit, **rates)
    assert ops.report(bound, mesh).peak <= limit
    assert ops.report(bound, mesh).seconds(**rates) > ops.report(free, mesh).seconds(**rates)


RATES = {"operations_per_s": 1.0, "elements_per_s": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "speed"}, r"'speed' was asked for; there are memory and time"),
        ({"fixed": ["d"]}, r"fixed has 'd', which is an index of no operator; they have a, b, c"),
        ({"objective": "time", "operations_per_s": 1.0}, r"'time' needs operations_per_s"),
        (RATES, r"have no effect on the objective 'memory'"),
        ({"objective": "time"} | RATES | {"operations_per_s": 0}, r"operations_per_s is 0"),
        ({"objective": "time"} | RATES | {"elements_per_s": {"m1": 1, "m3": 1}}, r"has 'm3', which is not a dimension"),
        ({"objective": "time"} | RATES | {"elements_per_s": {"m1": 1}}, r"no rate for 'm2'"),
        ({"memory_elements": 74}, r"fits 74 elements on a rank: the least is 75, by a:m2,c:m1, 1 too many; give each "),
        ({"memory_elements": 100, "fixed": "a"}, r"the least is 125, .* or let a be sharded \(a:m2,c:m1 fits\)"),
        ({"memory_elements": 0}, r"memory_elements is 0; give at least 1"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(pd.PipelineError, match=message):
        pd.lay_out(PRODUCT, MESH, **arguments)


def test_a_larger_mesh_is_proposed_where_nothing_fits() -> None:
    ops = pd.Operators({"x": (64, 64), "y": (64, 64)}, "y[a, b] = x[a, b]")
    with pytest.raises(pd.PipelineError, match=r"64 too many; give .* 4096, or take a mesh such as m:4 \([ab]:m\)"):
        pd.lay_out(ops, pd.Mesh("m:2"), memory_elements=4096 - 64)


def test_operators_without_indices_are_laid_out() -> None:
    assert pd.lay_out(pd.Operators({"x": (), "y": ()}, "y[] = x[]"), MESH) == pd.Layout()
    assert pd.lay_out(pd.Operators({"x": (4,)}, ""), MESH, "time", **RATES) == pd.Layout()
