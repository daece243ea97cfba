"""The failure detector, on a clock of the test: which ranks are blamed, when, and which never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pipedream.runtime import activity
from pipedream.services.failure import processes, verdict as verdicts

LOOK_S = 0.125
PROCESS = processes.RankProcess("elsewhere", 1, 1)


@dataclass(frozen=True)
class Process(processes.RankProcess):
    """A process of a bench."""

    bench: Bench

    def read_run_ns(self) -> int | None:
        runs = self.bench.runs.get(self.pid)
        return None if runs is None else round(1e9 * self.bench.now_s) * runs


class Bench:
    """A judge of rank 0 of three, and the clock it is asked on."""

    def __init__(self, stuck_after_s: float = 10.0) -> None:
        self.activity = activity.Activity()
        self.activity.doing = "stage 0, 0F7"
        self.detector = verdicts.FailureDetector(
            0, self.activity, stuck_after_s=stuck_after_s, store_owner="the launcher"
        )
        self.now_s = 1000.0
        self.counts = {1: 0, 2: 0}
        self.ended: set[int] = set()
        self.runs: dict[int, bool | None] = {}  # None: elsewhere
        self.resent: Callable[[int], dict[str, int]] = lambda beat: {}

    def begin(self, done: int, longest_s: float = 0.0) -> None:
        """Begins a forward, after `done` others."""
        durations = self.activity.durations.setdefault("a forward", activity.TaskDurations())
        durations.done, durations.longest_s = done, longest_s
        self.activity.begin("a forward")

    def status(self, *ranks: int) -> None:
        """Lets some ranks beat, and exchanges."""
        for rank in ranks:
            self.counts[rank] += 1
        statuses = {}
        for rank, count in self.counts.items():
            process = Process("there" if self.runs.get(rank, True) is None else "here", rank, 1, self)
            resent = self.resent(count) if rank == 2 else {}
            place = f"stage {rank}, {rank}F{count}"
            statuses[rank] = verdicts.RankStatus(count, place, process, rank in self.ended, resent=resent)
        self.detector.receive(self.now_s, statuses)

    def run(
        self, seconds: float, *, beating: tuple[int, ...] = (1, 2), answers: bool = True
    ) -> tuple[float, verdicts.Verdict] | None:
        """Lets time pass; returns after how long there was a verdict, and which."""
        start_s = self.now_s
        for look in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            if answers and look % 4 == 3:
                self.status(*beating)
            verdict = self.detector.check(self.now_s)
            if verdict is not None:
                return self.now_s - start_s, verdict
        return None

    def blame(self, seconds: float, **how: Any) -> tuple[float, verdicts.Verdict]:
        """Lets time pass until there is a verdict."""
        judgement = self.run(seconds, **how)
        assert judgement is not None
        return judgement


HERE, AWAY, ALIVE = verdicts.SILENT_S, verdicts.AWAY_S, verdicts.RUNNING_S


@pytest.mark.parametrize(
    ("runs", "beating", "limit_s"),
    [
        ({1: None, 2: False}, (1,), HERE),
        ({1: None, 2: True}, (1,), ALIVE),
        ({1: False, 2: None}, (1,), AWAY),
        ({1: None, 2: None}, (1,), ALIVE),
        ({1: None, 2: None}, (), AWAY),
    ],
    ids=["stopped", "runs", "elsewhere", "beside one that is heard", "beside one that is not"],
)
def test_a_silent_rank_is_named(runs: dict[int, bool | None], beating: tuple[int, ...], limit_s: float) -> None:
    """One that runs is given more time; the ranks of its machine see whether it does."""
    bench = Bench()
    bench.runs |= runs
    assert bench.run(70.0) is None
    after_s, verdict = bench.blame(70.0, beating=beating)
    assert limit_s < after_s < limit_s + 1.5
    rank = 1 if not beating else 2
    assert (verdict.rank, verdict.where) == (rank, f"stage {rank}, {rank}F{bench.counts[rank]}")
    assert (verdict.unresponsive, verdict.store_lost) == (True, False)
    bench.ended.add(rank)  # in order
    bench.status(1, 2)
    assert bench.run(70.0, beating=tuple({1, 2} - {rank})) is None


@pytest.mark.parametrize(("runs", "limit_s"), [(None, AWAY), (False, HERE), (True, ALIVE)])
def test_a_store_that_does_not_answer_is_noticed_without_it(runs: bool | None, limit_s: float) -> None:
    bench = Bench()
    bench.detector.server, bench.runs[0] = Process("here", 0, 1, bench), runs
    assert bench.run(limit_s - 1.0, answers=False) is None
    assert bench.run(5.5, beating=(1,)) is None, "what rank 2 did meanwhile is not known; its time begins now"
    bench.status(1, 2)
    after_s, verdict = bench.blame(70.0, answers=False)
    assert limit_s - 0.6 < after_s < limit_s + 0.6
    assert (verdict.rank, verdict.store_lost, "the launcher serves" in verdict.cause) == (0, True, True)


@pytest.mark.parametrize(
    ("resent", "stuck_after_s", "limit_s"),
    [
        (lambda beat: {"a b": 1 + beat // 4}, 10.0, 10.0),
        (lambda beat: {"a b": 1 + beat // 4}, 3.0, 3.0),
        (lambda beat: {"a b": 1 + beat // 4}, 0.0, 100.0),
        (lambda beat: {"a b": 9 + beat % 19}, 10.0, 100.0),
        (lambda beat: {"a b": 2}, 10.0, 100.0),
        (lambda beat: {f"a {beat}": 9}, 10.0, 100.0),
    ],
    ids=["lost", "set", "off", "acknowledged within the time", "sent again twice", "other connections"],
)
def test_packets_that_do_not_arrive(resent: Any, stuck_after_s: float, limit_s: float) -> None:
    """However long a message takes on a slow link, its packets are acknowledged, and the kernel counts anew."""
    bench = Bench(stuck_after_s)
    bench.resent = resent
    assert bench.run(limit_s) is None
    if limit_s < 100.0:
        _, verdict = bench.blame(1.5)
        assert (verdict.rank, verdict.where, "check the MTU" in verdict.advice) == (0, "stage 0, 0F7", True)
        assert f"rank 2, in stage 2, 2F{bench.counts[2]}, has sent this rank a packet" in verdict.cause


@given(away_s=st.floats(1.0, 1e6), before_s=st.floats(0.0, 4.0))
def test_a_judge_that_was_away_blames_nobody_for_it(away_s: float, before_s: float) -> None:
    bench = Bench()
    bench.begin(9)
    bench.run(2.0)
    assert bench.run(before_s, beating=()) is None
    bench.now_s += away_s
    assert bench.detector.check(bench.now_s) is None
    bench.status()
    assert bench.detector.check(bench.now_s) is None


@given(
    gaps=st.lists(
        st.tuples(st.floats(0.05, 3.0), st.sets(st.sampled_from([1, 2]), min_size=0), st.booleans()), max_size=60
    )
)
def test_nobody_is_blamed_who_was_heard_within_the_time(gaps: list[tuple[float, set[int], bool]]) -> None:
    """Whatever the order of beats, answers and looks: a verdict names a rank (or a store) that was silent so long."""
    bench = Bench()
    bench.status(1, 2)
    heard: dict[int, float] = {1: bench.now_s, 2: bench.now_s}
    answered_s = bench.now_s
    bench.detector.check(bench.now_s)
    for gap_s, ranks, answers in gaps:
        bench.now_s += gap_s
        if answers:
            bench.status(*ranks)
            answered_s = bench.now_s
            heard |= dict.fromkeys(ranks, bench.now_s)
        verdict = bench.detector.check(bench.now_s)
        if verdict is not None:
            since_s = bench.now_s - (answered_s if verdict.store_lost else heard[verdict.rank])
            assert since_s >= verdicts.SILENT_S - 1e-9
            return


@pytest.mark.parametrize(
    ("done", "longest_s", "stuck_after_s", "limit_s"),
    [(9, 0.01, 10.0, 10.0), (9, 2.0, 10.0, 40.0), (9, 0.01, 3.0, 3.0), (2, 0.01, 10.0, None), (9, 0.01, 0.0, None)],
    ids=["short ops", "long ops", "set", "the first few", "off"],
)
def test_a_task_that_hangs(done: int, longest_s: float, stuck_after_s: float, limit_s: float | None) -> None:
    bench = Bench(stuck_after_s)
    bench.activity.describe_op = lambda: "stage 0, 0F9"
    bench.begin(done, longest_s)
    if limit_s is None:
        assert bench.run(100.0) is None
        return
    after_s, verdict = bench.blame(100.0)
    assert limit_s < after_s < limit_s + 3 * LOOK_S
    assert (verdict.rank, verdict.where, verdict.unresponsive) == (0, "stage 0, 0F9", False)
    assert f"the longest one before took {longest_s:.2g} s" in verdict.cause
    assert "--stuck-after" in verdict.advice


def test_a_wait_within_a_task_is_not_judged() -> None:
    bench = Bench()
    bench.begin(9, 1.0)
    with bench.activity.waiting():
        assert bench.run(100.0) is None
    assert bench.blame(30.0)[0] == pytest.approx(20.0, abs=1.0), "the task has begun again"


@pytest.mark.parametrize(("stuck_after_s", "limit_s"), [(10.0, 60.0), (20.0, 120.0), (0.0, None)])
def test_a_gpu_that_hangs(stuck_after_s: float, limit_s: float | None) -> None:
    """No task is under way: the host waits for the results of a minibatch, or in the caller's loop."""
    bench = Bench(stuck_after_s)
    for mark in (object(), object(), object()):  # it gets on, slowly
        bench.activity.gpu_mark = partial(lambda mark: mark, mark)
        assert bench.run(45.0) is None
    bench.activity.gpu_mark = lambda: None
    assert bench.run(300.0) is None, "it has nothing to do"
    last = object()
    bench.activity.gpu_mark = lambda: last
    if limit_s is None:
        assert bench.run(300.0) is None
        return
    after_s, verdict = bench.blame(300.0)
    assert limit_s < after_s < limit_s + 1.5
    assert verdict.rank == 0
    assert "the GPU has made no progress for" in verdict.cause
    assert "nvidia-smi" in verdict.advice
    bench = Bench()  # a task may wait for a full queue of it
    bench.activity.gpu_mark = lambda: last
    bench.begin(3)
    assert "no progress in a forward for 10.1 s, nor on the GPU for 10.1 s" in bench.blame(30.0)[1].cause


