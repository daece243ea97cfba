"""Modules that keep something from one forward for the next: exact with whole minibatches, refused with parts."""

from collections.abc import Callable
from copy import deepcopy
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from built import Built
from marks import slow
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from training import plan_of

import pipedream as pd

Forward = Callable[[Any, Tensor], Tensor]


def keeps(initial: Any, forward: Forward) -> nn.Module:
    """Returns a module whose forward does something with an attribute, or with what it holds."""
    module = Built(forward, dropout=nn.Dropout(0.5), norm=nn.BatchNorm1d(6))
    if isinstance(initial, str):
        module.register_buffer("carried", None)
    elif initial is not None:
        setattr(module, "inner" if isinstance(initial, nn.Module) else "carried", initial)
    return module


def of_each_sample(module: Any, x: Tensor) -> Tensor:
    old = getattr(module, "carried", None)
    module.carried = x.detach()
    return x if old is None else x + old


def if_it_fits(module: Any, x: Tensor) -> Tensor:
    old = getattr(module, "carried", x)
    module.carried = x.detach()
    return x + old if len(old) == len(x) else x


def kept(read: Callable[[Any], Any], write: Callable[[Any, Tensor], Any]) -> Forward:
    """Returns a forward that reads an attribute, and writes the mean of its input there."""

    def forward(module: Any, x: Tensor) -> Tensor:
        old = read(module.carried)
        write(module.carried, x.detach().mean(0))
        return x + old

    return forward


IN_LIST = kept(lambda items: items[0] if items else 0.0, lambda items, mean: items.append(mean))
IN_OBJECT = kept(lambda item: getattr(item, "last", 0.0), lambda item, mean: setattr(item, "last", mean))
IN_PLACE = kept(torch.clone, Tensor.copy_)


def running(module: Any, x: Tensor) -> Tensor:
    if module.training:
        module.carried = 0.9 * module.carried + 0.1 * x.detach().mean(0)
    return x - module.carried


def counted(module: Any, x: Tensor) -> Tensor:
    module.carried += 1
    return x * (1 - 0.5**module.carried)


def counted_late(module: Any, x: Tensor) -> Tensor:
    module.carried += 1
    return x if module.carried < 4 else x / 2


def in_training(module: Any, x: Tensor) -> Tensor:
    return of_each_sample(module, x) if module.training else x


CARRIED: dict[str, tuple[Callable[[], Any], Forward]] = {
    "of each sample": (lambda: None, of_each_sample),
    "if it fits": (lambda: None, if_it_fits),
    "with dropout": (lambda: None, lambda module, x: in_training(module, module.dropout(x))),
    "list": (list, IN_LIST),
    "dict": (dict, kept(lambda items: items.get("last", 0.0), lambda items, mean: items.update(last=mean))),
    "object": (SimpleNamespace, IN_OBJECT),
    "in place": (lambda: torch.zeros(6).double(), IN_PLACE),
    "counter": (int, counted),
    "late": (int, counted_late),
    "inner module": (nn.Identity, lambda module, x: of_each_sample(module.inner, x)),
    "buffer": (lambda: "buffer", in_training),
    "running buffer": (lambda: nn.Buffer(torch.zeros(6).double()), running),
    "written buffer": (lambda: nn.Buffer(torch.zeros(6).double()), IN_PLACE),
}


def tabled(module: Any, x: Tensor) -> Tensor:
    if not hasattr(module, "carried") or len(module.carried) < x.shape[1]:
        module.carried = torch.arange(x.shape[1], dtype=x.dtype)
    return x + module.carried[: x.shape[1]]


