"""Tags and interpolated backwards of nF1B, against the order followed op by op and the papers' own claims."""

from collections import Counter
from itertools import islice
from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delayed import nf1b
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.schedule.weights import Stamped
from pipedream.experimental.timeprest_interpolated import Interpolated
from pipedream.schedules import Kind, Op, build

TAGGED = ("timeprest", "timeprest_interpolated")
replica_counts = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)

LAGS = [  # updates between a minibatch's first forward and its backward, as a reproduction of TiMePReSt measured them
    (3, 2, [2, 1, 0]), (3, 4, [1, 1, 0]), (4, 3, [2, 2, 1, 0]), (4, 8, [1, 1, 1, 0]),
    (8, 4, [4, 3, 3, 2, 2, 1, 1, 0]), (8, 8, [2, 2, 2, 1, 1, 1, 1, 0]),
]  # fmt: skip


def followed(schedule: pd.Schedule, stage: int, updates: int) -> list[list[Op]]:
    """Returns the ops of each replica of a stage up to its update of that number."""
    rows = []
    for rank in schedule.placement.ranks[stage]:
        mine: list[Op] = []
        for op in schedule.order(rank):
            mine.append(op)
            if op == (Kind.UPDATE, stage, updates, op.replica):
                break
        rows.append(mine)
    return rows


def newest_at(ops: list[Op], kind: Kind) -> dict[int, int]:
    """Returns for each microbatch how many updates its replica had made before this op of it."""
    newest, newest_by_microbatch = 0, {}
    for op in ops:
        newest += op.kind is Kind.UPDATE
        if op.kind is kind:
            newest_by_microbatch[op.index] = newest
    return newest_by_microbatch


@given(replica_counts, st.data())
def test_a_tag_is_what_is_newest_at_the_input_stage(replicas: tuple[int, ...], data: st.DataObject) -> None:
    m = data.draw(st.integers(max(replicas), 3 * max(replicas)))
    plan = pd.Plan.uniform(len(replicas), replicas=replicas)
    tagged, between = (build(name, plan, m) for name in TAGGED)
    assert isinstance(tagged.weights, Stamped)
    assert isinstance(between.weights, Interpolated)
    by_replica = [newest_at(ops, Kind.FORWARD) for ops in followed(tagged, 0, 8)]
    tags = {k: n for newest in by_replica for k, n in newest.items()}
    # Replica 0 of the input stage reads the version for all, at its first microbatch of a minibatch. No other replica
    # may need a minibatch of its own before that version is made, or the two would wait for each other at the sum.
    for minibatch in range(8):
        mine = range(minibatch * m, (minibatch + 1) * m)
        read = next(by_replica[0][k] for k in mine if k in by_replica[0])
        assert all(read <= newest[k] for newest in by_replica for k in mine if k in newest)
    for stage in range(len(replicas)):
        alive = 1
        for replica, ops in enumerate(followed(tagged, stage, 8)):
            met, late = newest_at(ops, Kind.FORWARD), newest_at(ops, Kind.BACKWARD)
            for k, newest in met.items():
                assert tagged.weights.forward_version(stage, k) == tags[k]
                assert between.weights.forward_version(stage, k) == newest
            for k, newest in late.items():
                assert tagged.weights.backward_version(stage, k) == between.weights.backward_version(stage, k) == newest
                assert tagged.weights.forward_version(stage, k) <= newest
            # Right behind an update: the newest, and what the forwards to come read of the older ones.
            for newest in range(1, 7):
                at = ops.index(Op(Kind.UPDATE, stage, newest, replica))
                coming = {tagged.weights.forward_version(stage, op.index) for op in ops[at:] if op.kind is Kind.FORWARD}
                alive = max(alive, len({version for version in coming if version < newest}) + 1)
        assert alive == tagged.weights.versions(stage)


@pytest.mark.parametrize(("p", "m", "delays_updates"), LAGS)
def test_lags_of_the_order_are_those_that_were_measured(p: int, m: int, delays_updates: list[int]) -> None:
    """Of the order, in slots by the paper's rule and as it is here; of the static tables; and of the tags."""
    for s, row in enumerate(nf1b(p, m, 12)):
        before: list[int] = []  # updates before each forward
        lags: Counter[int] = Counter()
        for what in row:
            if what == "F":
                before.append(lags["B"])
            elif what == "B":
                assert lags["B"] - before[lags["B"] * m] <= delays_updates[s]
                lags["late"] = max(lags["late"], lags["B"] - before[lags["B"] * m])
            lags[what] += 1
        assert lags["late"] == delays_updates[s]
    live, tagged, between = (build(name, pd.Plan.uniform(p), m) for name in ("v_timeprest", *TAGGED))
    for s, row in enumerate(nf1b(p, m, 8)):
        (ops,) = followed(live, s, 8)
        whole = "".join(what for what in row if what != ".").replace("B", "B" * m)  # backwards microbatch by microbatch
        order = islice((op for op in live.order(s) if op.kind is not Kind.UPDATE), len(whole))
        assert "".join(op.kind.value for op in order) == whole
        met, late = newest_at(ops, Kind.FORWARD), newest_at(ops, Kind.BACKWARD)
        assert max(late[n * m] - met[n * m] for n in range(8)) == delays_updates[s]
        assert live.weights.staleness(s) == between.weights.staleness(s) == delays_updates[s]
    # A tag is the version of the input stage, and all stages are as late as that one.
    assert [tagged.weights.staleness(s) for s in range(p)] == [delays_updates[0]] * p
    assert pd.verify(pd.lower(tagged)).staleness == (delays_updates[0],) * p


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
