"""The host store: what is copied, what is dropped, and layers whose buffers and frozen weights matter."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import processes
import pytest
import torch
import torch.nn.functional as F
from built import Built
from cases import Fresh, stage_states
from marks import long, slow, thinned
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import plan_of

import pipedream as pd
from pipedream.extensions.host_weights import host_store, residence
from pipedream.extensions.host_weights.roundpipe import homes
from pipedream.runtime.updates import UpdateThread

OPTIMIZER = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
DELAYED = "roundpipe[delay=1]"
RUNS = [long("roundpipe", 3), long(DELAYED, 3), (DELAYED, 4)]
"""In the last one workers take turns."""
CUTS = (1, 3, 4, 6)
CPU = torch.device("cpu")
Options, Patch = dict[str, Any], pytest.MonkeyPatch


class Counted(nn.Module):
    """A layer whose output depends on how many microbatches it has seen; one buffer has two names, one weight is
    frozen, one buffer is in no state dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("also", self.count)
        self.register_buffer("mask", torch.arange(width) % 3 > 0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return torch.tanh(self.inner(x) * self.frozen * self.mask) / self.divisor() + x

    def divisor(self) -> Tensor | float:
        return 1.0 + 0.1 * self.also


def make() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [nn.Linear(4, 6), Counted(6), nn.BatchNorm1d(6), Counted(6), nn.Dropout(0.2), Counted(6)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    for layer in model:
        if isinstance(layer, Counted):
            layer.also = layer.count  # double() made two of them
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    return [(draw(n, 4), torch.randint(3, (n,), generator=generator)) for n in (9, 9, 6, 9)]


def plan(workers: int, model: nn.Module, cuts: tuple[int, ...] = CUTS, sample: Any = None) -> pd.Plan:
    """Returns a plan of stages whose homes are these workers."""
    planned = plan_of(model, batches()[0][0] if sample is None else sample, cuts)
    return replace(planned, cluster=pd.Cluster.flat(workers), worker_order=homes(workers, len(cuts) + 1))


def pipeline(
    workers: int, schedule: str = "roundpipe", model: Any = None, cuts: tuple[int, ...] = CUTS, **options: Any
) -> pd.Pipeline:
    model = make() if model is None else model
    planned = options.pop("plan", None) or plan(workers, model, cuts, options.pop("sample", None))
    options = {"microbatches": 3, "loss": F.cross_entropy, "optimizer": OPTIMIZER, "check": False} | options
    return pd.Pipeline(model, planned, schedule=schedule, **options)


def training(
    workers: int, schedule: str = "roundpipe", model: Any = make, cuts: tuple[int, ...] = CUTS, **options: Any
) -> pd.testing.Training:
    how = {"epochs": 3, "evaluate_at": (5,), "seed": 3, "microbatches": 3} | options
    how |= {"loss": F.cross_entropy, "optimizer": OPTIMIZER, "schedule": schedule}
    return pd.testing.Training(model=model, data=batches(), plan=plan(workers, model(), cuts), **how)


def read_again(run: pd.Pipeline) -> tuple[float, list[int]]:
    """Returns the loss of another evaluation, and the sizes of what is predicted."""
    return run.evaluate(Fresh(batches()))["loss"], [len(output) for output in run.predict(Fresh(batches()))]


@pytest.mark.parametrize("workers", [3, slow(4), slow(5)])
def test_buffers_frozen_weights_and_masks_are_those_of_one_process(workers: int) -> None:
    trained = training(workers).pipeline(watch=read_again)
    training(workers).assert_serial(trained)
    assert trained.state["1.count"] == trained.state["1.also"] == 36.0, "each microbatch is seen once"
    assert trained.watched[0] == (trained.evaluated[6], [9, 9, 6, 9])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "workers"), [("roundpipe", 3), (DELAYED, 4)])
def test_a_checkpoint_goes_on_to_the_bit(schedule: str, workers: int, tmp_path: Path) -> None:
    training(workers, schedule).resumed(tmp_path, (8, 11))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("schedule", "workers"), RUNS)
def test_processes_give_to_the_bit_what_one_gives(schedule: str, workers: int) -> None:
    pd.testing.assert_equal(training(workers, schedule).pipeline(workers), training(workers, schedule).pipeline())


