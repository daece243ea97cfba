"""Each error names the module, what it did, the user's file and line, and what to do."""

import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from built import Built
from torch import Tensor, nn

import pipedream as pd
from pipedream.capture import capture
from pipedream.capture.slice import ModelSlice
from pipedream.core.errors import CaptureError, PipelineError, PlanError, WorkerError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


class Base(nn.Module):
    """Not a chain, because of its two heads."""

    kinds: tuple[type[nn.Module], ...] = (Block,) * 3
    more: tuple[str, Callable[[], nn.Module]] | None = None
    buffer: tuple[str, tuple[int, ...]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in self.kinds)
        self.head, self.out = nn.Linear(4, 2), nn.Linear(4, 2)
        if self.more:
            self.add_module(self.more[0], self.more[1]())
        if self.buffer:
            self.register_buffer(self.buffer[0], torch.zeros(self.buffer[1]))

    def ends(self, x: Tensor) -> Tensor:
        return self.head(x) + self.out(x)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.ends(x)


def build_model(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05)


def make_plan(model: nn.Module, sample: Any, cuts: Sequence[str]) -> pd.Plan:
    profile = pd.profile(model, sample, warmup=0, runs=1)
    return pd.plan(profile, pd.Cluster.local(len(cuts) + 1), schedule="gpipe", microbatches=2, cuts=tuple(cuts))


def train(
    kind: Callable[[], nn.Module],
    batches: Sequence[Any],
    cuts: Sequence[str] = ("blocks.1.a", "blocks.2.b"),
    *,
    loss: Any = F.mse_loss,
    sample: Any = None,
    **options: Any,
) -> list[float]:
    model = build_model(kind)
    plan = make_plan(model, batches[0][0] if sample is None else sample, cuts)
    with pd.Pipeline(model, plan, loss=loss, optimizer=sgd, **options) as pipeline:
        return [done.loss for done in pipeline.train(batches)]


def run_in_one_process(kind: Callable[[], nn.Module], batches: Sequence[Any]) -> list[float]:
    model = build_model(kind)
    optimizer = sgd(list(model.named_parameters()))
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, target in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            loss = F.mse_loss(model(part), target) * (len(part) / len(x))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(float(total))
    return losses


def make_batches(count: int = 3, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 4), torch.randn(size, 2)) for _ in range(count)]


