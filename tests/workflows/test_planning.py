"""Planning by a request: its options are listed once, and each automatic plan can be run."""

import dataclasses
import inspect

import pytest

import pipedream as pd
from pipedream.core.flags import flag_of
from pipedream.plan_request import PlanRequest

CHAIN = pd.Profile.of_chain(tuple(pd.LayerProfile(1.0 + i % 2, 2.0, 4, 4) for i in range(6)), batch=12)


@pytest.mark.parametrize(
    ("schedule", "workers", "microbatches"),
    [("1f1b", 2, 1), ("1f1b", 3, 3), ("1f1b", 9, 2), ("gpipe", 2, 3), ("gpipe", 4, 2), ("gpipe", 9, 1)],
)
def test_each_automatic_plan_can_be_run(schedule: str, workers: int, microbatches: int) -> None:
    """A stage never has more replicas than a minibatch has microbatches."""
    plan = pd.plan(CHAIN, pd.Cluster.flat(workers, 1e12), schedule=schedule, microbatches=microbatches)
    assert max(plan.replicas) <= microbatches
    assert pd.simulate(plan).spans


def test_keywords_and_flags_are_those_of_the_request() -> None:
    fields = sorted(dataclasses.fields(PlanRequest), key=lambda field: field.kw_only)  # those of folders come first
    assert list(inspect.signature(pd.plan).parameters) == ["profile", *(field.name for field in fields)]
    assert {field.name for field in fields if flag_of(field) is None} == {"cluster", "shape", "all_workers"}
    cluster = pd.Cluster.flat(2)
    assert pd.plan(CHAIN, cluster, schedule="1f1b") == pd.plan(CHAIN, cluster=cluster, schedule="1f1b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"strategy": "new"},
            "strategy 'new' is not known, and no extension here has it; write simulate, search or 2bw",
        ),
        ({"cluster": 2}, r"2 was given as the cluster; give a Cluster, such as pipedream\.Cluster\.flat\(4\)"),
        ({"schedule": "1f1b", "allow_asynchronous": True}, "it widens the search for the fastest method"),
    ],
)
def test_requests_that_mean_nothing(options: dict[str, object], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        pd.plan(CHAIN, **options)  # type: ignore[arg-type]
