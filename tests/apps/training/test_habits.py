"""Habits of training loops: epochs from 1, losses that count, metrics that write, hooks."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from built import Built
from marks import slow, thinned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset
from training import SGD, loop

import pipedream as pd
from pipedream.services.epochs.watching import watching_epochs

pytestmark = pytest.mark.usefixtures("in_double")
EPOCHS = 3


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def dataset() -> TensorDataset:
    draws = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(24, 6, generator=draws), torch.randint(3, (24,), generator=draws))


def batches() -> list[Any]:
    return list(DataLoader(dataset(), batch_size=8))


def pipeline_of(
    model: nn.Module, schedule: str = "1f1b", microbatches: int | None = 2, loss: Any = F.cross_entropy, **options: Any
) -> pd.Pipeline:
    profile = pd.profile(model, batches()[0][0], warmup=0, runs=1)
    shape: dict[str, Any] = {} if schedule == "roundpipe" else {"shape": (1, 1), "cuts": (2,)}
    microbatches = None if schedule == "pipedream" else microbatches
    plan = pd.plan(profile, pd.Cluster.flat(2), schedule=schedule, microbatches=microbatches, **shape)
    return pd.Pipeline(model, plan, loss=loss, optimizer=SGD, **options)


def train_plainly(loader: Any, begin: Any = id, epochs: int = 1, loss: Any = F.cross_entropy) -> dict[str, Tensor]:
    model = net()
    for epoch in range(epochs):
        begin(epoch)
        state = loop(model, loader, loss=loss).state
    return state


def assert_equal(pipeline: pd.Pipeline, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(pipeline.state_dict()), expected, rtol=0, atol=1e-10)


class Shuffled(Sampler[int]):
    """Shuffles by the epoch."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class InBatches(Shuffled):
    """The same as a batch sampler."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        return iter([indices[first : first + 8] for first in range(0, 24, 8)])


class Counting(Shuffled):
    """Continues with the next epoch by itself."""

    def __iter__(self) -> Iterator[int]:
        yield from list(super().__iter__())
        self.epoch += 1


class Augmented(Dataset[Any]):
    """Its samples depend on the epoch."""

    def __init__(self, holder: Any = None) -> None:
        self.epoch, self.holder, self.data = 0, holder or self, dataset()

    set_epoch = Shuffled.set_epoch  # type: ignore[assignment]
    __len__ = Shuffled.__len__  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + self.holder.epoch, y


class Batches(Shuffled):
    """An iterable that is no DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader([(x + self.epoch, y) for x, y in dataset()], batch_size=8))


def load(data: Any = None, **options: Any) -> Any:
    return DataLoader(data or dataset(), **options or {"batch_size": 8})


LOADERS: dict[str, tuple[Callable[[], Any], str]] = {  # a loader, and its part that is told the epoch
    "sampler": (lambda: load(batch_size=8, sampler=Shuffled()), "sampler"),
    "from -1": (lambda: load(batch_size=8, sampler=Shuffled(-1)), "sampler"),
    "counting": (lambda: load(batch_size=8, sampler=Counting()), "sampler"),
    "batches": (lambda: load(batch_sampler=InBatches()), "batch_sampler"),
    "data set": (lambda: load(Augmented()), "dataset"),
    "iterable": (Batches, "__iter__.__self__"),
    "inner": (lambda: load(Subset(Augmented(Shuffled()), range(24))), "dataset.dataset.holder"),
}
NUMBERS: dict[str, list[int]] = {  # epoch -> the loop's number
    "from 0": [0, 1, 2], "from 1": [1, 2, 3], "tens": [0, 10, 20, 30], "back": [7, 6, 5], "from 5": [5, 6, 7],
}  # fmt: skip


def make_loader(kind: str, number: str) -> tuple[Any, Callable[[int], None], Any]:
    """Returns a loader, a function that sets its epoch by its own number, and its part that has it."""
    make, path = LOADERS[kind]
    loader = make()
    part = attrgetter(path)(loader)
    return loader, lambda epoch: part.set_epoch(NUMBERS[number][epoch]), part


