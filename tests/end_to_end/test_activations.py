"""A stage that recomputes or offloads its activations (here without a GPU) trains to the bit as one that keeps them."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from built import Built, Watched
from cases import Case, check_same, run
from marks import slow, thinned
from torch import Tensor, nn
from torch.nn import functional as F
from training import train

import pipedream as pd
from pipedream.core.plan import memory
from pipedream.extensions.offload import block_mover, saved_tensors as offload

RECOMPUTED = [
    Case("mlp", "pipedream", 3),
    Case("cnn", "pipedream_2bw", 3, microbatches=3),
    Case("transformer", "1f1b", 3, microbatches=4, optimizer="adamw"),
    Case("lstm", "pipedream", 1, dtype=torch.float32),
    Case("mlp", "pipedream", 3, dtype=torch.float32, autocast=torch.bfloat16),
    *(slow(Case(a, "pipedream", 3)) for a in zoo.NAMES[1:]),
    *(slow(Case(a, "1f1b", 3, microbatches=4, optimizer="adamw")) for a in zoo.NAMES[:3]),
    slow(Case("cnn", "pipedream", 2, replicas=(2, 1), update_delay=(1, 0), depth=(3, 1))),
    slow(Case("cnn", "pipedream", 2, replicas=(1, 3), evaluate_at=())),
    slow(Case("mlp", "pipedream_2bw", 2, replicas=(2, 1), microbatches=4)),
    slow(Case("mlp", "1f1b", 3, microbatches=3, clip_grad_norm=0.1, scheduled=True, ema=0.9)),
]


@pytest.mark.parametrize("case", thinned(RECOMPUTED), ids=str)
def test_recomputation_changes_no_bit(case: Case) -> None:
    check_same(run(replace(case, recompute=True)), run(case), 0)


def wander(self: Any, x: Tensor) -> Tensor:
    """Its output depends on a buffer that each forward moves, and it writes into its input."""
    self.calls += 1
    if self.training and self.calls > self.start:
        self.count.add_(1.0)
    if x.requires_grad:  # not the loader's own batch, whose microbatches are views of it
        x.mul_(0.9)
    return x * self.weight * torch.cos(self.count) * self.constant


def wandering(start: int = 0) -> nn.Module:
    buffers = {"count": nn.Buffer(torch.zeros(())), "constant": nn.Buffer(torch.ones(4))}
    return Built(wander, weight=nn.Parameter(torch.ones(4)), start=start, calls=0, **buffers)


def noisy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output + 0.1 * torch.rand_like(output), batch[1])


def stages_of(sizes: tuple[int, ...], recompute: tuple[bool, ...] = (), **choices: Any) -> pd.Plan:
    ends = list(accumulate(sizes))
    rows = zip((0, *ends), ends, recompute or (False,) * len(sizes), strict=False)
    stages = (pd.Stage(a, b, names=tuple(map(str, range(a, b))), recompute=again) for a, b, again in rows)
    return pd.Plan(tuple(stages), tuple(range(len(sizes), 0, -1)), pd.Cluster.flat(len(sizes)), **choices)


def trained(
    recompute: bool, layers: list[nn.Module], schedule: str = "pipedream", *, check: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(*layers, nn.Linear(4, 4), nn.Tanh())
    data = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(5)] * 2
    plan = stages_of((2, len(model) - 2), recompute=(recompute, recompute))
    state = train(model, plan, [(x.clone(), y) for x, y in data], schedule=schedule, loss=noisy, check=check).state
    return state, torch.rand(3)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_buffers_that_are_read_inputs_that_are_written_and_a_loss_that_draws(schedule: str) -> None:
    state, drawn = trained(True, [wandering(), nn.Tanh(), wandering()], schedule)
    expected, after = trained(False, [wandering(), nn.Tanh(), wandering()], schedule)
    assert list(state) == list(expected)
    for name in expected:
        assert torch.equal(state[name], expected[name]), name
    assert torch.equal(drawn, after), "the user's generator continues as without recomputation"
    assert state["0.count"] == 10 * (1 if schedule == "pipedream" else 6)  # of 8 microbatches 2 are empty


def test_a_buffer_that_begins_to_move_later_is_an_error() -> None:
    with pytest.raises(pd.errors.WorkerError, match="buffer 'count', which its first microbatch did not"):
        trained(True, [wandering(start=3), nn.Tanh()], check=False)  # which runs forwards of its own


def noted(name: str, calls: list[str], fails_at: int = 0) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        calls.append(name)
        if len(calls) == fails_at:
            raise RuntimeError("out of luck")
        return x * self.weight

    return Built(forward, weight=nn.Parameter(torch.ones(4)))


def test_a_stage_recomputes_while_it_waits_for_gradients() -> None:
    calls: list[str] = []
    trained(True, [noted("first", calls), nn.Tanh(), noted("second", calls)], "naive", check=False)
    assert calls[:4] == ["first", "first", "second", "second"]
    assert calls == calls[:4] * 10


def test_what_fails_when_recomputed_is_a_repeated_forward() -> None:
    layers = [noted("first", [], fails_at=4), nn.Tanh(), nn.Identity()]
    with pytest.raises(pd.errors.WorkerError, match="out of luck") as caught:
        trained(True, layers, "naive", check=False)
    assert "stage 0, repeating the forward of microbatch 1" in str(caught.value)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """What is freed is freed at once, and not by chance."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(("recompute", "most"), [(True, 1), (False, 3)])
