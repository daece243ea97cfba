"""A stage's fields against plain sums over its layers; cuts made by hand."""

import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.model.graph import Call
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.memory import StageMemory
from pipedream.planner import manual_plan
from pipedream.workflows import prepare
from tests.planner.planned import RULES, chains

ROWS = (1.0, 2.0, 10, 100, 7), (2.0, 4.0, 20, 0, 8), (3.0, 6.0, 30, 300, 9)
"""Seconds forward and backward, bytes of the output, the parameters and the activations of three layers."""
REST: dict[str, Any] = {"batch": 5, "input_shapes": ((5, 2), (5,)), "optimizer_bytes": 401}
TINY = pd.Profile.of_chain(tuple(pd.LayerProfile(*row) for row in ROWS), update_s=4.0, loss_s=0.5, **REST)


def test_every_field_of_every_stage() -> None:
    first, second = manual_plan(TINY, pd.Cluster.flat(2), (2,), microbatches=2).stages
    assert (first.first, first.last, second.first, second.last) == (0, 2, 2, 3)
    assert (first.forward_s, first.backward_s, first.update_s) == (3.0, 6.0, 1.0)
    assert (second.forward_s, second.backward_s, second.update_s) == (3.0, 6.5, 3.0)  # with the loss
    assert (first.output_bytes, second.output_bytes) == (20, 30)
    assert (first.activation_bytes, second.activation_bytes) == (15, 9)
    assert (first.parameter_bytes, second.parameter_bytes) == (100, 300)
    assert (first.optimizer_bytes, second.optimizer_bytes) == (100, 301)
    assert (first.names, second.names) == (("layer0", "layer1"), ("layer2",))
    # Two versions and their gradients; two microbatches of at most 3 samples of 5; two minibatches of 15 numbers of 4
    # bytes are loaded ahead; two receives of 12 bytes are posted each way, one output and three gradients may have to
    # leave.
    assert first.memory == StageMemory(100, 100, 100, 100, 2 * 9, 2 * 60 + 3 * 12, 0)
    assert second.memory == StageMemory(300, 0, 301, 300, 6, 5 * 12, 0)
    assert first.peak_bytes == first.memory.total_bytes == 574
    shallow = manual_plan(TINY, pd.Cluster.flat(2), (2,), in_flight=(1, 1))
    assert shallow.in_flight == (1, 1)
    assert shallow.stages[0].peak_bytes == 2 * 100 + 100 + 60 + 3 * 20


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=2, max_size=5), st.data())
def test_frozen_weights_count_once(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """They are there once; beside them a stage takes what it would without them."""
    update = {"update_s": 4.0, "copy_s": 1.0, "optimizer_bytes": 500, "update_temporary_bytes": 90}
    layers = [pd.LayerProfile(1.0, 2.0, 10, a + b, 7, backward_bytes=20 + a, frozen_bytes=b) for a, b in rows]
    bare = [replace(layer, parameter_bytes=layer.trained_bytes, frozen_bytes=0) for layer in layers]
    cut, replicas = data.draw(st.integers(1, len(rows) - 1)), data.draw(st.sampled_from([(1, 1), (2, 1)]))
    profiles = (pd.Profile.of_chain(tuple(some), batch=4, **update) for some in (layers, bare))
    plans = [manual_plan(profile, pd.Cluster.flat(sum(replicas)), (cut,), replicas) for profile in profiles]
    for stage, other, some in zip(*(plan.stages for plan in plans), (rows[:cut], rows[cut:]), strict=True):
        frozen = sum(b for _, b in some)
        assert stage.frozen_bytes == frozen
        assert stage.memory == replace(other.memory, weight_bytes=other.memory.weight_bytes + frozen)
        assert (stage.update_s, stage.optimizer_bytes) == (other.update_s, other.optimizer_bytes)
    assert plans[0].period_s == plans[1].period_s


def test_what_a_basis_takes_is_planned_and_a_smaller_one_offered() -> None:
    """Weights of 50 x 20 and 10 x 30 numbers of 4 bytes; the basis and the covariance of each side."""
    shapes = (Matrices(50, 20, 1, 4000), Matrices(10, 30, 2, 2400))
    layers = tuple(pd.LayerProfile(1.0, 2.0, 10, m.size_bytes, matrices=(m,)) for m in shapes)
    profile = pd.Profile.of_chain(layers, batch=5)
    plan = pd.plan(profile, pd.Cluster.flat(2), schedule="basis_rotation", shape="straight")
    plain = pd.plan(profile, pd.Cluster.flat(2), schedule="pipedream", shape="straight")
    basis_bytes = [2 * 4 * (50 * 50 + 20 * 20), 2 * 2 * 4 * (10 * 10 + 30 * 30)]
    for stage, other, more in zip(plan.stages, plain.stages, basis_bytes, strict=True):
        assert stage.memory.optimizer_bytes - other.memory.optimizer_bytes == more
    assert pd.Profile.from_json(profile.to_json()) == profile
    peak, one_sided, cheapest = plan.stages[0].peak_bytes, 2 * 4 * 20 * 20, 4 * 20 * 20
    for memory, words in (
        (peak, None),
        (peak - 1, r"keeps 23\.2 kB there, basis_rotation:one_sided 3\.20 kB, which fits: ask for it"),
        (peak - basis_bytes[0] + one_sided - 1, r"basis_rotation:one_sided:first_moment 1\.60 kB, which fits"),
        (peak - basis_bytes[0] + cheapest - 1, r"basis_rotation keeps 23\.2 kB there; move layers"),
    ):
        tight = replace(plan, cluster=pd.Cluster.flat(2, memory_bytes=memory))
        for maybe_profile in (profile, None):
            with nullcontext() if words is None else pytest.raises(pd.errors.PlanError, match=words):
                prepare.check_phases_fit(tight, [pd.Phase("pipedream", compensation="basis_rotation")], maybe_profile)
    smaller = "basis_rotation[geometry=one_sided,estimate=first_moment]"
    least = max(s.peak_bytes for s in pd.plan(profile, pd.Cluster.flat(2), schedule=smaller, shape="straight").stages)
    one_sided = r", those of basis_rotation\[geometry=one_sided\] 4\.80 kB"
    for name, memory, words in (
        ("basis_rotation", least, rf"of basis_rotation take 39\.2 kB{one_sided}, those of SMALLER 2\.40 kB; a stage"),
        ("basis_rotation[geometry=one_sided]", least, r"\] take 4\.80 kB, those of SMALLER 2\.40 kB; a stage"),
        ("pipedream", 900, r" bytes\); a stage may"),
        (smaller, least, None),
    ):
        tight = pd.Cluster.flat(2, memory_bytes=memory)
        match = words and words.replace("SMALLER", re.escape(smaller))
        with nullcontext() if words is None else pytest.raises(pd.errors.PlanError, match=match):
            pd.plan(profile, tight, schedule=name, shape="straight")


def test_each_stage_takes_the_fixed_part_of_an_update() -> None:
    """The rest by bytes, 100 and 300, also of a stage without parameters."""
    stages = manual_plan(replace(TINY, update_fixed_s=2.0), pd.Cluster.flat(3), (1, 2)).stages
    assert [stage.update_s for stage in stages] == [2.5, 2.0, 3.5]
    with pytest.raises(ValueError, match=r"update_fixed_s is a part of update_s = 4.0, found 5.0"):
        replace(TINY, update_fixed_s=5.0)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("torch.float64", 8), ("odd", 4)])
