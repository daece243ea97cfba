"""What a forward does beside its calls: writes into its input, hooks on tensors, derivatives, moved buffers, parameters
that are looked at or not used. Each trains as a plain loop does, or is refused with words that help."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import processes
import pytest
import torch
from marks import slow, spread, thinned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import SGD, loop

import pipedream as pd

pytestmark = pytest.mark.usefixtures("in_double")
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Five layers, to which a case's forward is given."""

    def __init__(self, forward: Forward | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.d, self.e = nn.Linear(8, 8), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("codes", torch.zeros(8))
        self.function = forward or Net.plain

    def rest(self, h: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(h)))

    def plain(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.d(torch.tanh(self.b(torch.tanh(self.a(x)))))))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def make(forward: Forward | None = None) -> Net:
    torch.manual_seed(1)
    return Net(forward)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(2)]


def plan_of(model: nn.Module, cut: str | None = None, schedule: str = "1f1b", **options: Any) -> pd.Plan:
    profile = pd.profile(model, batches()[0][0], warmup=0, runs=1)
    shape = options.pop("shape", (1,) if cut is None else (1, 1))
    options = {"microbatches": 2, "cuts": cut and (cut,), **options}
    options |= {} if shape is None else {"shape": shape}
    return pd.plan(profile, pd.Cluster.flat(sum(shape or (1, 1))), schedule=schedule, **options)


assert_close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-10)


def train(model: nn.Module, plan: pd.Plan, optimizer: Any = SGD) -> dict[str, Tensor]:
    with pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=optimizer) as pipeline:
        list(pipeline.train(batches()))
        pipeline.evaluate(batches())
        return {name: tensor.detach().clone() for name, tensor in pipeline.state_dict().items()}


def check(make_net: Any, cut: str | None = None, optimizer: Any = SGD, *, microbatches: int = 2, **how: Any) -> None:
    """Checks that a model trains in a pipeline as in a plain loop."""
    model = make_net()
    actual = train(model, plan_of(model, cut, microbatches=microbatches, **how), optimizer)
    assert_close(actual, loop(make_net(), batches(), parts=microbatches, optimizer=optimizer).state)


# -- an input that is written, and read later ---------------------------------------------------------------

WRITES: dict[str, Forward] = {
    "scaled": lambda net, x: (raw := x.clone(), x.mul_(0.1), net.plain(x) + net.e(raw))[-1],
    "view": lambda net, x: (raw := x.clone(), x.view(-1, 2, 3).mul_(0.5), net.plain(x) + net.e(raw) + net.e(x))[-1],
    "item": lambda net, x: (x.__setitem__((slice(None), 0), x[:, 0].mul_(3)), net.plain(x) + net.e(x))[-1],
    "relu": lambda net, x: (raw := x.clone(), F.relu(x, inplace=True), net.plain(x) + net.e(raw))[-1],
    "out": lambda net, x: (raw := x.clone(), torch.mul(x, 0.1, out=x), net.plain(x) + net.e(x) * raw.mean(1, True))[-1],
    "late": lambda net, x: (output := net.plain(x * 1.0), x.mul_(2.0), output + net.e(x))[-1],
    "by weight": lambda net, x: (raw := x.clone(), x.mul_(net.a.weight.mean()), net.plain(x) + net.e(raw))[-1],
    "view by weight": lambda net, x: (
        free := x * 1.0,
        free[:, :2].mul_(net.a.weight.mean()),
        net.plain(free) + net.e(free) + net.e(x),
    )[-1],
    "item of layer": lambda net, x: (
        raw := x.clone(),
        x.__setitem__((slice(None), 0), net.a(x.clone())[:, 0]),
        net.plain(x) + net.e(x) + net.e(raw),
    )[-1],
}


# -- hooks on tensors --------------------------------------------------------------------------------------


def _reverse(gradient: Tensor) -> Tensor:
    return -0.5 * gradient


def _on(tensor: Tensor, hook: Callable[[Tensor], Any] = _reverse) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


HOOKS: dict[str, Forward] = {
    "glue": lambda net, x: (h := _on(torch.tanh(net.a(x))), net.c(torch.tanh(net.d(torch.tanh(net.b(h)))) + h))[-1],
    "output": lambda net, x: (h := _on(net.a(x)), net.c(_on(torch.tanh(net.b(h))) + net.d(h)))[-1],
    "two": lambda net, x: net.rest(_on(_on(torch.tanh(net.a(x))), lambda gradient: gradient * 3)),
    "observing": lambda net, x: net.rest(_on(torch.tanh(net.a(x)), partial(setattr, net, "gradient"))),
    "retained": lambda net, x: (h := net.a(x).tanh(), h.requires_grad and h.retain_grad(), net.c(_on(net.b(h))))[-1],
    "node": lambda net, x: (h := net.a(x), h.grad_fn and h.grad_fn.register_prehook(lambda g: (-g[0],)), net.rest(h))[
        -1
    ],
    "written": lambda net, x: (h := _on(net.a(x)), h.mul_(3), net.c(_on(net.b(h)).tanh_()))[-1],
}