def test_only_inputs_wait(recompute: bool, most: int) -> None:
    watched = Watched()
    model = nn.Sequential(nn.Linear(4, 4), watched, nn.Linear(4, 4), nn.Linear(4, 4))
    data = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(8)]
    train(model, stages_of((2, 1, 1), (recompute, False, False)), data, schedule="pipedream", loss=F.mse_loss)
    assert watched.most == most


OFFLOADED = [
    Case("mlp", "1f1b", 3, microbatches=4, optimizer="adamw", check=True),
    Case("transformer", "pipedream", 3),
    slow(Case("transformer", "zb_h1", 3, microbatches=6)),
    Case("cnn", "zbv", 4, microbatches=4),
    Case("mlp", "pipemare", 3, microbatches=3),
    Case("mlp", "xpipe", 2, microbatches=2),
    slow(Case("transformer", "pipedream_2bw", 3, microbatches=3)),
    slow(Case("mlp", "pipedream", 3, dtype=torch.float32, autocast=torch.bfloat16)),
    slow(Case("cnn", "pipedream", 2, replicas=(1, 3), evaluate_at=())),
]


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedream.core.plan.choices.Choices.check_device", lambda *_: None)
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("case", thinned(OFFLOADED), ids=str)
def test_offloaded_activations_change_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    close = offload.Offload.close
    monkeypatch.setattr(offload.Offload, "close", lambda self: (moved.append(self.moved_bytes), close(self)))
    away = run(replace(case, activations="host"))
    assert sum(moved) > 0
    check_same(away, run(case), 0)


def train_offloaded(activations: str | None, model: nn.Sequential, plan: pd.Plan | None = None) -> None:
    """Trains a row of modules, by default with the first two in stage 0, and each other one in a stage."""
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(12)]
    plan = plan or stages_of((2, *(1,) * (len(model) - 2)))
    train(model, plan, data, loss=F.mse_loss, activations=activations, check=False)


@pytest.mark.usefixtures("on_cpus", "no_garbage")
@pytest.mark.parametrize("waits", [True, False])
def test_what_waits_elsewhere_is_not_in_the_workers_memory(waits: bool) -> None:
    watched = Watched()
    train_offloaded("host" if waits else None, nn.Sequential(nn.Linear(8, 8), watched, *make_linears(6)))
    # One in its forward, at most one still to be copied, at most one copied back ahead.
    assert watched.most <= 3 if waits else watched.most == 7


