"""Old bugs, each with its story, so that none comes back."""

import copy
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from built import Built
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import SGD, loop, plan_of, train

import pipedream as pd

BATCHES = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(7)]


def two_stages() -> tuple[nn.Module, pd.Plan]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, plan_of(model, BATCHES[0][0], (2,))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143)])
def test_an_interrupt_is_told_once(number: signal.Signals, code: int | None) -> None:
    """Ctrl-C drained the pipeline and raised; the evaluation that followed raised again, and nothing was saved."""
    model, plan = two_stages()
    with pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=SGD) as pipeline:
        stream = pipeline.train(BATCHES, epochs=100)
        while next(stream).number < 9:
            pass
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt) as caught:
            list(stream)
        assert getattr(caught.value, "code", None) == code, "a script that does not catch it ends with this status"
        assert pipeline.drains[-1] < 20
        assert pipeline.evaluate(BATCHES)["loss"] > 0
        assert set(pipeline.state_dict()) == set(model.state_dict())


def test_every_replica_knows_whether_there_is_an_update() -> None:
    """A flush with one microbatch and two replicas: the replica without a part in a minibatch began the update
    after the last one, because only its own next forward would have told it that the data was at its end."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert len(train(model, plan_of(model, BATCHES[0][0], (), (2,)), BATCHES, schedule="naive").losses) == 7


def test_a_loader_that_was_read_keeps_nothing() -> None:
    """Readings were shared out by itertools.tee, which keeps blocks of 57 items: a run held up to 57 minibatches that
    all its readers had had."""
    references: list[weakref.ref[torch.Tensor]] = []

    class Loader:
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for _ in range(20):
                x = torch.randn(6, 4)
                references.append(weakref.ref(x))
                yield x, torch.randint(0, 3, (6,))

    model, plan = two_stages()
    with pd.Pipeline(model, plan, schedule="pipedream", loss=F.cross_entropy, optimizer=SGD) as pipeline:
        most = [sum(ref() is not None for ref in references) for _ in pipeline.train(Loader())]  # type: ignore[arg-type]
    assert max(most) <= plan.in_flight[0] + 2, "those in flight, the one that the loader is at, and one read ahead"


def test_a_checkpointed_layer_is_done_again_at_the_stashed_weights() -> None:
    """In a backward the optimizer's parameters stood in the modules, and a layer under torch's `checkpoint` was done
    again at these: the newest weights, in a method whose backward is at those of the forward."""
    batches = [(x.double(), y) for x, y in BATCHES]
    body, outcomes = lambda self, x: self.b(torch.tanh(self.a(x))), []
    for forward in (body, lambda self, x: checkpoint(body, self, x, use_reentrant=False)):
        torch.manual_seed(3)
        layer = Built(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 4))
        model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)).double()
        outcomes.append(train(model, plan_of(model, batches[0][0], (2,)), batches, epochs=3, schedule="pipedream"))
    assert outcomes[0].losses == outcomes[1].losses


def test_a_first_layer_that_works_in_place() -> None:
    """The parts of a minibatch were views of one tensor, whose changes autograd counts together: the backward of the
    first part found that the second had changed it.
    """
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.randint(2, (8,))
    outcomes = []
    for parts in (1, 4):
        torch.manual_seed(0)
        in_place = Built(lambda self, x: self.linear(x.relu_()), linear=nn.Linear(4, 4))
        options = {"schedule": "gpipe", "microbatches": parts, "sample": inputs.clone()}
        data = [(inputs.clone(), targets) for _ in range(3)]
        trained = train(nn.Sequential(in_place, nn.Linear(4, 2)).double(), pd.Plan.uniform(2), data, **options)
        outcomes.append(trained.losses)
    assert outcomes[0] == pytest.approx(outcomes[1])


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)])
def test_sparse_embeddings(replicas: tuple[int, ...]) -> None:
    """With clipping, and with replicas, torch's own errors came; replicas are refused."""
    data = [(torch.randint(10, (8,)), torch.randint(2, (8,)))] * 2
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    plan = pd.Plan.uniform(2, replicas=replicas)
    options = {"schedule": "gpipe", "microbatches": 2, "clip_grad_norm": 1.0, "sample": data[0][0]}
    words = r"shape \(10, 4\) is sparse, and its stage has replicas"
    with nullcontext() if replicas == (1, 1) else pytest.raises(pd.PipelineError, match=words):
        assert len(train(model, plan, data, **options).losses) == 2


@pytest.mark.parametrize("conjugated", [False, True])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)])
def test_complex_weights_are_clipped_as_torch_does(replicas: tuple[int, ...], conjugated: bool) -> None:
    """The norm was asked for in a real type, which torch refuses for complex gradients, and so for conjugate views, as
    autograd leaves them; profiling did the same."""
    read = lambda weight: weight.conj().T if conjugated else weight  # noqa: E731
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
    layer = Built(lambda self, x: (x.to(torch.complex128) @ read(self.weight)).abs(), weight=weight)
    model, data = nn.Sequential(layer, nn.Linear(4, 2).double()), [(torch.randn(8, 4).double(), torch.randint(2, (8,)))]
    clip = lambda plain: nn.utils.clip_grad_norm_(plain.parameters(), 0.01, foreach=False)  # noqa: E731
    expected = loop(copy.deepcopy(model), data, after_backward=clip)
    profile = pd.profile(model, data[0][0], warmup=0, runs=1)
    plan = pd.plan(profile, pd.Cluster.flat(sum(replicas)), schedule="gpipe", microbatches=2, shape=replicas, cuts=(1,))
    torch.testing.assert_close(train(model, plan, data, clip_grad_norm=0.01).state, expected.state)


def test_a_saved_program_is_read_where_no_method_was_named(tmp_path: Path) -> None:
    """The rule for the weights is in the method's file, which nothing had imported."""
    program = pd.lower(pd.schedules.build("timeprest_interpolated", pd.Plan.uniform(2)))
    code = "import sys, pipedream as pd\nprint(pd.Program.load(sys.argv[1]).name)"
    command = [sys.executable, "-c", code, str(program.save(tmp_path / "program.json"))]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == program.name
