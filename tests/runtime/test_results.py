"""Results travel with gradients, or in messages of their own; read at once, or a minibatch later."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from cases import Case, make_pipeline, run
from marks import thinned

import pipedream as pd
from pipedream.runtime.comm.channel import LocalChannel
from pipedream.runtime.results import Results
from pipedream.services.losses.totals import HostCopies
from pipedream.testing import Trained, assert_equal

CASE = partial(Case, "mlp", evaluate_at=())
CASES = (
    CASE("1f1b", 3, microbatches=3),
    CASE("zb_h1", 2, microbatches=4),
    CASE("chimera", 4, microbatches=4, workers=4),
    CASE("pipedream", 2, replicas=(2, 1)),
    CASE("gpipe", 2, replicas=(1, 3), microbatches=4),
    CASE("pipedream_2bw", 3, replicas=(1, 2, 2)),
)


def read_late(patch: pytest.MonkeyPatch, late: bool = True) -> None:
    """Lets losses be read late, as on a GPU, or at once."""
    make = lambda *arguments, **keywords: Results(*arguments, **keywords | {"reads_late": late})  # noqa: E731
    patch.setattr("pipedream.runtime.assemble.Results", make)


def outcomes(case: Case) -> Iterator[Trained]:
    """Runs a case with losses that are read at once, and late."""
    for late in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            read_late(patch, late)
            yield run(case)


@pytest.mark.parametrize("case", thinned(CASES), ids=str)
def test_losses_that_are_read_later_are_the_same(case: Case) -> None:
    at_once, late = outcomes(case)
    assert_equal(late, at_once)


def test_a_drain_gives_what_is_read_late() -> None:
    """The loop is left one minibatch later, and gets every result."""
    at_once, late = outcomes(Case("mlp", "1f1b", 3, microbatches=3, evaluate_at=(7,), epochs=5))
    assert (at_once.drains, late.drains) == ([8, 25], [9, 25])
    assert late.losses == at_once.losses


def test_results_that_gradients_carry_need_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[int] = Counter()
    send = LocalChannel.send

    def counted(channel: LocalChannel, message: Any) -> None:
        sent[id(channel)] += 1
        send(channel, message)

    monkeypatch.setattr(LocalChannel, "send", counted)
    with make_pipeline("mlp", (1, 1, 1), schedule="1f1b", microbatches=2) as trained:
        workers = trained._session.workers_here.workers
        results = [id(sender) for worker in workers for sender in worker.results.senders.values()]
        assert len(list(trained.train(zoo.make("mlp").batches))) == 5
        assert not any(sent[channel] for channel in results)
        assert sum(sent.values()) > 5 * 2 * 4
        trained.evaluate(zoo.make("mlp").batches)
        assert all(sent[channel] == 1 for channel in results)


def test_a_loss_that_is_nan_is_an_error_also_when_it_is_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    read_late(monkeypatch)
    calls = []

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        calls.append(1)
        return F.cross_entropy(output, batch[1]) * (float("nan") if len(calls) == 4 else 1.0)

    with (
        pytest.raises(pd.PipelineError, match="the loss of minibatch 3 is nan"),
        make_pipeline("mlp", loss=loss) as trained,
    ):
        list(trained.train(zoo.make("mlp").batches))


def test_an_evaluation_on_a_gpu_reads_its_losses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read would make the host wait for its GPU. A metric may write into the tensor that it has returned."""
    reads = []
    read = HostCopies.read
    monkeypatch.setattr(HostCopies, "read", lambda copies: reads.append(1) or read(copies))
    answers = []
    for late in (False, True):
        read_late(monkeypatch, late)
        total = torch.zeros((), dtype=torch.float64)
        metrics = {"sum": lambda output, batch, total=total: total.add_(output.sum())}
        with make_pipeline("mlp", metrics=metrics) as trained:
            answers.append(trained.evaluate(zoo.make("mlp").batches))
    assert answers[0] == answers[1]
    assert len(reads) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_on_both_devices_are_read_before_their_metrics_change_them(device: str) -> None:
    total = torch.tensor(2.5)
    copies = HostCopies([torch.tensor(1.5, device=device), total, torch.tensor([3.5], device=device)])
    total += 1.0
    assert copies.read() == [1.5, 2.5, 3.5]
