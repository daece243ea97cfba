"""A plan that continues without one of its workers, the cluster that is left, and what is trained after it all."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import drawn
import pytest
import torch
from built import Built
from hypothesis import given, strategies as st
from marks import few
from programs import program_of
from torch import Tensor, nn

import pipedream as pd
from pipedream.services.checkpoint import folders
from pipedream.services.failure.restarts import drop_worker, remove_worker
from pipedream.testing import Training


@given(st.data())
def test_the_others_keep_their_places_links_and_kinds(data: st.DataObject) -> None:
    cluster = data.draw(drawn.clusters(data.draw(st.integers(2, 9))).filter(lambda cluster: cluster.workers > 1))
    worker = data.draw(st.integers(0, cluster.workers - 1))
    smaller = remove_worker(cluster, worker)
    others = [other for other in range(cluster.workers) if other != worker]
    assert smaller.workers == len(others)
    for row in ("speeds", "devices", "memories"):
        assert getattr(smaller, row) == tuple(getattr(cluster, row)[other] for other in others)
    for a, first in enumerate(others):
        for b, second in enumerate(others[:a]):
            assert smaller.link(smaller.reach(a, b)) == cluster.link(cluster.reach(first, second))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_only_its_stage_has_one_replica_fewer_and_the_program_is_proved(counts: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(sum(counts) + 1)))[: sum(counts)] if data.draw(st.booleans()) else ()
    cluster = pd.Cluster.flat(sum(counts) + 1)
    plan = replace(pd.Plan.uniform(len(counts), replicas=tuple(counts)), cluster=cluster, worker_order=tuple(order))
    mode = data.draw(st.sampled_from(["noam", "full", "hand"]))
    by_hand = pd.schedules.raise_to_legal([data.draw(st.integers(1, 4)) for _ in counts], counts)
    plan = plan.with_depth(by_hand if mode == "hand" else mode)
    rank = data.draw(st.integers(0, sum(counts) - 1))
    stage = next(s for s, ranks in enumerate(plan.placement.ranks) if rank in ranks)
    reduced = drop_worker(plan, rank)
    if counts[stage] == 1:
        assert reduced is None
        return
    assert reduced.replicas == tuple(count - (s == stage) for s, count in enumerate(counts))
    assert [replace(row, replicas=1) for row in reduced.stages] == [replace(row, replicas=1) for row in plan.stages]
    assert reduced.depth_mode == mode
    assert reduced.cluster.workers == sum(counts)
    before = [[r - (r > rank) for r in ranks if r != rank] for ranks in plan.placement.ranks]
    assert [list(ranks) for ranks in reduced.placement.ranks] == before, "the others keep their order"
    pd.verify(program_of("pipedream", reduced))


@pytest.mark.parametrize("sums", ["bfloat16", "every:4"])
def test_a_last_replica_has_nobody_to_agree_with(sums: str) -> None:
    reduced = drop_worker(pd.Plan.uniform(2, replicas=(3, 1)).choosing(sums=sums), 0)
    assert str(reduced.choices.sums) == sums
    assert str(drop_worker(reduced, 0).choices.sums) == "full"
    assert drop_worker(pd.Plan.uniform(2, replicas=(2, 2)).with_mesh("model:2"), 0) is None


def test_a_worker_of_several_stages_needs_another_in_each() -> None:
    plan = replace(pd.Plan.uniform(2, replicas=(2, 2)), cluster=pd.Cluster.flat(3), worker_order=(0, 1, 1, 2))
    reduced = drop_worker(plan, 1)
    assert sorted(reduced.worker_order) == [0, 1]
    assert drop_worker(reduced, 0) is None


BATCHES = 6
SHAPES = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 1, 1), (2,)]
METHODS = dict.fromkeys(("1f1b", "gpipe", "zb_h1", "pipedream", "pipedream_2bw", "pipemare"), SHAPES)
METHODS |= {"chimera": [(1, 1), (1,) * 4], "roundpipe": [(1, 1), (1, 1, 1)]}


def count_trained(gradients: list[Tensor], begin: int, size: int) -> int:
    """Returns the minibatch after these updates, each of which is the mean of whole minibatches, once and in order."""
    for gradient in gradients:
        samples = gradient.nonzero().flatten().tolist()
        assert samples == list(range(begin * size, begin * size + max(size, len(samples))))
        torch.testing.assert_close(gradient[samples] * len(samples) * len(gradient), torch.ones_like(gradient[samples]))
        begin, rest = divmod(samples[-1] + 1, size)
        assert rest == 0, "a part of a minibatch"
    return begin


@few
@given(data=st.data())
def test_whatever_is_lost_each_update_sums_over_its_minibatches(data: st.DataObject) -> None:
    """ReCoVer's invariant, arXiv 2605.11215.

    A worker is lost within an update, up to three times; the run continues from its newest checkpoint, on the same
    plan or a smaller one. Samples are rows of the identity, and layers multiply by 1 + w: the gradient of w shows them.
    """
    method, size = data.draw(st.sampled_from(list(METHODS))), data.draw(st.integers(3, 6))
    zeros, rows = torch.zeros(BATCHES * size).double(), torch.eye(BATCHES * size).double().split(size)
    layers = (Built(lambda module, x: x + x * module.weight, weight=nn.Parameter(zeros.clone())) for _ in range(4))
    batches = [(batch, -torch.ones_like(batch)) for batch in rows]
    how: dict[str, Any] = {"model": nn.Sequential(*layers), "data": batches, "loss": nn.functional.l1_loss}
    shape, every = data.draw(st.sampled_from(METHODS[method])), data.draw(st.integers(1, 4))
    training, begin = Training(**how, optimizer=torch.optim.SGD, plan=shape, schedule=method), 0
    with TemporaryDirectory() as folder:
        for losses_left in range(data.draw(st.integers(1, 3)), -1, -1):
            plan, noted = training.resolved_plan, list[list[Tensor]]()
            workers = sum(plan.replicas)  # each has an optimizer; later ones are trials
            last = data.draw(st.integers(0, BATCHES * workers)) if losses_left else -1

            def make(parameters: Any, noted: Any = noted, workers: int = workers, last: int = last) -> Any:
                def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
                    assert sum(map(len, noted)) != last, "a worker is lost"
                    gradients.append(optimizer.param_groups[0]["params"][0].grad.clone())

                optimizer, gradients = torch.optim.SGD(parameters, lr=0.0), list[Tensor]()
                if len(noted) < workers:
                    noted.append(gradients)
                    optimizer.register_step_pre_hook(note)
                return optimizer

            saving: Any = {"folder": Path(folder), "save_at": range(every, BATCHES, every)}
            with suppress(pd.errors.WorkerError):
                replace(training, optimizer=make).pipeline(**saving, resume=Path(folder) if begin else None)
            trained = [count_trained(gradients, begin, size) for gradients in noted]
            begin = max((checkpoint.minibatches for checkpoint in folders.list_checkpoints(folder)), default=0)
            assert begin <= min(trained), "a checkpoint of updates that were not made"
            reduced = drop_worker(plan, data.draw(st.integers(0, plan.workers - 1)))
            plans: list[Any] = [shape for shape in METHODS[method] if sum(shape) < plan.workers]
            plans += [] if reduced is None or method == "chimera" else [reduced]
            training = replace(training, plan=data.draw(st.sampled_from([training.plan, *plans])))
    assert trained == [BATCHES] * workers