def test_the_input_is_counted_in_the_dtype_of_the_profile(dtype: str, size: int) -> None:
    profile = pd.Profile.of_chain((pd.LayerProfile(1.0, 1.0, 1, 0),), input_shapes=((3, 2),), dtype=dtype)
    assert manual_plan(profile, pd.Cluster.flat(1), ()).stages[0].peak_bytes == 6 * size  # a minibatch is loaded ahead


@given(chains(least=2), st.data())
def test_stages_add_up_to_the_model(profile: pd.Profile, data: st.DataObject) -> None:
    layers = profile.layers
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, len(layers) - 1)))))
    stages = manual_plan(profile, pd.Cluster.flat(12), cuts).stages
    has_weights = profile.parameter_bytes > 0
    assert sum(stage.forward_s for stage in stages) == pytest.approx(profile.forward_s)
    assert sum(stage.backward_s for stage in stages) == pytest.approx(profile.backward_s + profile.loss_s)
    assert sum(stage.update_s for stage in stages) == pytest.approx(profile.update_s * has_weights)
    assert sum(stage.parameter_bytes for stage in stages) == profile.parameter_bytes
    assert sum(stage.optimizer_bytes for stage in stages) == profile.optimizer_bytes * has_weights
    for s, (stage, (first, last)) in enumerate(zip(stages, pairwise((0, *cuts, len(layers))), strict=True)):
        inside, in_flight = layers[first:last], len(stages) - s
        assert stage.output_bytes == inside[-1].output_bytes
        assert stage.activation_bytes == sum(layer.activation_bytes for layer in inside)
        received = layers[first - 1].output_bytes if first else 0
        sent = stage.output_bytes if last < len(layers) else 0
        # While a layer goes back, those before it keep their activations and those behind it have their gradients.
        backward = max(
            sum(layer.activation_bytes for layer in inside[: i + 1])
            + sum(layer.parameter_bytes for layer in inside[i + 1 :])
            for i in range(len(inside))
        )
        waiting = in_flight * stage.parameter_bytes + (in_flight - 1) * stage.activation_bytes
        messages = received * (2 + in_flight + 2) + sent * 3
        at_work = max(backward, stage.activation_bytes, stage.parameter_bytes)
        assert stage.peak_bytes == waiting + stage.optimizer_bytes + messages + at_work