def measure_peaks() -> tuple[int, ...]:
    """Returns the measured peak of each rank, of eight stages with 1 MiB of weights each."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    data = [(torch.randn(4, 512), torch.zeros(4, dtype=torch.int64)) for _ in range(8)]
    with pipeline(4, DELAYED, model, tuple(range(1, 8)), sample=data[0][0], microbatches=2) as run:
        list(run.train(data))
        return run.timeline().peak_bytes


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_counts_what_its_own_stages_have_in_the_store() -> None:
    mib = 1 << 20
    for peaks in processes.results(measure_peaks, 4):
        # Of two stages two versions, the gradients of two turns and the momentum; of the passes copies and gradients.
        assert all(10 * mib < peak < 20 * mib for peak in peaks), peaks


class Apart(TorchDispatchMode):
    """Refuses operations on tensors of the store together with copies of them, as if these were on a GPU."""

    MOVES = (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[tuple[int, int]] = []
        self.copied: dict[int, torch.UntypedStorage] = {}  # kept, so that no other gets its number

    def note_copied(self, tensor: Tensor) -> None:
        self.copied[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def place(self, tensor: Tensor) -> str:
        storage = tensor.untyped_storage()
        if any(begin <= storage.data_ptr() < end for begin, end in self.stored):
            return "store"
        return "copy" if storage._cdata in self.copied else ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {self.place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        assert not {"store", "copy"} <= places or function.overloadpacket in self.MOVES, function
        result = function(*args, **(kwargs or {}))
        if "copy" in places and function.overloadpacket not in self.MOVES:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and self.place(leaf) == "":
                    self.note_copied(leaf)
        return result


@pytest.mark.parametrize(("schedule", "workers"), thinned(RUNS))
def test_weights_in_the_store_never_meet_their_copies(schedule: str, workers: int, monkeypatch: Patch) -> None:
    expected = training(workers, schedule).pipeline()
    apart, addresses = Apart(), list[int]()

    def bring(copies: host_store.DeviceCopies, part: Tensor) -> Tensor:
        copy = part.clone()
        apart.note_copied(copy)
        return copy

    def copy_to_store(copies: host_store.DeviceCopies, tensors: list[Tensor | None], places: list[Tensor]) -> Any:
        pairs = [(tensor, place) for tensor, place in zip(tensors, places, strict=True) if tensor is not None]
        addresses.extend(id(place.copy_(tensor)) for tensor, place in pairs)
        return [None if tensor is None else place for tensor, place in zip(tensors, places, strict=True)], None

    def make(store: residence.HostStore, stage: int, size: int, make: Any = residence.HostStore._make) -> Tensor:
        memory: Tensor = make(store, stage, size)
        apart.stored.append((memory.data_ptr(), memory.data_ptr() + size))
        return memory

    monkeypatch.setattr(residence.HostStore, "_make", make)
    monkeypatch.setattr(host_store.DeviceCopies, "copy_to_device", bring)
    monkeypatch.setattr(host_store.DeviceCopies, "copy_to_store", copy_to_store)
    format_ = lambda *a, gradients, **named: host_store.StoreFormat(*a, gradients=True, **named)  # noqa: E731
    monkeypatch.setattr(residence, "StoreFormat", format_)

    def begin(thread: UpdateThread, make: Any, begin: Any = UpdateThread.begin) -> Any:
        def make_apart() -> None:
            with apart:
                make()

        return begin(thread, make_apart)

    monkeypatch.setattr(UpdateThread, "begin", begin)
    with apart:
        trained = training(workers, schedule).pipeline()
    assert bool(addresses) == (workers == 3), "gradients that others take are left in places of their own"
    pd.testing.assert_equal(trained, expected)


def tied() -> nn.Module:
    """Returns a model whose first and last stages have a weight in common, whose gradients meet before its updates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).double()
    model[4].weight = model[0].weight
    return model


TIED = {"model": tied, "cuts": (1, 2, 3, 4), "epochs": 2}


@pytest.mark.parametrize("options", [slow({}), {"clip_grad_norm": 0.1, "clip": "local", "ema": 0.9}, TIED])
def test_a_thread_gives_to_the_bit_what_the_loop_gives(options: Options, monkeypatch: Patch) -> None:
    overlapped = training(3, DELAYED, **options).pipeline()
    monkeypatch.setattr("pipedream.core.schedule.rules.Rules.overlaps_update", lambda *_: False)
    pd.testing.assert_equal(overlapped, training(3, DELAYED, **options).pipeline())