@pytest.mark.parametrize(
    ("kind", "number", "schedule"),
    thinned(product(("sampler", "batches", "from -1"), NUMBERS, ("1f1b", "roundpipe")), 5),
)
def test_epochs_are_those_that_the_loop_sets(kind: str, number: str, schedule: str) -> None:
    expected = train_plainly(*make_loader(kind, number)[:2], EPOCHS)
    loader, begin, _ = make_loader(kind, number)
    with pipeline_of(net(), schedule) as pipeline:
        for epoch in range(EPOCHS):
            begin(epoch)
            list(pipeline.train(loader))
        assert_equal(pipeline, expected)


@pytest.mark.parametrize("number", ["from 0", "from 1", "from 5"])
@pytest.mark.parametrize("sets_again", [True, False])
@pytest.mark.parametrize("stop", thinned([3, 4]))
def test_a_resumed_run_counts_on(number: str, sets_again: bool, stop: int, tmp_path: Path) -> None:
    expected = train_plainly(*make_loader("sampler", number)[:2], EPOCHS)
    loader, begin, _ = make_loader("sampler", number)
    begin(0)
    with pipeline_of(net()) as pipeline:
        for done in pipeline.train(loader, epochs=EPOCHS):
            if done.number == stop - 1:
                pipeline.save(tmp_path)
                break
    loader, begin, _ = make_loader("sampler", number)
    with pipeline_of(net()) as pipeline:
        epoch, _ = pipeline.load(tmp_path)
        if sets_again:
            begin(epoch)
        list(pipeline.train(loader, until_epoch=EPOCHS))
        assert_equal(pipeline, expected)


def test_a_sampler_that_counts_is_not_counted_twice() -> None:
    loader, expected = LOADERS["counting"][0](), train_plainly(LOADERS["counting"][0](), epochs=EPOCHS)
    with pipeline_of(net()) as pipeline:
        for done in pipeline.train(loader):
            if done.number == 1:
                break
        list(pipeline.train(loader, until_epoch=1))
        list(pipeline.train(loader, epochs=EPOCHS - 1))
        assert_equal(pipeline, expected)


class CallAfterEpochs(pd.callbacks.Callback):
    def __init__(self, tell: Callable[[int], object]) -> None:
        self.tell = tell

    def on_minibatch(self, pipeline: Any, done: pd.Done) -> None:
        if done.ends_epoch:
            self.tell(done.epoch + 1)


@pytest.mark.parametrize(
    ("schedule", "when"), [("1f1b", "loop"), ("1f1b", "begin"), ("roundpipe", "callback"), ("pipedream", "loop")]
)
@pytest.mark.parametrize("kind", thinned(kind for kind in LOADERS if kind not in ("from -1", "counting")))
def test_an_epoch_that_is_set_within_a_train_is_followed_or_refused(kind: str, schedule: str, when: str) -> None:
    """By a number that the pipeline cannot foresee: it may have read ahead."""
    loader, tell, part = make_loader(kind, "tens")
    tell(0)
    callbacks, epoch = [CallAfterEpochs(tell)] * (when == "callback"), 0
    is_late = schedule == "pipedream" or when == "begin"
    with pytest.raises(pd.PipelineError, match="comes too late") if is_late else nullcontext():  # noqa: SIM117
        with pipeline_of(net(), schedule, callbacks=callbacks) as pipeline:
            for done in pipeline.train(loader, epochs=EPOCHS):
                if when == "loop" and done.ends_epoch:
                    tell(done.epoch + 1)
                if when == "begin" and done.epoch != epoch:
                    tell(epoch := done.epoch)
            assert_equal(pipeline, train_plainly(*make_loader(kind, "tens")[:2], EPOCHS))
    assert "set_epoch" not in vars(part)


def test_a_data_set_can_be_sent_while_its_epochs_are_watched() -> None:
    data_set = Augmented()
    with watching_epochs(DataLoader(data_set), lambda: (1, 0), lambda: 0, lambda error: error):
        copy = pickle.loads(pickle.dumps(data_set))
        data_set.set_epoch(3)
        copy.set_epoch(5)
    assert (data_set.epoch, copy.epoch) == (3, 5)