def test_versions_are_copied_where_one_is_still_read() -> None:
    """All stages but the last, in proportion to their bytes; the last one too where it lags; none under a flush."""
    copied = replace(TINY, copy_s=8.0)
    cluster = pd.Cluster.flat(3)

    def copies(**how: Any) -> list[tuple[float, float]]:
        return [(stage.update_s, stage.copy_s) for stage in manual_plan(copied, cluster, (2,), (1, 2), **how).stages]

    assert copies() == [(1.0 + 2.0, 2.0), (3.0, 0.0)]
    assert copies(update_delay=1) == [(1.0 + 2.0, 2.0), (3.0 + 6.0, 6.0)]
    assert copies(occupancy=RULES["flush"]) == [(1.0, 0.0), (3.0, 0.0)]
    assert copies(in_flight=(1, 1)) == [(1.0, 0.0), (3.0, 0.0)]
    assert [stage.copy_s for stage in manual_plan(copied, cluster, (), (3,)).stages] == [0.0]


LAYER = pd.LayerProfile(1.0, 1.0, 1, 1)


def named(*names: str, **graph: Any) -> pd.Profile:
    layers = tuple(pd.Layer(name, "Linear") for name in names)
    return pd.Profile("Named", replace(pd.LayerGraph.chain(layers), **graph), (LAYER,) * len(names), 1)


GRAPH = named(*"abcdef", edges=((0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5)), ties=((3, 5),))
BLOCKS = named("embed", *(f"h.{i}.{part}" for i in range(12) for part in ("norm", "attn", "norm@2", "mlp")), "head")
CALLS = ("stem", "attn.q", "attn.k", "attn.v", "attn.q@2")
CALLED = named("stem", "attn.q", "attn.q@2", calls=tuple(Call(name, 2 * i, 2 * i + 1) for i, name in enumerate(CALLS)))


@pytest.mark.parametrize(
    ("profile", "places"),
    [
        (BLOCKS, {"h.0": 1, "h.1": 5, "h.10": 41, "h.1.norm@2": 7, "h.11.mlp": 48, "head": 49}),
        (CALLED, {"attn.q@2": 2}),
        (GRAPH, {"b": 1, "c": 2}),
    ],
)
def test_a_module_is_cut_before_its_first_layer(profile: pd.Profile, places: dict[str, int]) -> None:
    assert {name: manual_plan(profile, pd.Cluster.flat(2), (name,)).stages[1].first for name in places} == places


@pytest.mark.parametrize(
    ("profile", "cuts", "how", "says"),
    [
        (GRAPH, (4,), {}, r"before layer 4 .*layers 'd' and 'f' share a parameter .* cut at one of \[1, 2, 3\]"),
        (GRAPH, (6,), {}, r"the model has 6 layers, a cut lies between 1 and 5"),
        (GRAPH, (3, 1), {}, r"cuts \(3, 1\) were asked for; give layer indices in increasing"),
        (GRAPH, (1, 3), {"replicas": (1, 1)}, r"are for 2 stages, cuts \(1, 3\) make 3; give one count for each stage"),
        (GRAPH, (1,), {"replicas": (0, 1)}, r"every stage needs at least one worker"),
        (GRAPH, (1,), {"replicas": (3, 2)}, r"take 5 workers, the cluster has 4; ask for fewer"),
        (GRAPH, ("z",), {}, "before layer 'z' was asked for, the model's layers are a, b, c, d, e, f; name one"),
        (GRAPH, ("e",), {}, "before layer 4 was asked for: it would separate tied layers"),
        (BLOCKS, ("embed",), {}, r"begins with the model's first layer.*; cut before 'h.0.norm' or 'h"),
        (BLOCKS, ("h.3.mlp.up",), {}, r"is within layer 'h.3.mlp', .*finest=True.*; or cut before 'h.3.mlp' or 'h.4"),
        (BLOCKS, ("h.12",), {}, r"but the model has no layer or module of this name; cut before 'h.\d+' or"),
        (BLOCKS, ("transformer",), {}, r"the model has no layer or module of this name; cut before 'h.0.norm' or"),
        (CALLED, ("attn.v",), {}, r"is within layer 'attn.q', .* cut before 'attn.q' or 'attn.q@2'"),
        (TINY, (2,), {"microbatches": 0}, "split into 0 microbatches"),
        (TINY, (2,), {"memory": 1000}, r"stage 1 \(layers 2 to 2\) holds 1 in flight and needs 1.00 kB"),
    ],
)
def test_refuses_cuts_and_says_why(profile: pd.Profile, cuts: Any, how: dict[str, Any], says: str) -> None:
    with pytest.raises(pd.errors.PlanError, match=says):
        manual_plan(profile, pd.Cluster.flat(4, memory_bytes=how.pop("memory", None)), cuts, **how)


def test_memory_that_is_just_enough() -> None:
    assert manual_plan(TINY, pd.Cluster.flat(2, memory_bytes=1001), (2,)).stages[1].peak_bytes == 1001