ACCEPTED: dict[str, tuple[Callable[[], Any], Forward]] = {
    "inspected": (lambda: None, lambda module, x: (setattr(module, "carried", x.detach()), x)[1]),
    "logged": (list, lambda module, x: (module.carried.append(float(x.detach().mean())), x)[1]),
    "table of positions": (lambda: None, tabled),
    "counter": (int, lambda module, x: (setattr(module, "carried", module.carried + 1), module.dropout(x))[1]),
    "batch norm": (lambda: None, lambda module, x: module.norm(x)),
    "spectral norm": (lambda: spectral_norm(nn.Linear(6, 6)), lambda module, x: module.inner(x)),
    "generator": (torch.Generator, lambda module, x: x * torch.rand(1, generator=module.carried, dtype=x.dtype)),
}


def make(kind: tuple[Callable[[], Any], Forward]) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), keeps(kind[0](), kind[1]), nn.Linear(6, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(16, 6, generator=draw, dtype=torch.float64), torch.randint(3, (16,), generator=draw)
    return list(zip(x.split(4), y.split(4), strict=True))


def train(
    model: nn.Module, schedule: str, m: int | None, replicas: tuple[int, int] = (1, 1), cut: Any = 2
) -> dict[str, Tensor]:
    plan = plan_of(model, batches()[0][0], (cut,), replicas)
    return training.train(model, plan, batches(), schedule=schedule, microbatches=m).state


METHODS = cycle(["1f1b", "gpipe", "pipedream_2bw", "zb_h1"])


@pytest.mark.parametrize(("kind", "schedule"), [*zip(CARRIED, METHODS, strict=False)])
def test_parts_that_would_read_each_other_are_refused(kind: str, schedule: str) -> None:
    with pytest.raises(pd.PipelineError, match=r"reads what the one before left in .*microbatches=1"):
        train(make(CARRIED[kind]), schedule, 2)


@pytest.mark.parametrize("kind", [k if k in ("dict", "counter") else slow(k) for k in CARRIED if k != "with dropout"])
def test_whole_minibatches_train_as_in_a_plain_loop(kind: str) -> None:
    plain = make(CARRIED[kind])
    training.loop(plain, batches())
    state = train(make(CARRIED[kind]), "1f1b", 1)
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(state[name], weight, rtol=1e-8, atol=1e-10)


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {"n": 0}, lambda box: box.update(n=box["n"] + 1), lambda box: box["n"]),
    "nested list": (lambda: {"a": [[]]}, lambda box: box["a"][0].append(1), lambda box: len(box["a"][0])),
    "object": (lambda: SimpleNamespace(n=0), lambda box: setattr(box, "n", box.n + 1), lambda box: box.n),
    "class": (lambda: type("Own", (), {"n": 0}), lambda box: setattr(box, "n", box.n + 1), lambda box: box.n),
}


class Around(nn.Module):
    """Its forward, which every stage runs, halves its output from the fourth call on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Linear(6, 6), nn.Linear(6, 3), nn.Module()
        make_box, self.write, self.read = HELD[kind]
        self.inner.box = make_box()

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.inner.box)
        x = self.b(self.a(x).tanh())
        return x / 2 if self.read(self.inner.box) > 3 else x


@pytest.mark.parametrize("kind", HELD)
def test_what_a_forward_around_the_cuts_keeps_is_each_stages_own(kind: str) -> None:
    plain, model = (torch.manual_seed(1) and Around(kind).double() for _ in range(2))
    training.loop(plain, batches())
    state = train(model, "1f1b", 1, cut="b")
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_no_output_depends_on_is_accepted(kind: str) -> None:
    train(make(ACCEPTED[kind]), "1f1b", 2)


def test_replicas_refuse_what_each_would_have_for_itself() -> None:
    model = make(CARRIED["of each sample"])
    with pytest.raises(pd.PipelineError, match=r"left in '1.carried', which each replica .*; plan one replica"):
        train(deepcopy(model), "pipedream", None, (2, 1))
    train(model, "pipedream", None, (1, 2))  # it is in the stage with one replica
    for kind in ("inspected", "counter"):
        train(make(ACCEPTED[kind]), "pipedream", None, (2, 1))