def test_a_hook_that_depends_on_microbatches_needs_one() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.rest(_on(torch.tanh(net.a(x)), lambda gradient: gradient.clamp(-0.001, 0.001)))

    check(partial(make, forward), "b", microbatches=1)
    plan_of(make(lambda net, x: (h := net.a(x), h.grad_fn.register_hook(lambda *_: None), net.rest(h))[-1]))
    with pytest.raises(pd.PipelineError, match=r"a hook on a tensor .*microbatches=1"):
        check(partial(make, forward), "b")


def _hook_removed(net: Net, x: Tensor) -> Tensor:
    h = torch.tanh(net.a(x))
    handle = h.register_hook(_reverse) if h.requires_grad else None
    output = net.rest(h)
    if handle is not None:
        handle.remove()
    return output


def _hook_after_use(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    output = net.c(torch.tanh(net.b(h)) + h)
    _on(h)
    return output


def _hook_on_unread(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(torch.tanh(net.b(h)) + _on(h))


@pytest.mark.parametrize("forward", [_hook_removed, _hook_after_use, _hook_on_unread])
def test_no_stage_ends_between_a_tensors_use_and_its_hook(forward: Forward) -> None:
    refused = pd.capture(make(forward), batches()[0][0]).refused
    if forward is _hook_on_unread:  # on any later stage
        assert not refused
        return
    assert "a hook on a tensor" in refused["c"]
    check(partial(make, forward))


# -- weights that no layer reads ---------------------------------------------------------------------------


UNUSED: dict[str, Callable[[], Any]] = {
    "layer": lambda: nn.Linear(4, 4),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "norm": lambda: nn.BatchNorm1d(4),
    "inside": lambda: nn.Linear(2, 2),
    "tied": lambda: nn.Linear(8, 8),
}


@pytest.mark.parametrize("kind", thinned(UNUSED))
@pytest.mark.parametrize("optimizer", thinned([SGD, ADAMW]))
def test_roundpipe_leaves_weights_alone_that_no_layer_reads(kind: str, optimizer: Any) -> None:
    def make_unused() -> Net:
        net = make(WRITES["item"])
        (net.d if kind == "inside" else net).unused = unused = UNUSED[kind]()
        if kind == "tied":
            unused.weight = net.b.weight
        return net

    check(make_unused, None, optimizer, schedule="roundpipe", shape=None)


# -- weights that the forward writes -----------------------------------------------------------------------


def _write_once(net: Net, h: Tensor) -> None:
    """Initialises a weight by the first samples, as ActNorm does."""
    if not net.codes.any():
        net.scale.data.copy_(1 / h.std(0))
        net.codes.fill_(1)


def _follow(net: Net, h: Tensor) -> None:
    """Lets a frozen weight follow a trained one, equal at first, as a momentum encoder does."""
    net.average.data = 0.9 * net.average.data + 0.1 * net.scale.data


SAME_AGAIN: dict[str, Callable[[Net, Tensor], object]] = {
    "clamped": lambda net, _: net.scale.clamp_(max=0.9),
    "once": _write_once,
    "clamped, through data": lambda net, _: net.scale.data.clamp_(max=0.9),
}
ANEW: dict[str, Callable[[Net, Tensor], object]] = {
    "followed": _follow,
    "moved": lambda net, h: net.average.mul_(0.9).add_(h.mean(0), alpha=0.1),  # as the rows of a codebook
    "decayed": lambda net, _: net.scale.mul_(0.99),
    "decayed, through data": lambda net, _: net.scale.data.mul_(0.99),
}


def _written(kind: str) -> Net:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = torch.tanh(net.a(x))
        if net.training:
            with torch.no_grad():
                (SAME_AGAIN | ANEW)[kind](net, h.detach())
        h = h * net.scale.clone() + net.average.clone().detach()
        return net.c(torch.tanh(net.d(torch.tanh(net.b(h)))))

    net = make(forward)
    net.scale, net.average = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8), requires_grad=False)
    return net


@pytest.mark.parametrize("kind", thinned([*SAME_AGAIN, *ANEW], 7))
def test_weights_that_a_forward_writes_are_not_written_twice(kind: str) -> None:
    refused, net = partial(pytest.raises, pd.PipelineError), partial(_written, kind)
    check(net, microbatches=1)  # what was profiled is what is trained
    with nullcontext() if kind.startswith("clamped") else refused(match=r"writes the weight .*microbatches=1"):
        check(net)
    with nullcontext() if kind in SAME_AGAIN else refused(match=r"each forward of Net writes .*recompute='never'"):
        check(net, recompute="always", microbatches=1)
    with refused(match=r"the forward writes the weight '(scale|average)'"):  # which copies would lose
        check(net, schedule="roundpipe", shape=None)


# -- moved buffers, derivatives, checkpoints ---------------------------------------------------------------


def _moved(net: Net, x: Tensor, *, in_place: bool) -> Tensor:
    h = torch.tanh(net.a(x))
    if net.training and in_place:
        net.codes.mul_(0.9).add_(0.1 * h.detach().mean(0))
    elif net.training:
        net.codes = 0.9 * net.codes + 0.1 * h.detach().mean(0)
    return net.rest(h - net.codes)


