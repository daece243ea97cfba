"""The arithmetic of depth, weights and updates, against the papers' own equations."""

from dataclasses import replace
from fractions import Fraction
from itertools import islice
from math import ceil, lcm
from typing import Any

import pytest
from drawn import straight
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.plan import depth
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.rules import UpdateRule
from pipedream.core.schedule.weights import DoubleBuffer, Flush, Latest, Stash, VerticalSync, WeightPrediction
from pipedream.schedules import build
from pipedream.schedules.kit.idioms import latest_weights, steady_1f1b

replica_counts = st.lists(st.integers(1, 6), min_size=1, max_size=6).map(tuple)


class TestDepth:
    @given(replica_counts)
    def test_noam_of_the_input_stage_is_the_papers(self, replicas: tuple[int, ...]) -> None:
        """NOAM = ceil(workers / replicas of the input stage); the output stage holds one."""
        counts = depth.noam(replicas)
        assert counts[0] == ceil(Fraction(sum(replicas), replicas[0]))
        assert counts[-1] == 1
        depth.check_in_flight(counts, replicas)

    @pytest.mark.parametrize(
        ("replicas", "update_delay", "counts"),
        [
            ((1, 1, 1, 1), (0, 0, 0, 0), (4, 3, 2, 1)),
            ((2, 2, 1), (0, 0, 0), (3, 2, 1)),
            ((15, 1), (0, 0), (2, 1)),
            ((1, 3, 1), (0, 0, 0), (5, 2, 1)),
            ((1, 3, 1), (0, 1, 0), (6, 2, 1)),  # (1 + 1) 3 - gcd(1, 3) = 5 of stage 0
            ((1, 4, 1), (0, 1, 0), (8, 2, 1)),
        ],
    )
    def test_noam(self, replicas: tuple[int, ...], update_delay: tuple[int, ...], counts: tuple[int, ...]) -> None:
        assert depth.noam(replicas, update_delay) == counts

    @given(replica_counts)
    def test_full_without_messages_or_replicas_is_noam(self, replicas: tuple[int, ...]) -> None:
        straight = (1,) * len(replicas)
        assert depth.full(straight, (0.0,) * (len(straight) - 1)) == depth.noam(straight)
        deep = depth.full(replicas, (0.0,) * (len(replicas) - 1))
        assert all(d >= n for d, n in zip(deep, depth.noam(replicas), strict=True))
        depth.check_in_flight(deep, replicas)

    @pytest.mark.parametrize(
        ("replicas", "slots", "counts"),
        [
            ((1, 1, 1, 1), (1.0, 1.0, 1.0), (7, 5, 3, 1)),  # c = T/2 each way: one slot a boundary
            ((1, 1), (2.0,), (4, 1)),
            ((1, 2), (0.0,), (4, 1)),  # noam: 3, busy 0.80
            ((2, 1), (0.0,), (2, 1)),
            ((3, 2), (0.0,), (3, 1)),
        ],
    )
    def test_full(self, replicas: tuple[int, ...], slots: tuple[float, ...], counts: tuple[int, ...]) -> None:
        assert depth.full(replicas, slots) == counts

    @pytest.mark.parametrize(
        ("counts", "replicas", "message"),
        [
            ((1,), (1, 1), r"are for 1 stages, the plan has 2"),
            ((1, 0), (1, 1), r"must be between 1 and 10000, found \(1, 0\)"),
            ((1, 2), (1, 1), r"stage 1 would wait for 1 warm-up minibatches, but stage 0 sends only 0"),
            ((3, 3), (1, 2), r"stage 1 would wait for 4 .* sends only 2"),
            ((4, 2, 3), (1, 1, 1), r"stage 2 would wait for 2 .* stage 1 sends only 1"),
        ],
    )
    def test_refused(self, counts: tuple[int, ...], replicas: tuple[int, ...], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            depth.check_in_flight(counts, replicas)

    @given(replica_counts, st.data())
    def test_legal_is_the_least_that_is_accepted(self, replicas: tuple[int, ...], data: st.DataObject) -> None:
        counts = tuple(data.draw(st.integers(1, 6)) for _ in replicas)
        update_delay = tuple(data.draw(st.integers(0, 1)) if r > 1 and len(replicas) > 1 else 0 for r in replicas)
        legal = depth.raise_to_legal(counts, replicas, update_delay)
        depth.check_in_flight(legal, replicas, update_delay)
        assert all(f >= c for f, c in zip(legal, counts, strict=True))
        for s in range(len(replicas)):
            if legal[s] > counts[s]:
                with pytest.raises(PlanError, match="would do"):
                    depth.check_in_flight((*legal[:s], legal[s] - 1, *legal[s + 1 :]), replicas, update_delay)
        for deep in (
            depth.noam(replicas, update_delay),
            depth.full(replicas, (1.5,) * (len(replicas) - 1), update_delay),
        ):
            depth.check_in_flight(deep, replicas, update_delay)

    @given(replica_counts, st.data())
    def test_fitted_counts_lie_between_and_add_nothing_that_is_not_upstream(
        self, replicas: tuple[int, ...], data: st.DataObject
    ) -> None:
        update_delay = tuple(data.draw(st.integers(0, 1)) if r > 1 and len(replicas) > 1 else 0 for r in replicas)
        slots = tuple(data.draw(st.floats(0, 4)) for _ in replicas[1:])
        low, high = depth.noam(replicas, update_delay), depth.full(replicas, slots, update_delay)
        most = tuple(data.draw(st.integers(a, b + 2)) for a, b in zip(low, high, strict=True))
        counts = depth.fit_counts(low, high, most, replicas)
        assert all(a <= b <= min(c, d) for a, b, c, d in zip(low, counts, high, most, strict=True))
        depth.check_in_flight(counts, replicas, update_delay)
        assert depth.fit_counts(low, high, high, replicas) == high, "where all fits it is full"


class TestWeights:
    @given(st.integers(1, 64), st.integers(0, 1000), st.integers(0, 9))
    def test_flush_reads_the_newest(self, m: int, k: int, stage: int) -> None:
        rule = Flush(m)
        assert rule.forward_version(stage, k) == rule.backward_version(stage, k) == k // m
        assert (rule.versions(stage), rule.staleness(stage)) == (1, 0)

    @given(st.integers(1, 64), st.integers(0, 1000), st.integers(0, 9))
    def test_double_buffer(self, m: int, k: int, stage: int) -> None:
        """2BW: w(t+1) = w(t) - lr grad f(w(t-1)); microbatch k reads max(floor(k/m) - 1, 0)."""
        rule = DoubleBuffer(m)
        assert rule.forward_version(stage, k) == rule.backward_version(stage, k) == max(k // m - 1, 0)
        assert (rule.versions(stage), rule.staleness(stage)) == (2, 1)

    @pytest.mark.parametrize("p", [1, 2, 4, 7])
    def test_stash_equation_of_the_paper(self, p: int) -> None:
        """w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t)): update t + 1 is minibatch t, in steady state."""
        rule = build("pipedream", pd.Plan.uniform(p)).weights
        for t in range(p - 1, 3 * p + 5):
            assert [rule.forward_version(s, t) for s in range(p)] == [t - p + 1 + s for s in range(p)]
        assert [rule.staleness(s) for s in range(p)] == [p - 1 - s for s in range(p)]
        assert [rule.versions(s) for s in range(p)] == [p - s for s in range(p)]

    @pytest.mark.parametrize("p", [1, 2, 4, 7])
    def test_vertical_sync_equation_of_the_paper(self, p: int) -> None:
        """w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t-p+1))."""
        rule = build("vertical_sync", pd.Plan.uniform(p)).weights
        for t in range(p - 1, 3 * p + 5):
            assert {rule.forward_version(s, t) for s in range(p)} == {t - p + 1}
        assert {(rule.staleness(s), rule.versions(s)) for s in range(p)} == {(p - 1, p)}

    @given(replica_counts, st.integers(0, 2000))
    def test_vertical_sync_of_replicas_is_one_count_of_minibatches(self, replicas: tuple[int, ...], k: int) -> None:
        """n = L floor(r_0 v_0 / L), v_0 = max(0, k // r_0 - W_0); stage s reads version n / r_s."""
        warmup = tuple(count - 1 for count in depth.noam(replicas))
        rule = VerticalSync(warmup, replicas, (0,) * len(replicas))
        cycle = lcm(*replicas)
        tag = cycle * (replicas[0] * max(0, k // replicas[0] - warmup[0]) // cycle)
        assert [rule.forward_version(s, k) * r for s, r in enumerate(replicas)] == [tag] * len(replicas)

    def test_vertical_sync_waits_for_the_stage_that_lags_most(self) -> None:
        """Stage 1 makes version n one forward later than the input stage's depth alone would allow."""
        rule = VerticalSync((4, 2), (1, 2), (0, 1))
        assert [rule.forward_version(0, k) for k in range(12)] == [0] * 8 + [2, 2, 4, 4]
        assert all(rule.forward_version(1, k) <= max(0, k // 2 - 2 - 1) for k in range(100))

    @given(replica_counts, st.data())
    def test_readable_versions_are_those_of_all_forwards_to_come(
        self, replicas: tuple[int, ...], data: st.DataObject
    ) -> None:
        warmup, none = tuple(count - 1 for count in depth.noam(replicas)), (0,) * len(replicas)
        rules = (Stash(warmup, replicas, none), VerticalSync(warmup, replicas, none), DoubleBuffer(5), Flush(5))
        stage, rule = data.draw(st.integers(0, len(replicas) - 1)), data.draw(st.sampled_from(rules))
        step, first, newest = replicas[stage], data.draw(st.integers(0, 40)), data.draw(st.integers(0, 12))
        for total in (None, data.draw(st.integers(0, 60))):
            coming = range(first, 2000 if total is None else total, step)
            expected = {rule.forward_version(stage, k) for k in coming} & set(range(newest + 1))
            assert rule.readable(stage, first, newest, step=step, total=total) == expected


class TestUpdates:
    @given(st.integers(1, 20), st.integers(0, 200))
    def test_members_part_all_microbatches(self, count: int, total: int) -> None:
        rule = UpdateRule((count,))
        members = [list(rule.members(0, n, total)) for n in range(1, rule.updates(0, total) + 1)]
        assert [k for update in members for k in update] == list(range(total))
        assert all(members)
        assert all(rule.update_of(0, k) == n for n, update in enumerate(members, 1) for k in update)
        assert all(len(update) == count for update in members[:-1])


class TestLatest:
    """The newest version at each op, against an order followed op by op."""

    @given(replica_counts, st.data())
    def test_it_reads_what_is_newest_there(self, replicas: tuple[int, ...], data: st.DataObject) -> None:
        update_delay = tuple(data.draw(st.integers(0, 1)) if r > 1 and len(replicas) > 1 else 0 for r in replicas)
        counts = tuple(data.draw(st.integers(1, 5)) for _ in replicas)
        m = data.draw(st.one_of(st.none(), st.integers(max(replicas), 3 * max(replicas))))
        update_delay = (0,) * len(replicas) if m else update_delay
        plan = pd.Plan.uniform(len(replicas), replicas=replicas)
        plan = replace(
            plan,
            in_flight=depth.raise_to_legal(counts, replicas, update_delay),
            update_delay=update_delay,
            depth_mode="hand",
        )
        rule, order = latest_weights(plan, m), steady_1f1b(plan, m)
        updates = UpdateRule(rule.per_update)
        late: dict[int, list[int]] = {s: [] for s in range(len(replicas))}
        for rank in range(plan.workers):
            ((stage, _),) = plan.placement.stage_replicas(rank)
            newest = 0
            for op in islice(order(rank), 150):
                if op.kind is Kind.UPDATE:
                    newest += 1
                    assert op.index == newest
                elif op.kind is Kind.FORWARD:
                    assert rule.forward_version(stage, op.index) == newest
                else:
                    assert rule.backward_version(stage, op.index) == newest
                    late[stage].append(updates.update_of(stage, op.index) - 1 - rule.forward_version(stage, op.index))
        assert all(max(versions) <= rule.staleness(s) for s, versions in late.items() if versions)

    @given(straight())
    def test_the_mean_delay_is_that_of_the_settled_microbatches(self, schedule: pd.Schedule) -> None:
        """Of any method: what T1 divides a rate by, and what the proof prints."""
        rule, updates, plan = schedule.weights, schedule.updates, schedule.plan
        cycle = schedule.cycle
        warm = max(
            (n + update_delay) * count
            for n, update_delay, count in zip(plan.in_flight, plan.update_delay, plan.replicas, strict=True)
        )
        first = -(-4 * warm // cycle) * cycle
        for s in range(len(plan.stages)):
            late = [updates.update_of(s, k) - 1 - rule.forward_version(s, k) for k in range(first, first + cycle)]
            assert rule.mean_staleness(s) == pytest.approx(sum(late) / cycle)
            assert rule.staleness(s) == max(late)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"backward_rule": "mixed"}, "a backward rule is stash, recompute, graph"),
            (
                {"backward_rule": "stash", "backward_prediction": WeightPrediction("average", (-1.0, 0.0))},
                "with the rule 'stash' each backward reads what its own forward has read",
            ),
            ({"backward_rule": "stash", "per_update": (2, 2), "shares_prediction": 2}, "rule 'stash'"),
            ({"warmup": (1,)}, "each argument needs one number per stage"),
            ({"forward_prediction": WeightPrediction("velocity", (1.0,))}, "each argument needs one number per stage"),
            ({"per_update": (1, 0)}, "an update holds a microbatch of each replica"),
            ({"shares_prediction": 2}, "shared by the .* microbatches of an update, not 2"),
            (
                {
                    "forward_prediction": WeightPrediction("average", (1.0, 1.0)),
                    "backward_prediction": WeightPrediction("average", (-1.0, 0.0)),
                },
                "only one of the two predictions",
            ),
        ],
    )
    def test_parts_that_do_not_go_together(self, changes: dict[str, Any], message: str) -> None:
        rule = Latest((1, 0), (1, 1), (0, 0), (1, 1))
        with pytest.raises(ValueError, match=message):
            replace(rule, **changes)

    @pytest.mark.parametrize(
        ("by", "horizons", "decay", "message"),
        [
            ("momentum", (1.0,), 0.1, "velocity, difference or average"),
            ("velocity", (), 0.1, "a finite horizon for each stage"),
            ("velocity", (float("inf"),), 0.1, "a finite horizon for each stage"),
            ("average", (1.0,), 1.0, "between 0 and 1"),
        ],
    )
    def test_views_that_are_none(self, by: str, horizons: tuple[float, ...], decay: float, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            WeightPrediction(by, horizons, decay)

    def test_buffers(self) -> None:
        """A written view puts the weights aside; a difference and an average are kept; velocity is the optimizer's."""
        rule, ahead = Latest((1, 0), (1, 1), (0, 0), (1, 1)), WeightPrediction("velocity", (1.0, 0.0))
        back = WeightPrediction("average", (-1.0, 0.0))
        assert [rule.buffers(s) for s in (0, 1)] == [0, 0]
        assert [replace(rule, forward_prediction=ahead).buffers(s) for s in (0, 1)] == [1, 0]
        assert replace(rule, forward_prediction=replace(ahead, by="difference")).buffers(0) == 2
        assert replace(rule, forward_prediction=ahead, backward_prediction=back).buffers(0) == 2
        assert replace(rule, forward_prediction=ahead, backward_rule="stash").buffers(0) == 0


class TestPromises:
    """What a schedule says of itself holds, for clipping, ties and memory go by it."""

    def test_a_method_that_is_late_does_not_flush(self) -> None:
        for name in ("pipedream", "pipedream_2bw", "pipemare"):
            with pytest.raises(ScheduleError, match=r"has flushes=True, but .* makes gradients stale"):
                replace(build(name, pd.Plan.uniform(3)), flushes=True)

    def test_rounds_are_of_the_replicas(self) -> None:
        built = build("pipedream_2bw", pd.Plan.uniform(2), 2)  # the rate would be twice the user's
        with pytest.raises(ScheduleError, match=r"averages rounds.* hold \(2, 2\) microbatches for \(1, 1\) replicas"):
            replace(built, updates=UpdateRule((2, 2), mean_of_rounds=True))