def test_tasks_one_after_the_other_are_not_one_long_task_and_waiting_is_none() -> None:
    bench = Bench()
    for _ in range(50):
        bench.activity.begin("a forward")
        assert bench.run(9.0) is None
        bench.activity.end()
    assert bench.activity.durations["a forward"].done == 50
    assert bench.run(1000.0) is None
    bench.activity.begin("a forward")
    bench.activity.stop()  # it has failed
    assert bench.run(1000.0) is None


def test_where_says_the_place_and_within_a_task_the_op() -> None:
    doing = activity.Activity()
    assert doing.where == "starting"
    doing.describe_op, doing.doing = lambda: "stage 0, 0F3", None
    doing.begin("loading data")
    assert doing.where == "stage 0, 0F3 (loading data)"
    doing.end()
    with doing.at("saving"):
        assert doing.where == "saving"
        doing.begin("a forward")  # of an evaluation, say
        assert doing.where == "stage 0, 0F3"
        doing.end()
    assert doing.where == "stage 0, 0F3"


CALLS = [("train()", 0), ("save()", 5), ("save()", 5), ("evaluate()", 9), ("close()", 12)]


@given(st.integers(0, len(CALLS)), st.integers(0, len(CALLS)), st.integers(1, 5), st.integers(0, 12))
def test_ranks_that_make_the_same_calls_are_never_blamed(mine: int, others: int, sent: int, ahead: int) -> None:
    """However far they have come."""
    bench = Bench()
    bench.activity.calls = CALLS[:mine]
    coming = CALLS[mine][1] if mine < len(CALLS) else 12
    bench.activity.loop_minibatches = min(coming, ahead)
    bench.detector.receive(0.0, {1: other_calls(CALLS[:others], sent)})
    assert bench.detector.check(0.0) is None


