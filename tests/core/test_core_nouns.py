"""Units, graphs, plans, clusters: what is well formed and what is not. Seeds, which differ."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core import seeds, units
from pipedream.core.checkpoint import Position, SavedStage, Stored
from pipedream.core.hardware.cluster import Workers
from pipedream.core.model.profile import TiedParameters
from pipedream.core.plan.stage import TiedWeights

SIZES = {"16e9": 16 * 10**9, "512MB": 512 * 10**6, "2 GiB": 2 * 2**30, "1k": 1000, " 7 B ": 7, 12: 12}
RATES = {"1e9": 1e9, "1.25GB/s": 1.25e9, "10 Gbit/s": 1.25e9, "100mbit/s": 12.5e6, "8bit/s": 1.0, "3kBps": 3e3}


WRITTEN: dict[Any, dict[Any, str]] = {
    units.format_bytes: {1_340_000: "1.34 MB", 0: "0 B", -2000: "-2.00 kB"},
    units.format_rate: {1.25e9: "1.25 GB/s"},
    units.format_excess: {0.268: "within 27 %", 5.6: "within 6.6 times"},
    units.format_seconds: {0.00241: "2.41 ms", 3.2e-8: "0.032 us", float("inf"): "inf"},
    units.shorten: {
        "transformer.h.0.mlp.dropout": "transformer.h.0.mlp.dropout",
        "model.decoder.layers.10.fc1.weight": "model...layers.10.fc1.weight",
        "model.layers.10.post_attention_layernorm": "model...post_attention_layernorm",
        "a_name_without_any_dots_that_is_very_long": "a_name_without...at_is_very_long",
    },
}


def test_units_are_read_and_written() -> None:
    assert {text: units.parse_bytes(text) for text in SIZES} == SIZES
    assert {text: units.parse_rate(text) for text in RATES} == pytest.approx(RATES)
    assert [units.parse_link(text) for text in ("1e+9", " 1e9 + 0.05s")] == [(1e9, 0.0), (1e9, 0.05)]
    for write, texts in WRITTEN.items():
        assert {value: write(value) for value in texts} == texts


@given(st.floats(1, 1e15))
def test_what_is_written_is_read_again(value: float) -> None:
    assert units.parse_rate(units.format_rate(value)) == pytest.approx(value, rel=0.01)
    link = units.LinkSpeed(value, 1 / value)
    assert units.parse_link(str(link)) == pytest.approx(link, rel=0.01)


TWO = pd.Plan.uniform(2)
LATE = replace(pd.Plan.uniform(3, replicas=(1, 3, 1)), in_flight=(6, 2, 1), update_delay=(0, 1, 0))
NO_NUMBERS = ("", "-1", "0", "GB", "1 XB", "1e", "nan", "inf", "1e400", "1 GB/s/s")
LATENCIES = ("", "-50ms", "50", "50min", "nanms")
BANDWIDTH = r"is not a bandwidth; write for example 1e9, 1\.25GB/s or 10Gbit/s"


def chain(count: int, *ties: tuple[int, ...]) -> pd.LayerGraph:
    return pd.LayerGraph.chain(tuple(pd.Layer(f"layer{i}", "Linear") for i in range(count)), ties)


LEVEL = pd.Level(3, 1e9)
PROFILE = pd.Profile("Net", chain(2), (pd.LayerProfile(1.0, 2.0, 8, 8),) * 2, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda text=text: units.parse_bytes(text), "is not a size; write") for text in NO_NUMBERS),
        *((lambda text=text: units.parse_rate(text), BANDWIDTH) for text in NO_NUMBERS),
        *(
            (lambda text=text: units.parse_link(f"1e9+{text}"), f"'{text}' is not a latency; write")
            for text in LATENCIES
        ),
        (lambda: units.parse_rate("1Gbps"), f"{BANDWIDTH}; did you mean 1Gbit/s\\?"),
        (lambda: chain(0), "at least one layer"),
        (lambda: pd.LayerGraph((pd.Layer("a", "X"), pd.Layer("a", "X")), ()), r"must differ, found \['a'\]"),
        (lambda: replace(chain(3), edges=((0, 3),)), r"edge \(0, 3\) does not run forward within 3"),
        (lambda: chain(3, (0, 3)), r"tie \(0, 3\) names a layer"),
        (lambda: pd.schedules.Placement(((0,), ())), "every stage needs a rank"),
        (lambda: pd.schedules.Placement(((0,), (2,))), "without a gap"),
        (lambda: pd.schedules.Placement(((0, 0),)), "two replicas on one rank"),
        (lambda: replace(TWO, stages=()), "at least one stage"),
        (lambda: replace(pd.Plan.uniform(1), stages=(pd.Stage(1, 2),)), "must begin at layer 0, found 1"),
        (lambda: replace(TWO, stages=(pd.Stage(0, 1), pd.Stage(2, 3))), "ends before layer 1, .* begins at 2"),
        (lambda: replace(TWO, in_flight=(2,)), "are for 1 stages, the plan has 2"),
        (lambda: replace(TWO, in_flight=(1, 2)), "must not grow towards the output"),
        (lambda: replace(LATE, in_flight=(5, 2, 1)), "with update delay 1 at stage 1"),
        (lambda: replace(TWO, update_delay=(0,)), r"update_delay needs 0 or 1 for each of 2 stages, found \(0,\)"),
        (lambda: replace(TWO, update_delay=(1, 0)), "update delay is 0 where a stage is not replicated"),
        (lambda: replace(pd.Plan.uniform(1, replicas=(2,)), update_delay=(1,)), "and in a one-stage plan"),
        (lambda: replace(TWO, unit="sample"), "unit is minibatch or microbatch, found 'sample'"),
        (lambda: replace(TWO, depth_mode="deep"), "depth_mode is one of noam, full, auto, hand"),
        (lambda: pd.Stage(2, 2), "first < last, found 2 and 2"),
        (lambda: pd.Stage(0, 1, 0), "between 1 and 100000 workers, found 0"),
        (lambda: pd.Stage(0, 1, forward_s=-1.0), "forward_s cannot be negative, found -1.0"),
        (lambda: pd.Cluster(()), "at least one level"),
        (lambda: pd.Cluster.flat(0), "width must be between 1 and 100000, found 0"),
        (lambda: pd.Cluster.flat(1, 0.0), "bandwidth must be positive"),
        (lambda: pd.Cluster.flat(1, memory_bytes=0), "memory must be positive, found 0"),
        (lambda: pd.Cluster((replace(LEVEL, sizes=(2, 1)),)), r"width is the greatest of the sizes \(2, 1\), found 3"),
        (lambda: pd.Cluster((LEVEL,), kinds=(Workers(0),)), "between 1 and 100000 workers of a kind, found 0"),
        (lambda: pd.Cluster((LEVEL,), kinds=(Workers(3, speed=0.0),)), "speed must be positive, found 0.0"),
        (lambda: pd.Cluster((LEVEL,), kinds=(Workers(3, memory_bytes=-1),)), "memory must be positive, found -1"),
        (lambda: pd.Cluster((LEVEL,), kinds=(Workers(2),)), "the cluster has 3 workers, its kinds 2"),
        (lambda: pd.Cluster((LEVEL,), all_reduce="star"), "all_reduce is ring or tree, found 'star'"),
        (lambda: pd.Cluster((LEVEL,), host_bytes_per_s=0.0), "rate of copies to the host must be positive, found 0.0"),
        (lambda: pd.Cluster((LEVEL,) * 11), "a cluster has at most 100000 workers, found 177147"),
        (lambda: replace(TWO, worker_order=(0, 2)), "names workers below 2"),
        (lambda: replace(PROFILE, layers=()), "2 layers but 0 measurements"),
        (lambda: replace(PROFILE, parts=1), "parts must be at least 2, found 1"),
        (lambda: replace(PROFILE.layers[0], frozen_bytes=1 << 60), "frozen bytes cannot be more than all"),
        (lambda: replace(PROFILE, tied=(TiedParameters(("w",), (0,), 8),)), "is used by two or more of 2 layers"),
        (lambda: replace(TWO, tied_weights=(TiedWeights(("w",), (1,)),)), "held by two or more of 2 stages, found"),
        (lambda: Stored("load!", (), ()), "expected a dtype such as float32, found 'load!'"),
        (lambda: SavedStage(()), "at least one parameter group, found none"),
        (lambda: Position(-1, 0, 0, ()), "counts are from 0 to"),
        (lambda: Position(0, 0, 0, (), data=[]), r"the state of the data is an object, found \[\]"),
        (lambda: pd.schedules.build("gpipe", TWO, 0), "split into at least 1 microbatch, found 0"),
        (lambda: pd.Plan.uniform(3).with_depth("deep"), "depth 'deep' is not known"),
        (lambda: LATE.with_depth((5, 2, 1)), r"with update delay 1 at stage 1: .*; \(6, 2, 1\) would do"),
        (lambda: TWO.with_depth("auto"), "depth auto was asked for an existing plan"),
    ],
)
def test_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, pd.PipelineError), match=words):
        call()


def test_runs_layers_and_microbatches_draw_other_numbers() -> None:
    drawn = [seeds.layer_seed(*arguments) for arguments in product((0, 1), range(5), ("", "a", "a@2", "b"))]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 1 << 63 for seed in drawn)