def catch_text(call: Callable[[], object], kind: type[PipelineError] = WorkerError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def has(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, text


# -- the model's own errors --------------------------------------------------------------------------


class Bug(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if len(x) == 1:
            x = x.view(5, 77)  # a mistake
        return self.ends(self.blocks[2](x))


class BugInModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            x = self.a(x[:, :3])
        return super().forward(x)


class InModule(Base):
    kinds = (Block, BugInModule, Block)


def test_an_error_of_the_model_names_the_line() -> None:
    text = catch_text(lambda: train(Bug, [*make_batches(1), *make_batches(1, size=2)]))
    has(text, "rank 1, stage 1, 1F2: RuntimeError: shape", "in the model Bug, at test_errors.py:")
    has(text, "in forward: x = x.view(5, 77)")


@pytest.mark.slow
def test_an_error_of_a_module_names_module_and_line() -> None:
    text = catch_text(lambda: train(InModule, [*make_batches(1), *make_batches(1, size=2)]))
    has(text, "mat1 and mat2", "in the module 'blocks.1.a'", "in forward: x = self.a(x[:, :3])")


def test_a_sample_that_does_not_run_names_the_line() -> None:
    text = catch_text(lambda: capture(build_model(Bug), torch.randn(1, 4)), CaptureError)
    has(text, "the forward of Bug should run", "x = x.view(5, 77)", "give a sample")


def test_an_error_of_the_loss_names_the_line() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.mean() + batch[1].view(77)

    text = catch_text(lambda: train(Base, make_batches(1), loss=loss))
    has(text, "stage 2", "in loss: return output.mean() + batch[1].view(77)")


# -- another path ------------------------------------------------------------------------------------


class ByLength(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if len(x) > 1:
            x = self.blocks[1](x)
        return self.ends(self.blocks[2](x))


class ByMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.training:
            x = self.blocks[1](x)
        return self.ends(self.blocks[2](x))


class Drops(Base):
    """Leaves out a block now and then, as LayerDrop does."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.5:
                x = block(x)
        return self.ends(x)


@pytest.mark.parametrize("cut", ["blocks.1.a", pytest.param("blocks.1.b", marks=pytest.mark.slow)])
def test_another_path_is_an_error(cut: str) -> None:
    text = catch_text(lambda: train(ByLength, [*make_batches(1), *make_batches(1, size=2)], [cut]))
    has(text, "the forward of ", "(test_errors.py:", "took another path", f"without calling {cut!r}", "one module")


def test_a_call_that_one_mode_lacks_is_no_cut() -> None:
    captured = capture(build_model(ByMode), torch.randn(4, 4))
    assert "blocks.1.a" not in [layer.name for layer in captured.graph.layers]
    has(captured.refused["blocks.1.a"], "took another path", "ByMode", "on the mode (training or evaluation)")


def test_layers_that_are_dropped_are_refused_or_an_error() -> None:
    captured = capture(build_model(Drops), torch.randn(4, 4))
    part = [ModelSlice(captured.model, captured.graph, i, i + 1) for i in range(len(captured.graph.layers))]
    for seed in range(8):
        torch.manual_seed(seed)
        value: Any = torch.randn(4, 4)
        try:
            for layer in part:
                torch.manual_seed(seed)
                value = layer(value)
        except CaptureError as error:
            has(str(error), "another path")


class NeedsNumbers(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if len(x) == 1 and x.sum() > 0:
            x = -x
        return self.ends(self.blocks[2](self.blocks[1](x)))


def test_numbers_of_another_stage() -> None:
    text = catch_text(lambda: train(NeedsNumbers, [*make_batches(1), *make_batches(1, size=2)]))
    has(text, "rank 1, stage 1", "in forward: if len(x) == 1 and x.sum() > 0", "needs the numbers", "one module")


class Scores(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        x = x * F.scaled_dot_product_attention(y.float(), y.float(), y).sum(-1, keepdim=True)
        return self.out(self.blocks[1](self.blocks[0](x)))


def test_what_fails_without_needing_numbers_is_no_fault_of_the_model() -> None:
    """Here because the second stage runs without autocast."""
    model, batch = Scores(), torch.randn(2, 4)
    graph = capture(model, batch).graph
    with torch.autocast("cpu", torch.bfloat16):
        value = ModelSlice(model, graph, 0, 1)(batch)
    with pytest.raises(CaptureError) as caught:
        ModelSlice(model, graph, 1, 2)(value)
    has(
        str(caught.value), "y.float(), y)", "same dtype", "begins with 'blocks.0", "that line is right", "cut elsewhere"
    )
    assert "one module" not in str(caught.value)


class Catches(Base):
    """Has another way for tensors without numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        try:
            scale = float(x.mean())
        except Exception:
            scale = 1.0
        return self.ends(self.blocks[2](self.blocks[1](x * scale)))


def test_a_model_that_catches_the_lack_of_numbers_is_not_misled() -> None:
    # It takes another path for a part than for the whole.
    losses = train(Catches, make_batches(), check=False)
    assert losses == pytest.approx(run_in_one_process(Catches, make_batches()))


# -- inputs ------------------------------------------------------------------------------------------


class Masked(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if mask is not None:
                x = x * mask
        return self.ends(x) * scale


def masked(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.mean()

    return catch_text(lambda: train(Masked, [first, second], loss=loss, sample=first))


X = torch.linspace(-1, 1, 16).view(4, 4)


def test_a_missing_input() -> None:
    text = masked({"x": X, "mask": X}, {"x": X})
    has(text, "Masked (test_errors.py:", "reads the input 'mask'", "missing in this batch", "Give it in each batch")


def with_labels() -> nn.Module:
    """Computes its loss if it gets labels."""

    def forward(model: Any, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        for block in model.blocks:
            x = torch.tanh(block(x))
        return {"loss": None if labels is None else (x - labels).square().mean(), "x": x}

    return Built(forward, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))


@pytest.mark.parametrize("without", [{"x": X}, {"x": X, "labels": None}], ids=["missing", "None"])
def test_a_model_predicts_without_labels(without: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = with_labels()
    profile = pd.profile(model, {"x": X, "labels": X}, runs=1)
    plan = pd.plan(profile, pd.Cluster.flat(3), shape="straight", schedule="1f1b")
    expected = model(X)["x"].detach()
    with pd.Pipeline(model, plan, loss=None, optimizer=sgd) as pipeline:
        (output,) = pipeline.predict([without])
        assert output["loss"] is None
        torch.testing.assert_close(output["x"], expected)
        list(pipeline.train([{"x": X, "labels": X}]))
        assert list(pipeline.evaluate([{"x": X, "labels": X}])) == ["loss"]


@pytest.mark.slow
def test_an_input_that_is_none_now() -> None:
    text = masked({"x": X, "mask": X}, {"x": X, "mask": None})
    has(text, "reads the input 'mask'", "but it is None in this batch")


def test_an_input_that_the_sample_lacked() -> None:
    text = masked({"x": X}, {"x": X, "mask": X})
    has(
        text,
        "in the forward of Masked (test_errors.py:",
        "the call of 'blocks.1' has another tensor than 'blocks.0 output'",
        "The sample lacked the input 'mask'",
    )


def test_an_input_that_the_model_does_not_know() -> None:
    has(masked({"x": X}, {"x": X, "y": X}), "unexpected keyword argument 'y'", "in the model Masked, test_errors.py:")


# -- outputs -----------------------------------------------------------------------------------------


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxing(Block):
    def forward(self, x: Any) -> Any:
        return Box(super().forward(x.value if isinstance(x, Box) else x))


class Boxes(Base):
    kinds = (Boxing,) * 3

    def ends(self, x: Any) -> Tensor:
        return super().ends(x.value)


def box_leaf() -> nn.Module:
    return Built(lambda leaf, x: Box(x * leaf.weight), weight=nn.Parameter(torch.ones(4)))


class BoxOfLeaf(Base):
    more = ("leaf", box_leaf)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.leaf(x).value)


class Hidden(Base):
    """Returns the states of its blocks where nothing can find them."""

    def forward(self, x: Tensor) -> Any:
        states = [x := block(x) for block in self.blocks]
        return {"out": self.ends(x), "box": Box(states[0])}


class SometimesMore(Base):
    def forward(self, x: Tensor) -> Any:
        states = [x := block(x) for block in self.blocks]
        out = self.ends(x)
        return {"out": out, "first": states[0]} if len(x) == 1 else {"out": out}


def test_an_object_that_a_block_returns_is_seen_through() -> None:
    assert train(Boxes, make_batches()) == pytest.approx(run_in_one_process(Boxes, make_batches()))


def test_an_object_that_a_leaf_returns_cannot_travel() -> None:
    captured = capture(build_model(BoxOfLeaf), torch.randn(4, 4))
    text = captured.refused["blocks.0.a"]
    has(
        text,
        "the module 'leaf' (Built, built.py:",
        "returns an object of the class Box, which cannot be sent",
        "tuple",
    )


def test_an_output_inside_an_object_is_not_silently_wrong() -> None:
    def loss(output: Any, batch: Any) -> Tensor:
        return output["box"].value.mean()

    text = catch_text(lambda: train(Hidden, make_batches(1), loss=loss))
    has(text, "stage 2", "the loss or a metric needs the numbers of a tensor", "let the model return it in its output")


@pytest.mark.parametrize(
    "read",
    [
        lambda first: first.mean(),
        pytest.param(lambda first: F.mse_loss(first, first), marks=pytest.mark.slow),
        pytest.param(lambda first: first.tolist(), marks=pytest.mark.slow),
    ],
)
def test_an_output_that_no_stage_sends(read: Callable[[Tensor], Any]) -> None:
    def loss(output: Any, batch: Any) -> Tensor:
        if "first" in output:
            read(output["first"])
        return output["out"].mean()

    text = catch_text(lambda: train(SometimesMore, [*make_batches(1), *make_batches(1, size=2)], loss=loss))
    has(text, "the field 'first' of the output of SometimesMore (test_errors.py:", "Capture with a sample", "used at")


# -- leaving the forward -----------------------------------------------------------------------------


class Bare(Base):
    def forward(self, x: Tensor) -> Tensor:
        try:
            for block in self.blocks:
                x = block(x)
            x = self.ends(x)
        except:  # noqa: E722
            x = x[:, :2]
        return x


class Finally(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            finally:
                continue  # noqa: B012
        return self.ends(x)


class Generator(Base):
    def states(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x

    def forward(self, x: Tensor) -> Tensor:
        for state in self.states(x):
            x = state
        return self.ends(x)


class Suppresses(Base):
    @contextmanager
    def quietly(self) -> Iterator[None]:
        with suppress(BaseException):
            yield

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with self.quietly():
                x = block(x)
        return self.ends(x)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 77:
            raise NotImplementedError
        return self.inner(x)


class Tolerant(Base):
    """Continues after a call that failed."""

    more = ("fails", Fails)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = self.fails(x)
            except NotImplementedError:
                x = block(x)
        return self.ends(x)


class Threads(Base):
    def forward(self, x: Tensor) -> Tensor:
        states = [x]

        def run() -> None:
            for block in self.blocks:
                states.append(block(states[-1]))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return self.ends(states[-1])


class OwnCall(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2) + 1


class WithoutForward(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


class OwnCalls(Base):
    kinds = (OwnCall, WithoutForward, OwnCall)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2)


def test_a_forward_that_catches_everything_is_refused_with_the_remedy() -> None:
    captured = capture(build_model(Bare), torch.randn(4, 4))
    assert [layer.name for layer in captured.graph.layers] == ["blocks.0.a"]
    has(captured.refused["blocks.1.b"], "bare `except:`", "Write `except Exception:` there")


@pytest.mark.parametrize(
    "kind",
    [
        Finally,
        Generator,
        OwnCalls,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Suppresses, Tolerant, Threads)),
    ],
)
def test_unusual_forwards_train_as_in_one_process(kind: type[nn.Module]) -> None:
    graph = capture(build_model(kind), torch.randn(4, 4)).graph
    cuts = [layer.name for layer in graph.layers[1:]][-2:]
    assert train(kind, make_batches(), cuts) == pytest.approx(run_in_one_process(kind, make_batches()))


def test_a_thread_of_its_own_is_one_layer() -> None:
    captured = capture(build_model(Threads), torch.randn(4, 4))
    assert [layer.name for layer in captured.graph.layers] == ["blocks.0", "head", "out"]
    has(captured.refused["blocks.1"], "thread")


# -- gradients, wrappers, plans ----------------------------------------------------------------------


def test_a_plan_of_another_model() -> None:
    class Other(Base):
        more = ("extra", partial(nn.Linear, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.extra(x))

    for planned, model, words in (
        (Base, Other, r"another model: Other has 'extra\.(bias|weight)', .*plan again"),
        (Other, Base, r"another model: it has a module 'extra', which Base lacks; plan again"),
    ):
        plan = make_plan(build_model(planned), X, ["blocks.1.a"])
        with pytest.raises(PlanError, match=words):
            pd.Pipeline(model(), plan, loss=F.mse_loss, optimizer=sgd)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_models_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"the model .* is a TorchScript module .*; pass the eager module"):
        capture(torch.jit.script(nn.Linear(4, 2)), X)


def test_distributed_models_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"DataParallel.*pass the plain module"):
        capture(nn.DataParallel(Base()), X)
    model = Base()
    wrapped = type("FSDPBlock", (type("FSDPModule", (), {}), Block), {})
    model.blocks[1].__class__ = wrapped
    with pytest.raises(CaptureError, match=r"the module 'blocks\.1' is sharded by fully_shard.*pass the plain"):
        capture(model, X)


# -- state that a forward keeps on its modules ----------------------------------------------------------


class Memory(Base):
    """Adds the mean of the batch before, kept in the glue between two blocks."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.memory is not None:
            x = x + self.memory.mean()
        self.memory = x.detach()
        return self.ends(self.blocks[2](self.blocks[1](x)))


class LongMemory(Base):
    """Reads what it has kept before it keeps the next, and uses it at the end."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.memory
        x = self.blocks[0](x)
        self.memory = x.detach()
        x = self.blocks[2](self.blocks[1](x))
        return self.ends(x if before is None else x + before.mean())


class Counts(Base):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) / self.count


class CountsInBuffer(Base):
    buffer = ("steps", ())

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)


class MovingMean(Base):
    buffer = ("mean", (4,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = self.blocks[2](self.blocks[1](x))
        return self.head(x - self.mean) + self.out(x)


class Scaled(Base):
    """Changes a buffer in place that a backward reads."""

    buffer = ("steps", ())

    def ends(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().ends(x) * self.steps


def test_a_buffer_that_is_changed_before_the_backward_reads_it() -> None:
    text = catch_text(lambda: train(Scaled, make_batches()))
    has(text, "stage 2, 2B0", "modified by an inplace operation", "self.steps = self.steps + 1")


@pytest.mark.parametrize(
    "kind",
    [
        Memory,
        Counts,
        MovingMean,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (LongMemory, CountsInBuffer)),
    ],
)
def test_state_between_batches_is_that_of_one_process(kind: type[nn.Module]) -> None:
    model = build_model(kind)
    names = [layer.name for layer in capture(model, torch.randn(4, 4)).graph.layers]
    assert not getattr(model, "count", 0)
    assert getattr(model, "memory", None) is None
    if kind in (Memory, LongMemory, Counts):
        text = catch_text(lambda: train(kind, make_batches(), names[-2:]))
        has(text, "left in", "and a minibatch has 2 microbatches; train with microbatches=1")
    losses = train(kind, make_batches(), names[-2:], check=kind not in (Memory, LongMemory, Counts))
    assert losses == pytest.approx(run_in_one_process(kind, make_batches())), "which loops over microbatches"


def test_what_the_last_stage_sets_is_there_for_the_loss() -> None:
    class Kept(Base):
        state: Tensor

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            self.state = x
            return self.ends(x)

    model = build_model(Kept)
    graph = capture(model, X).graph
    first, last = ModelSlice(model, graph, 0, 4), ModelSlice(model, graph, 4, len(graph.layers))
    bundle = first(X)
    assert not hasattr(model, "state")
    last(bundle)
    torch.testing.assert_close(build_model(Kept)(X), model.ends(model.state))
    first(X)
    assert not hasattr(model, "state")


def test_a_cut_through_the_use_of_kept_state_is_refused() -> None:
    captured = capture(build_model(LongMemory), torch.randn(4, 4))
    assert "blocks.1.b" not in [layer.name for layer in captured.graph.layers]
    has(captured.refused["blocks.1.b"], "LongMemory (test_errors.py:", "keeps a tensor of an earlier batch", "into one")


def extra() -> nn.Module:
    """Uses a module only where it is asked to."""

    def forward(model: Any, x: Tensor, more: bool = False) -> Tensor:
        x = model.b(model.a(x).tanh())
        x = model.extra(x.relu()) if more else x
        return model.head(x.tanh())

    return Built(forward, **{name: nn.Linear(4, 4) for name in ("a", "b", "extra", "head")})


def test_a_module_that_the_sample_did_not_call_is_not_left_untrained() -> None:
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    profile = pd.profile(extra(), {"x": x}, runs=1)

    def moved(cut: str) -> bool:
        model = extra()
        plan = pd.plan(profile, pd.Cluster.local(2), schedule="1f1b", microbatches=1, cuts=(cut,))
        with pd.Pipeline(model, plan, loss=lambda out, batch: F.cross_entropy(out, y), optimizer=sgd) as pipeline:
            before = model.extra.weight.detach().clone()
            list(pipeline.train([{"x": x, "more": True}]))
            return not torch.equal(pipeline.state_dict()["extra.weight"], before)

    assert moved("head"), "its parameters belong to the first stage, which calls it"
    with pytest.raises(WorkerError, match="depends on a tensor that another stage has and does not send"):
        moved("b")


def test_python_and_numpy_numbers_are_the_same_on_all_stages() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        share = random.random() + float(np.random.rand()) + torch.rand(1).item()
        return model.head(model.extra(model.a(x) * share)) * share

    mixes = Built(forward, **{name: nn.Linear(4, 4) for name in ("a", "extra", "head")})
    state = random.getstate()
    graph = capture(mixes, torch.randn(2, 4)).graph
    assert graph.draws_in_python
    assert [layer.name for layer in graph.layers] == ["a", "extra", "head"]
    assert random.getstate() == state, "the user's generator is left as it was"


def casts_back() -> nn.Module:
    """Undoes what autocast has done between two layers, as the experts of T5's kin."""

    def forward(model: Any, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = torch.tanh(model.first(x))
        x = model.last(x.to(model.last.weight.dtype))
        return {"loss": None if labels is None else (x - labels).square().mean(), "x": x}

    return Built(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 4))


def test_other_inputs_where_a_cast_is_undone() -> None:
    torch.manual_seed(3)
    model, sample = casts_back(), {"x": X, "labels": X}
    profile = pd.profile(model, sample, runs=1, autocast=torch.bfloat16)
    plan = pd.plan(profile, pd.Cluster.flat(2), cuts=("last",), schedule="1f1b")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(X)["x"].detach()
    with pd.Pipeline(model, plan, loss=None, optimizer=sgd, autocast=torch.bfloat16) as pipeline:
        (output,) = pipeline.predict([{"x": X}])
        assert torch.equal(output["x"], expected)
        list(pipeline.train([sample]))


class _Reversible(torch.autograd.Function):
    """Its backward reads what the forward has set on a module, as Reformer's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module, module.factor = module, 2.0
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * float(ctx.module.factor), None


def test_a_backward_that_reads_what_the_forward_has_set() -> None:
    parts = {"factor": None, "first": nn.Linear(4, 4), "last": nn.Linear(4, 4)}
    model = Built(lambda model, x: torch.tanh(model.last(_Reversible.apply(model.first(x), model))), **parts)
    text = catch_text(lambda: capture(model, X), CaptureError)
    has(text, "the backward of Built raised TypeError", "read what the forward has set on a module", "context")


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda layer, x: torch.func.vmap(lambda row: layer(row).tanh())(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1],
    "grad": lambda layer, x: torch.func.grad(lambda y: layer(y).square().sum())(x),
}


def transforming(name: str, *, apart: bool) -> nn.Module:
    """Calls torch.func in its own forward, or in that of a module around it."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.before(x).tanh()
        return model.after(model.inner(x) if apart else TRANSFORMS[name](model.inner, x))

    inner = transform(name) if apart else nn.Linear(4, 4)
    return Built(forward, before=nn.Linear(4, 4), inner=inner, after=nn.Linear(4, 4))


def transform(name: str) -> nn.Module:
    return Built(lambda module, x: TRANSFORMS[name](module.layer, x), layer=nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp calls it
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_torch_func_in_the_models_own_forward_is_named(name: str) -> None:
    refused = capture(transforming(name, apart=False), (torch.randn(8, 4),)).refused["after"]
    assert re.match(r"test_errors\.py:\d+ in .*torch\.func\..* is inside a torch\.func transform", refused)
    for words in ("a stage that begins with 'after' would run again", "cut elsewhere than before 'after'"):
        assert words in refused
    apart = capture(transforming(name, apart=True), (torch.randn(8, 4),))
    assert [layer.name for layer in apart.graph.layers] == ["before", "inner", "after"], "the advice helps"
