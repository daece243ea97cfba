"""Methods that split the backward train as plain PyTorch does, whatever else a stage is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import cases
import pytest
import torch
from cases import Case, check, check_processes, run
from marks import thinned
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage

CASES = [
    # Deeper than the microbatches reach, and not so deep.
    Case("mlp", "zb_h2", 4, microbatches=3),
    Case("mlp", "zb_h1", 3, microbatches=4, depth=(2, 1, 1)),
    # Replicas: sums over them begin in the last weight gradients. Two stages of a different number of them.
    Case("mlp", "zb_h1", 2, replicas=(2, 1), microbatches=4),
    Case("mlp", "zb_h2", 2, replicas=(1, 3), microbatches=6, optimizer="adamw"),
    # The forward done again in I.
    Case("cnn", "zb_h1", 3, microbatches=4, recompute=True),
    # What happens inside an update; a loop that is left.
    Case("mlp", "zb_h1", 3, microbatches=3, clip_grad_norm=0.1, scheduled=True, ema=0.9),
    Case("mlp", "zb_h2", 2, microbatches=4, drain_at=-1, leave_at=5),
    # Single precision, in which the CPU has a kernel of its own for recurrent layers.
    Case("lstm", "zb_h1", 3, microbatches=3, dtype=torch.float32),
]


@pytest.mark.parametrize("case", thinned(CASES), ids=str)
def test_a_split_backward_trains_as_plain_pytorch(case: Case) -> None:
    check(case, run(case))


def test_autocast_equals_autocast_in_one_process() -> None:
    case = Case("transformer", "zb_h1", 3, dtype=torch.float32, autocast=torch.bfloat16, microbatches=4)
    check(case, run(case), tolerance=3e-2)


@pytest.mark.processes
@pytest.mark.slow
def test_several_processes_give_to_the_bit_what_one_gives() -> None:
    chosen = [
        Case("transformer", "zb_h1", 3, microbatches=4, optimizer="adamw"),
        Case("cnn", "zb_h2", 3, microbatches=5),
        Case("mlp", "zb_h1", 2, replicas=(2, 1), microbatches=4),
    ]
    check_processes(3, chosen)


@pytest.mark.parametrize("animal", ["mlp", "cnn"])
def test_it_is_1f1b_to_rounding(animal: str) -> None:
    """Split or not, the gradients of a microbatch are made of the same numbers."""
    case = Case(animal, "1f1b", 3, microbatches=4)
    whole, halves = run(case), run(replace(case, schedule="zb_h1"))
    cases.assert_near(halves.state, whole.state, 1e-12)


class Tied(nn.Module):
    """A table of words that the output reads too, in one stage: the first layer's input wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(self.table(tokens)).tanh() @ self.table.weight.T


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
def test_tied_embeddings_and_a_stage_without_weights(schedule: str) -> None:
    """And a last stage that reads one weight at two places of the path."""

    def make_model() -> nn.Sequential:
        torch.manual_seed(0)
        shared = nn.Linear(7, 7)
        return nn.Sequential(Tied(), nn.Tanh(), nn.Sequential(shared, nn.ReLU(), shared)).double()

    model, reference = make_model(), make_model()
    rows = tuple(Stage(*ends, names=tuple(map(str, range(*ends)))) for ends in ((0, 1), (1, 2), (2, 3)))
    plan = Plan(rows, (3, 2, 1), Cluster.flat(3))
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    batches = [(torch.randint(7, (6, 3)), torch.randn(6, 3, 7, dtype=torch.float64)) for _ in range(5)]
    with pd.Pipeline(model, plan, schedule=schedule, loss=F.mse_loss, optimizer=sgd, microbatches=3) as pipeline:
        losses = [done.loss for done in pipeline.train(batches)]
        state = pipeline.state_dict()
    stepper = sgd(reference.parameters())
    for (x, y), loss in zip(batches, losses, strict=True):
        stepper.zero_grad()
        expected = F.mse_loss(reference(x), y)
        expected.backward()
        stepper.step()
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    cases.assert_near(state, reference.state_dict(), 1e-12)
