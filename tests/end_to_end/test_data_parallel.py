"""A one-stage plan is data parallelism: its weights are those of torch's DistributedDataParallel, to rounding."""

from dataclasses import replace

import processes
import pytest
import torch
import torch.distributed as dist
import zoo
from cases import OPTIMIZERS, Case
from marks import slow
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import pipedream as pd
from pipedream.testing import Passes, assert_near

SEED = 3
FULL = 24  # minibatches: whole rounds of 2 and of 3
ANIMALS = (("mlp", "sgd"), ("cnn", "sgd"), ("mlp", "adamw"), ("cnn", "adamw"))


def both(replicas: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Trains each animal with the library and with torch; returns parameters and statistics of both."""
    return [(library(*kind, replicas), torch_alone(*kind, replicas)) for kind in ANIMALS]


def library(name: str, optimizer: str, replicas: int) -> dict[str, Tensor]:
    case = Case(name, "pipedream", 1, replicas=(replicas,), optimizer=optimizer, seed=SEED, evaluate_at=())
    return replace(case.training(), data=batches_of(zoo.make(name)), epochs=1).pipeline().state


def batches_of(animal: zoo.Animal) -> list[zoo.Batch]:
    return (animal.batches * 5)[:FULL]


def torch_alone(name: str, optimizer: str, replicas: int) -> dict[str, Tensor]:
    """Trains with DistributedDataParallel: minibatch k on rank k mod r, masks seeded as the library does."""
    animal, rank = zoo.make(name), dist.get_rank()
    layers = [layer.name for layer in pd.capture.capture(animal.model, (animal.batches[0][0],)).graph.layers]
    whole = DistributedDataParallel(animal.model, broadcast_buffers=False)
    stepper = OPTIMIZERS[optimizer](list(animal.model.named_parameters()))
    passes = Passes(animal.model, [layers], animal.total, SEED)
    with passes.hooks():
        for k in range(rank, FULL, replicas):
            passes.number = k
            x, y = batches_of(animal)[k]
            stepper.zero_grad()
            total, weight = animal.total(whole(x.clone()), y)
            (total / weight).backward()
            stepper.step()
    state = {name: value.detach().clone() for name, value in animal.model.state_dict().items()}
    for name, value in state.items():
        if name not in dict(animal.model.named_parameters()):  # statistics: averaged, and counts added up
            dist.all_reduce(value)
            if value.is_floating_point():
                value /= replicas
    return state if rank == 0 else {}


@pytest.mark.processes
@pytest.mark.parametrize("replicas", [2, slow(3)])
def test_a_one_stage_plan_equals_torch(replicas: int) -> None:
    results = processes.team(replicas).results(both, replicas)
    assert all(not any(pair) for rank in results[1:] for pair in rank)
    for (name, optimizer), (ours, theirs) in zip(ANIMALS, results[0], strict=True):
        start = zoo.make(name).model.state_dict()
        assert any(not torch.allclose(ours[key], start[key], rtol=0.1) for key in start), optimizer
        assert_near(ours, theirs, 1e-10)
