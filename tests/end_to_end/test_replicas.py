"""The promise of the library for replicated stages: each trains as the serial loop of its published rules.

Rounds and their means, the rate of a stage, one clock for schedulers, incomplete last rounds, statistics averaged at
drains, versions: `pipedream.testing` writes them from the equations, without the library.
"""

from typing import Any

import cases
import processes
import pytest
from cases import Case, check, check_same, per_worker, run
from marks import long

import pipedream as pd
from pipedream.runtime.update.all_reduce import GradientAllReduce

PLANS = ((2, 1), (3, 1), (1, 2), (3, 2), (2, 3), (2, 1, 1), (2, 2, 1), (4, 2, 1))
METHODS = ("pipedream", "pipedream_vertical_sync", "pipedream_2bw", "1f1b", "gpipe")
ROUNDS = ("pipedream", "pipedream_vertical_sync")
"""Methods whose updates are rounds of the replicas, so that a last round may be incomplete."""

EPOCHS = 5
LONGER: dict[str, Any] = {"epochs": 7, "evaluate_at": (13,)}
"""For pipelines that hold more minibatches than the short runs have."""

# UpdateDelay needs depth: (W_s + 1) r_s <= W_u r_u + (r_u if lag_u else gcd(r_s, r_u)) for all u < s with lag_s = 1.
LAGS = {
    (2, 1): ((1, 0), "noam"),
    (3, 1): ((1, 0), "full"),
    (1, 2): ((0, 1), "noam"),
    (3, 2): ((1, 1), "noam"),
    (2, 3): ((1, 1), (4, 1)),
    (2, 1, 1): ((1, 0, 0), "full"),
    (2, 2, 1): ((1, 1, 0), (4, 2, 1)),
    (4, 2, 1): ((1, 1, 0), "full"),
}


def _case(replicas: tuple[int, ...], schedule: str, **others: object) -> Case:
    """Returns a run of 25 minibatches, an evaluation among them."""
    split = None if schedule in ROUNDS else max(replicas) + 1
    if schedule == "pipedream_2bw":
        split = None  # as many as are in flight
    animal = "cnn" if schedule == "pipedream" and replicas in ((2, 1), (2, 3)) else "mlp"
    how = {"epochs": EPOCHS, "evaluate_at": (8,)} | others
    return Case(animal, schedule, len(replicas), replicas=replicas, microbatches=split, **how)


def _matrix() -> list[object]:
    """Returns each plan with three methods in turn, the second slow, the third long; rounds may have a lag."""
    parameters = []
    for number, replicas in enumerate(PLANS):
        for turn in range(3):
            case = _case(replicas, METHODS[(turn - number) % len(METHODS)], scheduled=True, **(LONGER if turn else {}))
            mark = pytest.mark.long if turn > 1 else pytest.mark.slow if turn or number % 2 else ()
            parameters.append(pytest.param(case, id=str(case), marks=mark))
        method = METHODS[number % 3]
        if method in ROUNDS:
            update_delay, depth = LAGS[replicas]
            case = _case(replicas, method, update_delay=update_delay, depth=depth, **LONGER)
            parameters.append(pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (number > 1)))
    return parameters


@pytest.mark.parametrize("case", _matrix())
def test_replicated_stages_train_as_the_serial_rules_say(case: Case) -> None:
    outcome = run(case)
    check(case, outcome)
    (middle, total), plan = outcome.drains, case.plan()
    assert case.evaluate_at[0] < middle < total
    if case.schedule in ROUNDS:
        # Some stage ends, in the middle or at the end, with a round that is not full.
        parts = [part % count for part in (middle, total - middle) for count in plan.replicas]
        assert any(parts), f"drains {outcome.drains}"
    weights = pd.schedules.build(case.schedule, plan, case.microbatches).weights
    for stage in range(case.stages):
        assert max(outcome.staleness[stage]) == weights.staleness(stage)
        assert outcome.watched[-1][stage].peak == weights.versions(stage)


@pytest.mark.parametrize("method", ["pipedream", "pipedream_2bw", "gpipe"])
def test_sums_have_started_when_the_last_backward_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, close = [], GradientAllReduce.close

    def noted(self: GradientAllReduce, sums: list[Any], weight: float, count: int, stop_request: float) -> None:
        started.append((count, weight, self.started))
        close(self, sums, weight, count, stop_request)

    monkeypatch.setattr(GradientAllReduce, "close", noted)
    run(_case((2, 1), method, evaluate_at=()))
    # One bucket, this small model's whole stage; nothing has started where a replica is absent from the last round, or
    # where its last microbatch is empty.
    full = [buckets for count, weight, buckets in started if count and weight]
    assert full.count(1) >= len(full) - 2 * EPOCHS, "each epoch ends with a minibatch of two samples"
    assert all(buckets == 0 for count, _, buckets in started if not count)
    assert (0 in [count for count, _, _ in started]) == (method == "pipedream")


IN_PROCESSES = {
    3: [
        _case((2, 1), "pipedream", update_delay=(1, 0)),
        _case((1, 2), "pipedream", clip_grad_norm=0.1, clip="local"),
        _case((2, 1), "pipedream_vertical_sync", depth="full"),
        _case((1, 2), "gpipe"),
        _case((2, 1), "pipedream_2bw", optimizer="adamw"),
        _case((2, 1), "1f1b", clip_grad_norm=0.1),
    ],
    4: [_case((3, 1), "pipedream"), _case((2, 1, 1), "pipedream"), _case((2, 1, 1), "pipedream_vertical_sync")],
    5: [
        *(_case(replicas, "pipedream") for replicas in ((3, 2), (2, 3), (2, 2, 1))),
        _case((2, 2, 1), "pipedream_2bw"),
        _case((3, 2), "gpipe"),
    ],
    6: [_case((3, 2, 1), "pipedream"), _case((4, 2), "pipedream", depth="full", update_delay=(1, 1), **LONGER)],
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, long(4), long(5), 6])
def test_several_processes_give_what_one_gives(workers: int) -> None:
    chosen = [case if max(case.replicas) > 3 else per_worker(case) for case in IN_PROCESSES[workers]]
    of_ranks = processes.team(workers).results(cases.run_all, chosen, timeout_s=240.0)
    for number, case in enumerate(chosen):
        alone, plan = run(case), case.plan()
        for rank, outcomes in enumerate(of_ranks):
            # Two can be added in one order only; more, by gloo, in that of its ring: so are gradients, and norms.
            members = plan.workers if case.clip_grad_norm and case.clip == "global" else max(plan.replicas)
            check_same(outcomes[number], alone, rank, 0.0 if members <= 2 else 1e-10)
