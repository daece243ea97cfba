"""What belongs to no stage is kept, too: in checkpoints, and in state dicts where plain PyTorch has it."""

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import zoo
from built import Built
from cases import make_pipeline, stage_states
from marks import slow
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import plan_of

import pipedream as pd
from pipedream.services.checkpoint import folders, stores, writer


class Scale(nn.Module):
    """Its factor is no parameter; it depends on how often it was called, and is its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.factor = self.factor * 0.9
        return x * self.factor

    def get_extra_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "place": (1, "a")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["place"] == (1, "a")
        self.factor = state["factor"]


GENERATORS: dict[str, tuple[Any, Any]] = {
    "python": (random.Random, random.Random.random),
    "numpy": (np.random.default_rng, np.random.Generator.random),
    "numpy's older": (np.random.RandomState, np.random.RandomState.random),
    "torch": (torch.Generator().manual_seed, lambda generator: float(torch.rand((), generator=generator))),
}
"""Makers of a generator of a seed, and what draws from it."""


def make_model(kind: str = "torch") -> nn.Module:
    """Returns a model that draws from a generator in a container; its unused head is in its state dict only."""
    make, draw = GENERATORS[kind]
    noise = Built(lambda self, x: x * (1 + draw(self.generators[0])), generators=[make(1)])
    layers = {"first": nn.Linear(3, 4), "noise": noise, "scale": Scale(), "last": nn.Linear(4, 1)}
    forward = lambda self, x: self.last(self.scale(self.noise(self.first(x))))  # noqa: E731
    return Built(forward, **layers, unused=nn.Linear(4, 2))


def relative_loss(self: Any, output: Tensor, batch: Any) -> Tensor:
    """Divides by a running size of the loss."""
    loss = (output - batch[1]).square().mean()
    if torch.is_grad_enabled():
        self.size.mul_(0.5).add_(loss.detach(), alpha=0.5)
    return loss / self.size


class Counting(torch.optim.SGD):
    """Its rate depends on a count that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["count"] = self.state.get("count", torch.zeros(())) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / float(self.state["count"])
        super().step(closure)


def train(folder: Path, kind: str, epochs: int, resume: bool) -> tuple[list[float], dict[str, Any]]:
    """Trains in as many stages as there are processes, or two; saves after each epoch."""
    torch.manual_seed(int(resume))
    model = make_model(kind)
    if not resume:
        nn.init.ones_(model.unused.weight)
    inputs = torch.linspace(-1, 1, 60).reshape(20, 3)
    data, losses = TensorDataset(inputs, inputs.sum(1, keepdim=True)), []
    loss, optimizer = Built(relative_loss, size=nn.Buffer(torch.ones(()))), partial(Counting, lr=0.1)
    options = {"optimizer": optimizer, "loss": loss, "weight": lambda batch: len(batch[0]), "schedule": "1f1b"}
    with pd.Pipeline(model, plan_of(model, inputs[:5], (3,)), check=False, **options) as pipeline:
        if resume:
            pipeline.load(folder)
        for done in pipeline.train(DataLoader(data, 5, shuffle=True), epochs=epochs - pipeline.position[0]):
            losses.append(done.loss)
            if done.ends_epoch:
                pipeline.save(folder)
        return losses, pipeline.state_dict()


def check(tmp_path: Path, kind: str, run: Callable[..., Any]) -> None:
    """Compares a run with one that was resumed in the middle."""
    losses, state = run(tmp_path / "whole", kind, 3, False)
    assert set(state) == set(make_model().state_dict()), "a strict load_state_dict takes it"
    assert torch.equal(state["unused.weight"], torch.ones(2, 4))
    make_model().load_state_dict(state)
    run(tmp_path / "part", kind, 1, False)
    rest, resumed = run(tmp_path / "part", kind, 3, True)
    assert rest == losses[len(losses) - len(rest) :]
    factors = [state_dict.pop("scale._extra_state")["factor"] for state_dict in (state, resumed)]
    assert torch.equal(*factors)
    assert factors[0] < 1
    assert all(torch.equal(resumed[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("kind", [kind if kind == "python" else slow(kind) for kind in GENERATORS])
def test_a_resumed_run_continues_to_the_bit(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, train)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
def test_several_processes_do_too(tmp_path: Path) -> None:
    check(tmp_path, "python", lambda *args: processes.team(2).results(train, *args)[0])


def fresh() -> dict[str, Any]:
    return {"rows": [0], "by": {"a": [{"b": 1}]}}


class Diary(pd.callbacks.Callback):
    """Its state, a module's, an optimizer's and a scheduler's are lists and dicts that they go on with."""

    def __init__(self) -> None:
        self.state = fresh()

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


class Remembering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.kept = fresh()

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Listing(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.param_groups[0]["rows"] = [0]
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["kept"] = fresh()


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer: Any) -> None:
        self.kept = fresh()
        super().__init__(optimizer, lambda n: 1.0)


def test_what_changes_during_the_writing_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lists and dicts are those of the call, and so are the weights."""
    may_write, write = threading.Event(), writer.write_tensors

    def write_late(*args: Any) -> Any:
        assert may_write.wait(30)
        return write(*args)

    def make() -> tuple[Remembering, Diary, pd.Pipeline]:
        model, diary = Remembering(), Diary()
        options: dict[str, Any] = {"optimizer": Listing, "scheduler": Scheduler, "callbacks": [diary], "check": False}
        plan = plan_of(model, data[0][0], ())
        return model, diary, pd.Pipeline(model, plan, loss=nn.functional.mse_loss, schedule="1f1b", **options)

    def list_kept(model: Remembering, diary: Diary, pipeline: pd.Pipeline) -> list[dict[str, Any]]:
        optimizer = stage_states(pipeline)[0].optimizer
        of_group = {"rows": optimizer.optimizer.param_groups[0]["rows"], "by": {"a": [{"b": 1}]}}
        of_weights = [state["kept"] for state in optimizer.optimizer.state.values()]
        return [model.kept, diary.state, optimizer.schedule.scheduler.kept, of_group, *of_weights]

    monkeypatch.setattr(writer, "write_tensors", write_late)
    data, extra = [(torch.ones(2, 2), torch.zeros(2, 2)) for _ in range(3)], fresh()
    model, diary, trained = make()
    with trained:
        for done in trained.train(data):
            if done.number == 1:
                trained.save(tmp_path, wait=False, extra=extra)
                weight = model.weight.detach().clone()
                for kept in [extra, *list_kept(model, diary, trained)]:
                    kept["rows"].append(-1)
                    kept["by"]["a"][0]["b"] = kept["by"]["new"] = kept["new"] = -1
        may_write.set()
    model, diary, loaded = make()
    with loaded:
        loaded.load(tmp_path)
        assert [loaded.extra, *list_kept(model, diary, loaded)] == [fresh()] * 7
        assert torch.equal(model.weight, weight)


def test_what_a_callback_adds_while_the_pipeline_drains_is_in_the_checkpoint(tmp_path: Path) -> None:
    class Numbers(pd.callbacks.Callback):
        def on_minibatch(self, pipeline: Any, done: Any) -> None:
            numbers.append(done.number)

    numbers: list[int] = []
    with make_pipeline("mlp", callbacks=[Numbers()]) as trained:
        next(iter(trained.train(zoo.make("mlp").batches)))
        manifest = folders.read_manifest(stores.open_store(trained.save(tmp_path, extra={"numbers": numbers})))
    assert manifest.extra["numbers"] == list(range(manifest.minibatches))
    assert manifest.minibatches > 1