@pytest.mark.parametrize("in_place", thinned([True, False]))
@pytest.mark.parametrize(
    ("schedule", "cut", "shape"), [("1f1b", None, (2,)), ("gpipe", "b", (2, 1)), ("pipedream_2bw", None, (2,))]
)
def test_a_buffer_that_parts_write_is_blamed(in_place: bool, schedule: str, cut: str | None, shape: Any) -> None:
    forward = partial(_moved, in_place=in_place)
    with pytest.raises(pd.PipelineError, match="before left in 'codes', and a minibatch has 2"):
        check(partial(make, forward), cut, schedule=schedule, shape=shape)
    check(partial(make, forward), "b", microbatches=1)


def test_a_sparse_buffer() -> None:
    links = nn.Buffer(torch.eye(8).roll(1).to_sparse(), persistent=False)
    net = lambda: vars(n := make(lambda n, x: n.c((n.links @ n.b(n.a(x)).T).T)))["_buffers"].update(links=links) or n  # noqa: E731
    check(net, "b")
    check(net, "b", recompute="always")


def _forces(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(net.plain(x).sum(), x, create_graph=True)
    return forces[:, :3]


def _backward_inside(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        torch.tanh(net.b(torch.tanh(net.a(y)))).sum().backward(inputs=[y])
    return net.plain(x) + y.grad[:, :3]  # type: ignore[index]


@pytest.mark.parametrize("forward", [_forces, _backward_inside])
def test_a_derivative_in_the_forward_needs_a_graph(forward: Forward) -> None:
    check(partial(make, forward))
    with pytest.raises(pd.PipelineError, match="recompute='never'"):
        check(partial(make, forward), recompute="always")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_writes_a_buffer_twice_is_refused(reentrant: bool) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = checkpoint(lambda t: net.norm(net.b(t)), torch.tanh(net.a(x)), use_reentrant=reentrant)
        return net.c(torch.tanh(net.d(h)))

    with pytest.raises(pd.PipelineError, match=r"a checkpoint writes it again .*recompute='always'"):
        plan_of(make(forward))


# -- parameters that are looked at -------------------------------------------------------------------------


def _look_at_first(net: Net, x: Tensor) -> Tensor:
    h = torch.tanh(net.b(torch.tanh(net.a(x))))
    first = next(net.parameters())
    mask = torch.ones(8, device=first.device, dtype=first.dtype)
    return net.c(h.to(first.device, first.dtype) * mask)


def _look_at_all(net: Net, x: Tensor) -> Tensor:
    h = torch.tanh(net.b(torch.tanh(net.a(x))))
    h = h * (sum(parameter.numel() for parameter in net.parameters()) / 200)
    return net.c(h.to(next(net.parameters())))


LOOKS: dict[str, Forward] = {
    "first": _look_at_first,
    "all": _look_at_all,
    "penalised": lambda net, x: net.plain(x) + 0.01 * sum(parameter.square().sum() for parameter in net.parameters()),
}


# -- all of them as a plain loop -----------------------------------------------------------------------------


METHODS = ({"schedule": "gpipe"}, {"schedule": "zb_h1"}, {"recompute": "always"}, {"shape": (2, 1)})


FORWARDS = WRITES | {f"hook on {name}": forward for name, forward in HOOKS.items()} | LOOKS


@pytest.mark.parametrize(
    ("name", "cut", "options"),
    spread(
        [
            *thinned([(name, cut, {}) for name in WRITES for cut in (None, "b", "e")], 4),
            *thinned([(f"hook on {name}", cut, {}) for name in HOOKS for cut in ("b", "c")], 3),
            *((name, "b", {}) for name in LOOKS),
            *(slow(name, "b", options) for name in FORWARDS if name not in LOOKS for options in METHODS),
        ],
        3,
    ),
)
def test_it_trains_as_in_a_plain_loop(name: str, cut: str | None, options: dict[str, Any]) -> None:
    """Hooks act where the tensor is, and parameters may be looked at on any stage."""
    forward = FORWARDS[name]
    check(partial(make, forward), cut, **options)
    if forward in (_look_at_first, _look_at_all):
        assert "a.weight" in pd.capture(make(forward), batches()[0][0]).graph.glue, "a placeholder on other stages"


def _train_on_two() -> None:
    torch.set_default_dtype(torch.float64)
    for forward in LOOKS.values():
        model = make(forward)
        plan = plan_of(model, "b")
        state = train(model, plan)
        if torch.distributed.get_rank() == 0:
            assert_close(state, loop(make(forward), batches(), parts=2).state)
    with pytest.raises(pd.PipelineError, match="build the model again"):
        train(model, plan)


@pytest.mark.slow
@pytest.mark.processes
def test_parameters_are_looked_at_on_two_processes_and_a_second_pipeline_needs_the_weights() -> None:
    processes.results(_train_on_two, 2)


def test_a_model_without_some_weights_is_not_measured() -> None:
    model = make()
    model.c.to("meta")
    with pytest.raises(pd.PipelineError, match=r"after a Pipeline .*build it again"):
        plan_of(model)