def other_calls(calls: list[tuple[str, int]], sent: int = 8, session: int = 0) -> verdicts.RankStatus:
    last = [list(call) for call in calls[-sent:]]  # as JSON has them
    return verdicts.RankStatus(1, "stage 1", PROCESS, session=session, calls=len(calls), last_calls=last)


@pytest.mark.parametrize(
    ("mine", "given_here", "others", "words"),
    [
        (CALLS[:1], 6, CALLS[:2], "this rank called save() after 5 minibatches, rank 0 did not"),
        (CALLS[:2], 5, [*CALLS[:1], ("save()", 4)], "save() after 4 minibatches, rank 0 called save() after 5"),
        (CALLS[:2], 5, [*CALLS[:1], ("close()", 12)], "close() after 12 minibatches, rank 0 called save() after 5"),
        (CALLS[:2], 5, [*CALLS[:1], ("evaluate()", 5), *CALLS[1:2]], "evaluate() after 5 minibatches, rank 0 called"),
    ],
)
def test_a_call_that_is_not_made_by_all(
    mine: list[tuple[str, int]], given_here: int, others: list[tuple[str, int]], words: str
) -> None:
    bench = Bench()
    bench.activity.calls, bench.activity.loop_minibatches = mine, given_here
    bench.detector.receive(0.0, {1: other_calls(others, session=1)})
    assert bench.detector.check(0.0) is None, "it is of another session"
    bench.detector.receive(0.0, {1: other_calls(others)})
    verdict = bench.detector.check(0.0)
    assert verdict is not None
    assert verdict.rank == 1
    assert words in verdict.cause
