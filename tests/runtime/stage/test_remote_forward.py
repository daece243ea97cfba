"""Remote forwards: what is sent, what is dropped, and layers whose buffers and frozen weights matter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import processes
import pytest
import reference
import torch
import torch.nn.functional as F
from cases import Fresh, assert_near
from torch import Tensor, nn

import pipedream as pd
from pipedream.capture import capture
from pipedream.core.errors import WorkerError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.plan import Plan
from pipedream.experimental.roundpipe import homes
from pipedream.planner import manual_plan
from pipedream.runtime.comm.message import Message
from pipedream.runtime.stage.remote_forward import RemoteForward, WeightPacket
from pipedream.runtime.stage.stage_module import StageModule

OPTIMIZER = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
NAMES = [str(i) for i in range(8)]


class Counted(nn.Module):
    """A layer whose output depends on how many microbatches it has seen; one buffer has two names, one weight is
    frozen, one buffer is in no state dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("also", self.seen)
        self.register_buffer("mask", torch.arange(width) % 3 > 0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return torch.tanh(self.inner(x) * self.frozen * self.mask) / (1.0 + 0.1 * self.also) + x


def make() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [nn.Linear(4, 6), Counted(6), nn.BatchNorm1d(6), Counted(6), nn.Dropout(0.2), Counted(6)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    for layer in model:
        if isinstance(layer, Counted):
            layer.also = layer.seen  # double() made two of them
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    sizes = (9, 9, 6, 9)
    return [
        (torch.randn(n, 4, dtype=torch.float64, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


def plan(workers: int, cuts: tuple[int, ...] = (1, 3, 4, 6)) -> Plan:
    graph = capture(make(), (batches()[0][0],)).graph
    profile = Profile("counted", graph, tuple(LayerProfile(1.0, 2.0, 8, 8) for _ in graph.layers), 1)
    chain = manual_plan(profile, Cluster.flat(len(cuts) + 1), cuts, (1,) * (len(cuts) + 1))
    return replace(chain, cluster=Cluster.flat(workers), worker_order=homes(workers, len(cuts) + 1))


def train(
    workers: int, epochs: int = 3, save: Path | None = None, resume: Path | None = None, **options: object
) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    """Returns losses, the state, and what an evaluation in the middle found."""
    means: dict[str, float] = {}
    with pd.Pipeline(
        make(), plan(workers), schedule="roundpipe", microbatches=3, loss=F.cross_entropy, optimizer=OPTIMIZER, seed=3,
        **options,
    ) as pipeline:  # fmt: skip
        if resume is not None:
            pipeline.load(resume)
        losses = []
        for done in pipeline.train(Fresh(batches()), epochs=epochs - pipeline.position[0]):
            losses.append(done.loss)
            if done.number == 5:
                means = pipeline.evaluate(Fresh(batches()))
                assert pipeline.evaluate(Fresh(batches())) == means
                outputs = list(pipeline.predict(Fresh(batches())))
                assert [len(output) for output in outputs] in ([9, 9, 6, 9], [])
            if save is not None and done.number == 7:
                pipeline.save(save)
        return losses, pipeline.state_dict(), means


def total(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return F.cross_entropy(output, targets, reduction="sum"), float(len(targets))


@pytest.mark.parametrize(
    "workers", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_buffers_frozen_weights_and_masks_are_those_of_one_process(workers: int) -> None:
    losses, state, evaluated = train(workers)
    expected = reference.plain(make(), NAMES, batches() * 3, total, OPTIMIZER, microbatches=3, seed=3, drains=(6,))
    assert losses == pytest.approx(expected.losses, rel=1e-10)
    assert_near(state, {name: expected.state[name] for name in state}, 1e-10)
    assert state["1.seen"] == state["1.also"] == 36.0, "each microbatch is seen once"
    assert evaluated["loss"] == pytest.approx(reference.mean_loss(expected.at_drains[6], batches(), total), rel=1e-10)


@pytest.mark.slow
def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = train(3, save=tmp_path)
    rest = train(3, resume=tmp_path)
    assert rest[0] == whole[0][8:]
    assert all(torch.equal(rest[1][name], value) for name, value in whole[1].items())


@pytest.mark.slow
@pytest.mark.processes
def test_processes_give_to_the_bit_what_one_gives(tmp_path: Path) -> None:
    alone = train(3)
    of_ranks = processes.kept(3).results(train, 3)
    for losses, _, evaluated in of_ranks:
        assert losses == alone[0]
        assert evaluated == alone[2]
    assert all(torch.equal(of_ranks[0][1][name], value) for name, value in alone[1].items())


# -- the parts ------------------------------------------------------------------------------------------


def stage_of(layers: list[nn.Module]) -> StageModule:
    named = [(str(i), layer) for i, layer in enumerate(layers)]
    handles = {f"{i}.{name}": p for i, layer in named for name, p in layer.named_parameters() if p.requires_grad}
    return StageModule(named, handles, torch.device("cpu"), 0)


def tensors(module: StageModule) -> Iterator[Tensor]:
    for _, layer in module.layers:
        yield from (*layer.parameters(), *layer.buffers())


def test_a_weight_packet_brings_all_that_the_layers_read() -> None:
    home, there = stage_of([Counted(6), nn.Conv2d(2, 3, 3)]), stage_of([Counted(6), nn.Conv2d(2, 3, 3)])
    home.layers[1][1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    there.layers[1][1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    low = {"1.weight": torch.bfloat16}
    leaves = {name: handle.detach().to(low.get(name, handle.dtype)) for name, handle in home.handles.items()}
    home.layers[0][1].seen += 4  # type: ignore[operator]
    before = [tensor.detach().clone() for tensor in tensors(there)]
    weight_packet = WeightPacket(there, low)
    weights, others = weight_packet.unpack(WeightPacket(home, low).pack(leaves).clone())
    assert weights.keys() == leaves.keys()
    for name, leaf in weights.items():
        assert leaf.requires_grad
        assert leaf.dtype == leaves[name].dtype
        assert leaf.stride() == leaves[name].stride()
        assert torch.equal(leaf, leaves[name])
    layer = there.layers[0][1]
    with weight_packet.installed(others):
        assert layer.seen is layer.also
        assert layer.seen == 4.0
        assert torch.equal(layer.mask, home.layers[0][1].mask)  # type: ignore[arg-type]
        layer.seen += 1  # type: ignore[operator]
        layer.mask = ~layer.mask  # type: ignore[operator]
    assert layer.seen is layer.also
    assert all(torch.equal(now, then) for now, then in zip(tensors(there), before, strict=True)), "nothing is left"
    with weight_packet.installed(others):
        assert layer.seen == 5.0, "what a forward wrote is there for the next one"
        assert not torch.equal(layer.mask, home.layers[0][1].mask)  # type: ignore[arg-type]
    assert home.layers[0][1].seen == 4.0


def test_a_remote_forward_has_weights_from_a_fetch_to_its_drop() -> None:
    home = stage_of([nn.Linear(3, 3), nn.Tanh()])
    remote_forward = RemoteForward(home, WeightPacket(home, {}))
    message = Message(
        0, tensors=(WeightPacket(home, {}).pack({n: h.detach() for n, h in home.handles.items()}),), version=2
    )
    with pytest.raises(AssertionError, match="not fetched"):
        remote_forward.read(0)
    remote_forward.fetch(message)
    with pytest.raises(AssertionError, match="version 2 was fetched, not 3"):
        remote_forward.read(3)
    with pytest.raises(AssertionError, match="where others still are"):
        remote_forward.fetch(message)
    weights, version = remote_forward.read(2)
    assert (weights.leaves.keys(), version) == (home.handles.keys(), 2)
    remote_forward.drop()
    with pytest.raises(AssertionError, match="not fetched"):
        remote_forward.read(2)


def test_a_stage_without_anything_travels_too() -> None:
    empty = stage_of([nn.Tanh()])
    weight_packet = WeightPacket(empty, {})
    assert weight_packet.unpack(weight_packet.pack({})) == ({}, [])


def test_an_error_of_a_remote_forward_names_its_rank_and_stage() -> None:
    class Breaks(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Breaks.calls += self.training
            if Breaks.calls > 4:
                raise RuntimeError("broken on purpose")
            return x + 0.0

    model = nn.Sequential(nn.Linear(4, 4), Breaks(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    graph = capture(model, (batches()[0][0],)).graph
    profile = Profile("breaks", graph, tuple(LayerProfile(1.0, 2.0, 8, 8) for _ in graph.layers), 1)
    remote_plan = replace(
        manual_plan(profile, Cluster.flat(4), (1, 2, 3)), cluster=Cluster.flat(3), worker_order=homes(3, 4)
    )
    with (
        pd.Pipeline(
            model, remote_plan, schedule="roundpipe", microbatches=4, loss=F.cross_entropy, optimizer=OPTIMIZER
        ) as run,
        pytest.raises(WorkerError, match=r"rank 1.*stage 1.*broken on purpose"),
    ):
        list(run.train(batches()))