def anneal(self: Any, output: Tensor, targets: Tensor) -> Tensor:
    self.calls += 1
    return F.cross_entropy(output, targets) * self.calls / 10


class Annealed:
    """Its share grows with each call."""

    calls = 0
    forward = __call__ = anneal


def _in_closure() -> Callable[..., Tensor]:
    calls = 0

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, targets) * calls / 10

    return loss


def _count(calls: dict[str, int], output: Tensor, targets: Tensor) -> Tensor:
    calls["all"] += 1
    return F.cross_entropy(output, targets) * calls["all"] / 10


COUNTING: dict[str, Callable[[], Any]] = {
    "an object": Annealed,
    "a method": lambda: Annealed().forward,
    "a module": lambda: Built(anneal, calls=0),
    "a buffer": lambda: Built(anneal, calls=nn.Buffer(torch.zeros(()))),
    "nonlocal": _in_closure,
    "an argument": lambda: partial(_count, {"all": 0}),
}
OF_BATCH = {"targets": lambda batch: batch[1]}


@pytest.mark.parametrize("kind", COUNTING)
def test_a_loss_that_counts_its_calls_needs_whole_minibatches(kind: str) -> None:
    expected = train_plainly(batches(), loss=COUNTING[kind]())
    with pytest.raises(pd.PipelineError, match=r"called for each microbatch.*microbatches=1"):  # noqa: SIM117
        with pipeline_of(net(), loss=COUNTING[kind](), **OF_BATCH) as pipeline:
            list(pipeline.train(batches()))
    with pipeline_of(net(), microbatches=1, loss=COUNTING[kind](), **OF_BATCH) as pipeline:
        list(pipeline.train(batches()))
        assert_equal(pipeline, expected)


def _count_for_the_log(calls: list[int], output: Tensor, targets: Tensor) -> Tensor:
    calls[0] += 1
    return F.cross_entropy(output, targets)


def test_a_loss_may_count_for_the_log() -> None:
    with pipeline_of(net(), loss=partial(_count_for_the_log, [0]), **OF_BATCH) as pipeline:
        list(pipeline.train(batches()))
        assert_equal(pipeline, train_plainly(batches()))


def _mask(output: Tensor, targets: Tensor) -> Tensor:
    output[:, 0] = 0
    targets[targets == 1] = 0
    return output.mean() + targets.double().mean()


@pytest.mark.parametrize("schedule", ["1f1b", slow("gpipe"), slow("roundpipe")])
@pytest.mark.parametrize("metric", [lambda output, targets: output.clamp_(0, 0.1).mean(), _mask])
@pytest.mark.parametrize(
    "loss", [F.cross_entropy, lambda output, targets: output.exp().gather(1, targets[:, None]).mean()]
)
def test_a_metric_may_write_into_what_it_gets(loss: Any, metric: Any, schedule: str) -> None:
    expected = train_plainly(batches(), loss=loss)
    options = {} if loss is F.cross_entropy else OF_BATCH
    with pipeline_of(net(), schedule, loss=loss, metrics={"metric": metric}, **options) as pipeline:
        values = [done.metrics["metric"] for done in pipeline.train(batches())]
        assert_equal(pipeline, expected)
    inputs, targets = batches()[0]
    parts = zip(inputs.split(4), targets.split(4), strict=True)
    halves = [metric(net()(half).detach(), part.clone()) for half, part in parts]
    assert values[0] == pytest.approx(float(sum(halves)) / 2)


def _step_at_once(model: nn.Module) -> None:
    optimizers = {parameter: SGD([parameter]) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: optimizers[weight].step())


def _scale(model: nn.Module) -> None:
    model[2].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index, no-untyped-call]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream", "roundpipe"])
@pytest.mark.parametrize("add_hooks", [_step_at_once, _scale])
def test_a_hook_on_a_parameter_is_refused_before_it_is_called(add_hooks: Any, schedule: str) -> None:
    model = net()
    plan = pipeline_of(model, schedule).plan
    add_hooks(model)
    with pytest.raises(pd.PipelineError, match="has a hook, which a pipeline would not call"):
        pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=SGD)
    torch.testing.assert_close(model.state_dict(), net().state_dict(), rtol=0, atol=0)