@pytest.mark.parametrize("workers", thinned([2, 4]))
@pytest.mark.parametrize("options", [{"evaluate_at": (11,)}, TIED | {"evaluate_at": ()}])
def test_workers_that_take_turns_give_what_one_gives(workers: int, options: Options, monkeypatch: Patch) -> None:
    # A forward here would read a count that lacks the minibatch before, whose backward changes it.
    monkeypatch.setattr(Counted, "divisor", lambda self: 1.0)
    expected, trained = (training(count, DELAYED, **options).pipeline() for count in (1, workers))
    pd.testing.assert_equal(trained, expected)


def test_a_sparse_gradient_in_a_turn_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 3))
    words, sample = r"gradient of '0\.weight' is sparse.* choose a method without a delay", torch.arange(9)
    with pipeline(2, DELAYED, model, (1, 2), sample=sample) as run, pytest.raises(pd.PipelineError, match=words):
        list(run.train([(sample, sample % 3)]))


class Begins(nn.Module):
    """Counts its forwards in training, two for a microbatch: a backward repeats the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)

    def __deepcopy__(self, memo: Any) -> Begins:
        return Begins()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not x.is_meta:
            self.begun.release()
        return x + 0.0


class Slow(torch.optim.SGD):
    """Steps once the forwards of the next minibatch have begun; the last step does not wait."""

    def __init__(self, named: Any, begins: Begins, microbatches: int, updates: int) -> None:
        super().__init__(named, lr=0.05, momentum=0.9)  # as in `OPTIMIZER`
        self._begins, self._microbatches, self._rest = begins, microbatches, updates

    def step(self, closure: Any = None) -> None:
        self._rest -= 1
        for _ in range(2 * self._microbatches + (self._rest > 0)):
            assert self._begins.begun.acquire(timeout=60), "the next minibatch has not begun"
        if self._rest > 0:
            self._begins.begun.release()  # for the next update
        super().step()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_next_minibatch_begins_before_the_update_ends(workers: int) -> None:
    begins, data = Begins(), [(batch, targets) for batch, targets in batches() if len(batch) == 9]
    model = nn.Sequential(begins, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)).double()

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        # The first to update; not the trial of an optimizer for all stages, in which nothing begins.
        is_last_stage = all(name.startswith("3") for name, _ in named)
        return Slow(named, begins, 3, len(data)) if is_last_stage else OPTIMIZER(named)

    with pipeline(workers, DELAYED, model, (1, 2, 3), optimizer=optimizer) as run:
        assert [done.number for done in run.train(data)] == [0, 1, 2]
        spans = run.timeline().spans
    steps = {span.index: span for span in spans if (span.kind, span.stage) == ("step", 3)}
    forwards = {span.index: span for span in spans if (span.kind, span.stage) == ("F", 0)}
    assert sorted(steps) == [1, 2, 3]
    assert all(forwards[3 * update].start_s < steps[update].end_s for update in (1, 2))


@pytest.mark.parametrize(("name", "stage"), thinned([("0.weight", 0), ("3.inner.weight", 2), ("7.weight", 4)], 3))
def test_an_error_of_the_thread_is_that_of_its_update(name: str, stage: int) -> None:
    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        def fail(*_: Any) -> None:
            if name in dict(named) and next(steps) == 3:
                raise RuntimeError("broken on purpose")

        stepper, steps = torch.optim.SGD(named, lr=0.1), count(1)
        stepper.register_step_pre_hook(fail)
        return stepper

    counts = []
    for _ in range(2):
        done, words = [], rf"stage {stage}, finishing update 3: RuntimeError: broken on purpose"
        with pytest.raises(pd.PipelineError, match=words), pipeline(3, DELAYED, optimizer=optimizer) as run:
            done.extend(run.train(Fresh(batches()), epochs=3))
        counts.append(len(done))
    assert counts[0] == counts[1]


def test_frozen_weights_have_no_place_for_gradients_or_state(monkeypatch: Patch) -> None:
    """As with LoRA: the store has them once, whatever the versions; the optimizer has adapters alone."""
    pairs = [(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8, bias=False)) for _ in range(4)]
    adapted = lambda self, x: self.base(x) + self.adapter(x)  # noqa: E731
    model = nn.Sequential(*(Built(adapted, base=base, adapter=adapter) for base, adapter in pairs), nn.Linear(8, 3))
    data = [(torch.randn(6, 8), torch.randint(3, (6,))) for _ in range(3)]
    planned = plan(2, model, (2, 4), data[0][0])
    sizes = zip(planned.stages, (2 * (288 + 256), 2 * (288 + 256), 108), (2 * 288, 2 * 288, 0), strict=True)
    rows = [replace(stage, parameter_bytes=size, frozen_bytes=frozen) for stage, size, frozen in sizes]
    planned = replace(planned, stages=tuple(rows))
    make_pipeline = partial(pipeline, 2, DELAYED, model, plan=planned, microbatches=2, optimizer=torch.optim.AdamW)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    descriptors = os.listdir("/proc/self/fd")
    with make_pipeline() as run:
        list(run.train(data))
        assert os.listdir("/proc/self/fd") == descriptors, "the memory needs none"
        for state in stage_states(run):
            layout, handles = state.versions._store_format, state.versions.handles
            assert all(".adapter." in name or name.startswith("4") for name in layout.names)
            in_each_set = layout._set.payload_bytes - sum(handle.nbytes for handle in handles.values())
            in_all = layout._frozen.payload_bytes - 2 * 288 * any(".adapter." in name for name in layout.names)
            assert {in_each_set, in_all} <= set(range(64)), "no frozen weights in each set"
            assert set(state.optimizer.optimizer.state) == set(handles.values())
        after = run.state_dict()
    assert all(torch.equal(after[name], before[name]) == (".base." in name) for name in before)
    need = 2 * 2 * 288 + 4 * (4 * 256 + 108)  # frozen once; adapters and the head twice, and their gradients
    monkeypatch.setattr("pipedream.services.weights.memory.host_bytes", lambda: need - 1)
    with pytest.raises(pd.PipelineError, match=r"and need 5.68 kB, 1.00 B more"):
        make_pipeline()


MACHINES = [[["one", 1, "10.0.0.1"], []], [["two", 2, "10.0.0.2"], []]]


@pytest.mark.parametrize(
    ("name", "result", "words"),
    [
        ("platform.machine", "aarch64", "on aarch64, which may show a write before an earlier one; run all"),
        (f"{residence.__name__}.gather_json", MACHINES, "but the ranks are on 2: 10.0.0.1, 10.0.0.2"),
    ],
)
def test_what_has_no_memory_in_common_is_refused(name: str, result: Any, words: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(name, lambda *_: result)
    group = Mock()  # of which the store holds no reference
    with pytest.raises(pd.PipelineError, match=words):
        residence.HostStore(Mock(device=CPU), group).exchange()


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_host_waits_for_parts_that_a_gpu_still_reads(ahead: int, monkeypatch: Patch) -> None:
    """Dropped parts keep their memory until the GPU has computed with them."""
    unread, most = list[str](), 0

    def drop(number: int) -> mock.Mock:
        unread.append(f"slot {number}")
        return mock.Mock(synchronize=lambda: unread.remove(f"slot {number}"))

    current = mock.Mock(record_event=mock.Mock(side_effect=map(drop, range(9))))
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    copies = host_store.DeviceCopies(torch.device("cuda"), ahead)
    for _ in range(9):
        copies.copy_to_device(mock.Mock()).record_stream.assert_called_once_with(current)
        most = max(most, len(unread))
        copies.note_dropped()
    assert most == ahead
    assert unread == [f"slot {number}" for number in range(8 - ahead, 9)]


def test_an_error_of_a_stateless_stage_names_its_rank_and_stage() -> None:
    calls = count()

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training and next(calls) > 3:
            raise RuntimeError("broken on purpose")
        return x + 0.0

    model = nn.Sequential(nn.Linear(4, 4), Built(forward), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    words, run = r"rank 1.*stage 1.*broken on purpose", pipeline(3, model=model, cuts=(1, 2, 3), microbatches=4)
    with run, pytest.raises(pd.PipelineError, match=words):
        list(run.train(batches()))