@pytest.mark.usefixtures("on_cpus")
def test_only_the_stages_of_the_plan_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, packing = [], offload.OffloadedStage.packing

    def watch(self: offload.OffloadedStage, *arguments: Any) -> Any:
        stages.append(self._stage)
        return packing(self, *arguments)

    monkeypatch.setattr(offload.OffloadedStage, "packing", watch)
    plan = stages_of((1, 1, 1)).choosing(activations="host")
    plan = replace(plan, stages=tuple(replace(row, offload=at == 1) for at, row in enumerate(plan.stages)))
    train_offloaded(None, nn.Sequential(*make_linears(3)), plan)
    assert stages == [1] * 12


def make_linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(8, 8) for _ in range(count)]


@pytest.mark.usefixtures("on_cpus")
def test_a_tensor_that_is_written_after_it_was_saved_is_an_error() -> None:
    model = nn.Sequential(*make_linears(1), Built(lambda _, x: x.exp().add_(1.0)), *make_linears(2))
    with pytest.raises(pd.errors.WorkerError, match="written in place after the operation that saved it"):
        train_offloaded("host", model)


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("copy", ["_copy_out", "_copy_back"])
def test_a_copy_that_fails_ends_the_run(copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory can be pinned")

    monkeypatch.setattr(block_mover.BlockMover, copy, fail)
    with pytest.raises(pd.errors.WorkerError, match="no memory can be pinned"):
        train_offloaded("host", nn.Sequential(*make_linears(4)))


DISK = "activations='disk:/x' was asked for, and disks are no longer used; take schedule='roundpipe', recompute='auto'"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("host", "the workers are CPUs, whose memory is the host's; give none"),
        ("disk:/x", DISK),
        ("ram", "activations='ram' was asked for; give none or host"),
    ],
)
def test_a_place_that_cannot_hold_activations_is_refused(where: str, words: str, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: train_offloaded(where, nn.Sequential(*make_linears(3))),
        lambda: pd.run(make_recipe, out=tmp_path / "a", activations=where, quiet=True),
        lambda: pd.run(partial(make_recipe, where), out=tmp_path / "b", quiet=True),
    ]
    for call in calls:
        with pytest.raises(pd.errors.PlanError, match=words):
            call()


def test_a_host_with_too_little_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"offload": True, "optimizer_bytes": 800, "memory": memory.StageMemory(moved_bytes=2_000_000)}
    plan = stages_of((1, 1)).choosing(activations="host", optimizer_state="host")
    plan = replace(plan, stages=tuple(replace(row, **moved) for row in plan.stages))
    for free_bytes, words in (
        (3_999_999, r"offloaded to the memory of one machine and need 4\.00 MB, .* 1\.00 B are missing"),
        (4_000_000, r"optimizer state of 2 stages were .* need 1\.60 kB, 1\.60 kB more than the 0 B that are free"),
        (4_001_600, "the workers are CPUs"),
    ):
        monkeypatch.setattr("pipedream.services.weights.memory.host_bytes", lambda size=free_bytes: size)
        with pytest.raises(pd.errors.PlanError, match=words):
            pd.Pipeline(nn.Sequential(*make_linears(2)), plan, loss=F.mse_loss, optimizer=torch.optim.SGD)


def make_recipe(activations: str | None = None) -> pd.Recipe:
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return pd.Recipe(nn.Sequential(*make_linears(3)), F.mse_loss, optimizer, data, activations=activations)


def test_a_plan_of_an_earlier_version_says_what_to_do() -> None:
    stages = pd.Stage(0, 1, names=("0",), offload=True), pd.Stage(1, 2, names=("1",))
    plan = pd.Plan(stages, (2, 1), pd.Cluster.flat(2))
    text = replace(plan, choices=replace(plan.choices, activations="host")).to_json()
    cluster = '"memory_bytes": null,\n  "disk_bytes_per_s": 1e9, "disk_s_per_byte": 0.0,'
    older = text.replace('"offload": true', '"offload": 1.0').replace('"offload": false', '"offload": 0.0')
    older = older.replace('"memory_bytes": null,', cluster, 1)
    assert older.count("disk") == 2
    assert pd.Plan.from_json(older) == pd.Plan.from_json(text)
    with pytest.raises(pd.PipelineError, match=DISK):
        pd.Plan.from_json(older.replace('"host"', '"disk:/x"'))
