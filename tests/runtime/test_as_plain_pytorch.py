"""What plain PyTorch trains, a pipeline trains to the same numbers, or refuses with a reason: case by case.

Each case is a model, a loss and data, trained by a loop and by a pipeline of two stages. `refused` holds the words of
the error; without them losses and state must be equal. With several microbatches the loop may also be one that
accumulates gradients, since normalisation and counters go by microbatch in a pipeline. `check=False` shows what is
refused without the comparison of the first minibatch.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from built import Built
from marks import thinned
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters, weight_norm
from torch.utils.checkpoint import checkpoint
from training import SGD, loop, mse, plan_of

import pipedream as pd

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
SLOWLY = partial(torch.optim.SGD, lr=0.001)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(count: int = 3, samples: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(rand(samples, 4, seed=i), rand(samples, 4, seed=100 + i)) for i in range(count)]


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained.

    Attributes:
        refused: words of the error; empty if the numbers must be equal.
        replicas: of the two stages; several need two microbatches.
        between: what the loop does with the model after each minibatch.
        after_plan: what is done to the model after the plan was made.
    """

    model: Callable[[], nn.Module]
    refused: str = ""
    loss: Any = mse
    data: Sequence[Any] = field(default_factory=pairs)
    m: int = 2
    replicas: tuple[int, int] = (1, 1)
    cut: int = 1
    schedule: str = "gpipe"
    recompute: str = "never"
    check: bool = True
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    between: Callable[[Any], object] = id
    after_plan: Callable[[Any], object] = id
    options: dict[str, Any] = field(default_factory=dict)


def words(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = partial(torch.randint, 5, (8,))
    return [(draw(generator=torch.Generator().manual_seed(i)), rand(8, 4, seed=i)) for i in range(count)]


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def sequence(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules).double()


def net() -> nn.Sequential:
    return sequence(linear(), nn.Tanh(), linear())


def runs(function: Callable[..., Any], **parts: Any) -> nn.Module:
    """Returns a module that runs a function of itself; it has a linear layer and these parts."""
    return Built(function, linear=linear(), **parts)


def changed(change: Callable[[Any], object], make: Callable[[], nn.Module] = net) -> Callable[[], nn.Module]:
    """Returns what makes a model, by default of two linear layers, that has been changed."""

    def make_changed() -> nn.Module:
        model = make()
        change(model)
        return model

    return make_changed


def between_two(function: Callable[..., Any], **parts: Any) -> Any:
    return lambda: sequence(linear(), runs(function, **parts), linear())


def make(case: Case, sample: Any = None) -> tuple[nn.Module, pd.Plan | None]:
    """Seeds all generators, and makes the model; with a sample also its plan, before the model is changed."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model, plan = case.model(), None
    if sample is not None:
        plan = plan_of(model, sample, (case.cut,), case.replicas, recompute=case.recompute)
    case.after_plan(model)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    return model, plan


def plain(case: Case, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    how = {"loss": case.loss, "targets": tuple, "optimizer": case.optimizer, "after_step": case.between}
    return loop(make(case)[0], copy.deepcopy(case.data), parts=parts, **how)


def piped(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    data, losses = copy.deepcopy(case.data), []
    model, plan = make(case, copy.deepcopy(data[0][0]))
    options = {name: getattr(case, name) for name in ("schedule", "loss", "optimizer", "check")} | case.options
    with pd.Pipeline(model, plan, microbatches=case.m, **options) as pipeline:
        for done in pipeline.train(data):
            losses.append(done.loss)
            case.between(model)
        return losses, pipeline.state_dict()


def run(case: Case) -> None:
    if case.refused:
        with pytest.raises(pd.PipelineError, match=case.refused):
            piped(case)
        return
    actual, compare = piped(case), partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    try:
        compare(actual, plain(case, 1))
    except AssertionError:
        if case.m == 1:
            raise
        compare(actual, plain(case, case.m))


# -- losses whose parts do not make the whole -------------------------------------------------------------------------


def tokens(whole_first: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Targets of which three in the first half are ignored; perhaps not in the first batch."""
    batches = []
    for i in range(3):
        targets = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(i))
        targets[: 0 if whole_first and not i else 3] = -100
        batches.append((rand(8, 4, seed=i), targets))
    return batches


def weighted() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches with a weight of each sample, which are equal in the first."""
    half = torch.full((8,), 0.5, dtype=torch.float64)
    return [(x, y, rand(8, seed=i).abs() if i else half) for i, (x, y) in enumerate(pairs())]


weigh_torch = lambda o, b: F.mse_loss(o, b[1], reduction="none").mean(1) * b[2]  # noqa: E731
contrastive = lambda o, b: F.cross_entropy(o @ b[1].T, torch.arange(len(o)))  # noqa: E731
of_some = lambda o, b: ((o - b[1]) ** 2)[b[1][:, 0] > 0].mean()  # noqa: E731
cross_entropy = lambda o, b: F.cross_entropy(o, b[1])  # noqa: E731
NOT_A_MEAN, UNLIKE = "the loss is not a mean over samples; give weight=", "do not count by their samples"
FIRST_IS_INPUT: dict[str, Any] = {"inputs": lambda batch: batch[0]}


TEMPERATURE = nn.Parameter(torch.ones((), dtype=torch.float64))
TEMPERED = Built(lambda self, o, b: mse(o * self.scale, b), scale=TEMPERATURE)
OWN_PARAMETERS: dict[str, Any] = {
    "a partial": partial(lambda scale, o, b: mse(o * scale["t"], b), {"t": TEMPERATURE}),
    "a global": lambda o, b: mse(o * TEMPERATURE, b) + 0.1 * TEMPERATURE**2,
    "its last line": lambda o, b: mse(o, b) * torch.exp(-TEMPERATURE) + TEMPERATURE,
}


def scale_by_first(output: Tensor, batch: Any) -> Tensor:
    """Two losses, of which the second counts as much as the first, whatever its size."""
    first, second = mse(output, batch), output.square().mean()
    return first + second * (first / second).detach()


def penalise_gradient(output: Tensor, batch: Any) -> Tensor:
    """Invariant risk minimisation (Arjovsky et al., 2019) with a scale for each sample, a leaf that nobody trains."""
    scale = torch.ones(len(output), 1, dtype=output.dtype, requires_grad=True)
    losses = ((output * scale - batch[1]) ** 2).mean(1)
    (gradient,) = torch.autograd.grad(losses.sum(), scale, create_graph=True)
    return (losses + 0.1 * gradient[:, 0] ** 2).mean()


def write_output(output: Tensor, batch: Any) -> Tensor:
    output[:, 0] = 0
    return mse(output.mul_(2), batch)


LOSSES = {
    "a weight that is right": Case(net, loss=of_some, options={"weight": lambda b: (b[1][:, 0] > 0).sum()}),
    "a weight that is wrong": Case(net, r"weight=.* does not give", loss=of_some, options={"weight": lambda b: 1.0}),
    "with a parameter": Case(net, "'scale', which no stage would train", loss=TEMPERED, m=1),
    **{
        f"with a parameter in {where}": Case(net, r"of shape \[\], which no stage would train", loss=loss, m=1)
        for where, loss in OWN_PARAMETERS.items()
    },
    "with a leaf of its own": Case(net, loss=penalise_gradient),
    "writes the output": Case(net, loss=write_output),
    **{
        f"{name} detached": Case(net, r"its gradient is not, .* train with microbatches=1", loss=loss)
        for name, loss in (
            ("divided by itself", lambda o, b: mse(o, b) / mse(o, b).detach()),
            ("scaled by another", scale_by_first),
            ("scaled by the output", lambda o, b: mse(o, b) + o.mean() - o.mean().detach() * (o / o.detach()).mean()),
        )
    },
    "scaled by a detached output": Case(net, loss=lambda o, b: ((o - b[1]) ** 2 * o.detach().abs()).mean()),
    "own ignore_index": Case(net, loss=cross_entropy, data=tokens()),
    "ignores nothing in the first batch": Case(net, loss=cross_entropy, data=tokens(whole_first=True), check=False),
    "two losses, one of which ignores": Case(
        net, UNLIKE, loss=lambda o, b: cross_entropy(o, b) + 0.1 * F.mse_loss(o, b[0]), data=tokens(whole_first=True)
    ),
    "own sum of torch's": Case(net, loss=lambda o, b: F.mse_loss(o, b[1], reduction="sum"), optimizer=SLOWLY),
    "own sum": Case(net, "the loss is a sum", loss=lambda o, b: ((o - b[1]) ** 2).sum()),
    "masked by an index, later": Case(
        net,
        UNLIKE,
        loss=lambda o, b: F.mse_loss(o[b[1] > -9], b[1][b[1] > -9]),
        data=[*pairs(1), *((x, y.index_fill(0, torch.arange(3), -10)) for x, y in pairs(2))],
        check=False,
    ),
    "broadcast": Case(lambda: sequence(linear(), nn.Linear(4, 1)), NOT_A_MEAN, data=[(x, y[:, 0]) for x, y in pairs()]),
    "contrastive": Case(net, f"{NOT_A_MEAN}.*microbatches=1", loss=contrastive),
    "own masked mean": Case(net, NOT_A_MEAN, loss=lambda o, b: ((o - b[1]) ** 2 * (b[1] > 0)).sum() / (b[1] > 0).sum()),
    "detached": Case(net, "nothing would be trained", loss=lambda o, b: mse(o.detach(), b)),
    "weights by hand, equal at first": Case(
        net,
        "4 samples counts otherwise: .* give weight=",
        loss=lambda o, b: (((o - b[1]) ** 2).mean(1) * b[2]).sum() / b[2].sum(),
        data=weighted(),
        options=FIRST_IS_INPUT,
    ),
    "weights of torch's, equal at first": Case(
        net, loss=lambda o, b: weigh_torch(o, b).sum() / b[2].sum(), data=weighted(), options=FIRST_IS_INPUT
    ),
}


# -- batches ----------------------------------------------------------------------------------------------------------


def read_lists(self: Any, x: Any, entries: Any = None) -> Tensor:
    """Takes a list of tensors, or a tensor with a list of numbers, one per sample."""
    x = torch.stack([entry.mean(0) for entry in x]) if isinstance(x, list) else x
    x = torch.tanh(self.a(x))
    if entries is not None:
        x = x * torch.tensor(entries, dtype=x.dtype)[:, None]
    return self.c(torch.tanh(self.b(x)))


def by_lengths(output: Tensor, batch: Any) -> Tensor:
    """Targets of all samples lie one after the other."""
    flat, lengths = batch[1]
    losses, at = [], 0
    for sample, length in zip(output, lengths.tolist(), strict=True):
        losses.append((sample.sum() - flat[at : at + length]).square().mean())
        at += length
    return torch.stack(losses).mean()


recurrent = lambda: Built(  # noqa: E731
    lambda self, x: self.b(self.lstm(self.a(x))[0]), a=linear(), lstm=nn.LSTM(4, 4), b=linear()
).double()
of_lists = lambda: Built(read_lists, a=linear(), b=linear(), c=linear()).double()  # noqa: E731
STEPS = [(rand(6, 8, 4, seed=i), rand(6, 8, 4, seed=9 + i)) for i in range(3)]
LISTED = [
    ([rand(2 + j, 4, seed=10 * i + j) for j in range(n)], rand(n, 4, seed=50 + i)) for i, n in enumerate((8, 3, 5))
]
LENGTHS = torch.tensor([1, 2, 3, 1, 2, 3, 1, 3])


BATCHES = {
    "batch second": Case(recurrent, r"say where the samples are \(batch_dim=", data=STEPS),
    "batch second, batch_dim=1": Case(recurrent, data=STEPS, options={"batch_dim": 1}),
    "list of tensors": Case(of_lists, data=LISTED),
    "list of numbers": Case(of_lists, data=[((x, [float(i) for i in range(8)]), y) for x, y in pairs()]),
    "without a sample": Case(net, "holds no sample", data=[*pairs(1), *pairs(1, 0)], m=1),
    "targets in a flat tensor with lengths": Case(
        net,
        "microbatches make",
        loss=by_lengths,
        data=[(x, (rand(16, seed=i), LENGTHS)) for i, (x, _) in enumerate(pairs())],
    ),
}


# -- weights that are read, written or changed where a pipeline does not see it ---------------------------------------


def reading(detached: bool) -> nn.Module:
    """Returns a model whose last module reads the weight of its first."""
    first = linear()

    def read(self: Any, x: Tensor) -> Tensor:
        return self.linear(x) + (first.weight.detach() if detached else first.weight).sum()

    return sequence(first, nn.Tanh(), runs(read))


def by_attribute(named: Any) -> torch.optim.Optimizer:
    groups: list[list[Any]] = [[nn.Parameter(torch.zeros(()))] for _ in "ab"]
    for _, parameter in named:
        groups[getattr(parameter, "no_decay", False)].append(parameter)
    return torch.optim.SGD([{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1]}], lr=0.1)


def clamped(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.clamp_(-0.3, 0.3)
    return self.linear(x)


def bound(self: Any, x: Tensor) -> Tensor:
    self.linear.weight.data = self.linear.weight.data.clamp(-0.3, 0.3)
    return self.linear(x)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "register_hook": lambda gradient: gradient / 2,
    "register_post_accumulate_grad_hook": lambda weight: weight.grad.div_(2),
}


def add_hook(kind: str, model: Any) -> None:
    weight = model[0].weight
    if not weight._backward_hooks and not weight._post_accumulate_grad_hooks:
        getattr(weight, kind)(HOOKS[kind])


def share_storage(other: int, name: str, view: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Returns what makes a model of which another parameter is a view of its first weight."""

    def share(model: Any) -> None:
        weight = model[0].weight.detach().clone()
        model[0].weight = nn.Parameter(weight)
        setattr(model[other], name, nn.Parameter(view(weight)))

    return changed(share)


def replace_weight(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clamp(-0.3, 0.3))


def from_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach().clamp(-0.3, 0.3), model.parameters())


listed = changed(
    lambda model: setattr(model[1], "weights", [model[1].linear.weight]),
    between_two(lambda self, x: x @ self.weights[0]),
)
in_partial = changed(
    lambda model: setattr(model[1], "multiply", partial(F.linear, weight=model[1].linear.weight)),
    between_two(lambda self, x: self.multiply(x)),
)
with_view = changed(
    lambda model: setattr(model[1], "view", model[1].linear.weight.detach()),
    between_two(lambda self, x: self.linear(x) @ self.view),
)
overwritten = torch.no_grad()(lambda model: model[0].weight.clamp_(-0.1, 0.1))
set_anew = torch.no_grad()(lambda model: model[0].weight.set_(model[0].weight.clamp(-0.3, 0.3)))
HAS_HOOK = "'0.weight' has a hook"
WRITTEN, IN_REPLICAS = "was written while the pipeline trained", "differs between the replicas"
WEIGHTS = {
    "in a list": Case(listed, r"another gradient of '1\.linear\.weight'"),
    "in a partial": Case(in_partial, r"another gradient of '1\.linear\.weight'"),
    "of another stage": Case(lambda: reading(False), r"another gradient of '0\.weight'"),
    "of another stage, detached": Case(lambda: reading(True)),
    "of another stage, detached, replicas": Case(lambda: reading(True), replicas=(1, 2)),
    "tied": Case(changed(lambda model: setattr(model[2], "weight", model[0].weight))),
    "two in one storage": Case(share_storage(0, "bias", lambda w: w[0]), replicas=(2, 1)),
    "two in one storage, two stages": Case(share_storage(2, "weight", Tensor.t), "one storage under different"),
    "a view of it": Case(with_view, replicas=(1, 2)),
    "weight_norm by hooks": Case(lambda: sequence(weight_norm(linear()), nn.Tanh(), linear()), replicas=(2, 1)),
    "parametrizations": Case(lambda: sequence(parametrizations.orthogonal(linear()), linear()), replicas=(2, 1)),
    "pruned": Case(changed(lambda model: prune.l1_unstructured(model[0], "weight", 0.5)), replicas=(2, 1)),
    "attributes that choose the group": Case(
        changed(lambda model: [setattr(p, "no_decay", p.ndim == 1) for p in model.parameters()]),
        replicas=(2, 1),
        optimizer=by_attribute,
    ),
    "clamped in the forward, replicas": Case(between_two(clamped), "the forward writes into", replicas=(2, 1), cut=2),
    "bound anew in the forward": Case(between_two(bound), "to other memory", m=1, cut=2),
    "vector_to_parameters": Case(net, WRITTEN, between=from_vector),
    "p.set_()": Case(net, WRITTEN, between=set_anew),
    "overwritten": Case(net, WRITTEN, between=overwritten),
    "overwritten, no flush": Case(net, WRITTEN, data=pairs(6), between=overwritten, schedule="pipedream", m=1),
    **{f"{kind}": Case(changed(partial(add_hook, kind)), HAS_HOOK, m=1) for kind in HOOKS},
    **{f"{kind}, later": Case(net, HAS_HOOK, data=pairs(6), m=1, between=partial(add_hook, kind)) for kind in HOOKS},
    "another parameter": Case(net, "was replaced by another one", data=pairs(4), between=replace_weight),
    "unfrozen later": Case(
        changed(lambda model: model[0].requires_grad_(False)),
        "requires_grad of .* was changed",
        data=pairs(4),
        between=lambda model: model.requires_grad_(True),
    ),
    "written by .data, replicas": Case(
        net, IN_REPLICAS, replicas=(2, 1), between=lambda model: model[0].weight.data.clamp_(-0.3, 0.3)
    ),
}


def choose_expert(self: Any, x: Tensor) -> Tensor:
    """Each sample goes through one of two layers; in some minibatches nobody uses the second."""
    out = torch.zeros_like(x)
    for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
        if chosen.any():
            out[chosen] = expert(x[chosen])
    return out


def sided(sides: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of which one side, or each half another, goes to one expert."""
    batches = pairs(len(sides))
    for (x, _), side in zip(batches, sides, strict=True):
        x[:, 0] = x[:, 0].abs() * (side or torch.tensor([1.0] * 4 + [-1.0] * 4))
    return batches


EXPERTS = {
    f"parameters that only some microbatches use, {replicas}": Case(
        lambda: sequence(Built(choose_expert, experts=nn.ModuleList([linear(), linear()])), linear(), linear()),
        data=sided([1, 0, -1, 1, -1]),
        replicas=replicas,
        optimizer=ADAMW,
    )
    for replicas in ((1, 1), (2, 1), (1, 2))
}
"""AdamW would decay a weight whose gradient is zero instead of none."""


# -- optimizers -------------------------------------------------------------------------------------------------------


class Rebinding(torch.optim.SGD):
    """Writes its weights, or binds them anew."""

    def __init__(self, named: Any, how: str) -> None:
        super().__init__(named, lr=0.1)
        self.how = how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            new = p - 0.1 * p.grad
            if self.how == "data":
                p.data = new
            elif self.how == "set":
                p.set_(new)
            else:
                p.data.copy_(new)


sparse = lambda: sequence(nn.Embedding(5, 4, sparse=True), nn.Tanh(), linear())  # noqa: E731
OPTIMIZERS = {
    "sparse gradients": Case(sparse, data=words()),
    **{
        f"binds its weights anew by {how}": Case(net, "other memory", m=1, optimizer=partial(Rebinding, how=how))
        for how in ("data", "set")
    },
    "writes its weights by .data": Case(net, m=1, optimizer=partial(Rebinding, how="copy")),
}


# -- forwards that decide, count, write buffers, or pass things on in Python ------------------------------------------


def drop_layers(self: Any, x: Tensor) -> Tensor:
    """LayerDrop: leaves layers out by a count or by Python's generator."""
    x = self.a(x)
    self.calls += 1
    for number, layer in enumerate(self.layers):
        skips = (self.calls + number) % 2 == 0 if self.how == "count" else random.random() < 0.3
        x = x if skips else layer(x)
    return self.c(x)


def drops(how: str) -> nn.Module:
    parts = {"a": linear(), "layers": nn.ModuleList([linear(), linear()]), "c": linear()}
    return Built(drop_layers, how=how, calls=0, **parts).double()


def run_as_told(self: Any, x: Tensor) -> Tensor:
    """A chain whose forward may be changed later."""
    if self.how == "order":
        return self.c(self.a(self.b(x)))
    if self.how == "skip":
        return self.c(self.a(x))
    return self.c(torch.relu(self.b(self.a(x))) if self.how == "relu" else self.b(self.a(x)))


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.linear(x) * self.calls


def carried(self: Any, x: Tensor) -> Tensor:
    """Keeps a state from one batch to the next."""
    y = self.linear(x)
    y = y if self.state is None else y * self.state
    self.state = y.detach().mean(0)
    return y


def summing_later(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    if self.calls > 2:
        self.total += x.detach().mean(0)
    return self.linear(x) + self.total


class Frozen(Built):
    """A norm that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self


def halve(module: nn.Module, *gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient / 2 for gradient in gradients[0])


def hooked(numbers: Sequence[int], kind: str) -> nn.Module:
    model = sequence(linear(), nn.ReLU(), linear(), nn.Tanh(), linear())
    for number in numbers:
        getattr(model[number], kind)(halve)
    return model


def halve_factor(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "factor"):
            module.factor = module.factor / 2


def called_in_checkpoint() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.inner, torch.tanh(self.inner(self.linear(x))), use_reentrant=True))

    return runs(forward, inner=linear(), out=linear()).double()


FUNCTIONAL: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad": lambda layer, x: torch.func.grad(lambda y: layer(y).tanh().sum())(x),
    "jvp": lambda layer, x: torch.func.jvp(lambda y: layer(y).tanh(), (x,), (torch.ones_like(x),))[1],
    "vmap": lambda layer, x: torch.func.vmap(layer)(x),
    "functional_call": lambda layer, x: torch.func.functional_call(layer, {"weight": layer.weight / 2}, (x,)),
}


def functional(name: str) -> nn.Module:
    """Returns a model that applies a function of torch.func to a layer."""
    applied = Built(lambda self, x: FUNCTIONAL[name](self.inner, x), inner=linear())
    forward = lambda self, x: self.after(self.functional(self.before(x).tanh()).tanh())  # noqa: E731
    return Built(forward, before=linear(), functional=applied, after=linear()).double()


embedding = lambda: sequence(nn.Embedding(5, 4, max_norm=0.5), linear(), linear())  # noqa: E731
spectral = lambda: sequence(parametrizations.spectral_norm(linear()), nn.Tanh(), linear())  # noqa: E731
summed_later = between_two(summing_later, total=nn.Buffer(torch.zeros(4)), calls=0)
FORWARDS = {
    **{
        f"backward hooks of {'every module' if len(numbers) > 1 else f'module {numbers[0]}'}, {schedule}": Case(
            partial(hooked, numbers, "register_full_backward_hook"), schedule=schedule, cut=2
        )
        for numbers in ((1,), (2,), (4,), (0, 1, 2, 3, 4))
        for schedule in ("gpipe", "zb_h1")
    },
    **{f"torch.func.{name}": Case(partial(functional, name)) for name in FUNCTIONAL},
    "torch.func.grad, recompute": Case(partial(functional, "grad"), cut=2, recompute="always"),
    "torch.func.grad, old graphs": Case(
        partial(functional, "grad"), "take .*backward_rule=recompute", cut=2, schedule="paci", m=1
    ),
    "a factor that the loop changes, replicas": Case(
        lambda: sequence(linear(), Built(lambda self, x: x * self.factor, factor=1.0), nn.Tanh(), linear()),
        replicas=(2, 1),
        between=halve_factor,
    ),
    "called in a reentrant checkpoint and outside": Case(called_in_checkpoint, cut=2),
    "called in a reentrant checkpoint and outside, replicas": Case(
        called_in_checkpoint, "gradient in two backwards .*use_reentrant=False", replicas=(1, 2)
    ),
    "backward pre-hooks": Case(partial(hooked, (1, 2, 4), "register_full_backward_pre_hook"), cut=2),
    "backward hook of a module with modules": Case(
        changed(  # a block of two layers, which the hook keeps in one stage
            lambda model: model[1].register_full_backward_hook(halve),
            lambda: sequence(
                linear(), runs(lambda self, x: x + self.inner(torch.tanh(self.linear(x))), inner=linear()), linear()
            ),
        )
    ),
    "LayerDrop by count": Case(partial(drops, "count"), data=pairs(5), m=1),
    "LayerDrop by Python's generator": Case(
        partial(drops, "python"), "took another path than when the model was captured", data=pairs(8)
    ),
    **{
        f"changed after the plan: {how}": Case(
            lambda: Built(run_as_told, a=linear(), b=linear(), c=linear(), how="").double(),
            "another gradient" if how == "relu" else "runs the layers .* where the pipeline runs",
            after_plan=lambda model, how=how: setattr(model, "how", how),
            m=1,
        )
        for how in ("order", "skip", "relu")
    },
    "counter, recompute": Case(between_two(counting, calls=0), recompute="always", check=False),
    "counter, replicas": Case(between_two(counting, calls=0), "left in '1.calls'", replicas=(1, 2)),
    "Python's generators, recompute": Case(
        between_two(
            lambda self, x: self.linear(torch.tanh(self.linear(x)) * (1 + random.random() + float(np.random.rand())))
        ),
        recompute="always",
    ),
    "state of the batch before": Case(between_two(carried, state=None), recompute="always", check=False, cut=2),
    "buffer that changes later, replicas": Case(summed_later, IN_REPLICAS, data=pairs(5), replicas=(1, 2), check=False),
    "Embedding(max_norm)": Case(embedding, data=words()),
    "Embedding(max_norm), replicas": Case(embedding, r"writes .*the weight '0\.weight'", data=words(), replicas=(2, 1)),
    "Embedding(max_norm), replicas elsewhere": Case(embedding, data=words(), replicas=(1, 2)),
    "spectral_norm": Case(spectral),
    "spectral_norm, replicas": Case(spectral, IN_REPLICAS, replicas=(2, 1), check=False),
    "frozen BatchNorm by train()": Case(
        lambda: (
            Frozen(lambda self, x: self.b(self.norm(self.a(x))), a=linear(), norm=nn.BatchNorm1d(4), b=linear())
            .double()
            .train()
        )
    ),
}


def shares() -> nn.Module:
    """The first stage hands a value to the second through a Python object."""
    shared = SimpleNamespace(value=1.0)

    def give(self: Any, x: Tensor) -> Tensor:
        shared.value = self.linear(x).detach().mean()
        return self.linear(x)

    return sequence(runs(give), nn.Tanh(), runs(lambda self, x: self.linear(x) * shared.value))


def twice(part: int) -> Any:
    """Returns models that hand on a tensor twice, or with a view of it."""
    pair = lambda self, x: (lambda y: (y, y if part == 4 else y[:, :part]))(self.linear(x))  # noqa: E731
    return lambda: sequence(runs(pair), runs(lambda self, both: (both[1].mul_(2), self.linear(both[0]))[1]), linear())


OBJECTS = {
    "a value in a shared object": Case(shares, m=1),
    "a tensor twice, written": Case(twice(4)),
    "with its view, written": Case(twice(2), "another gradient", m=1),
}
THINNED = (LOSSES, BATCHES, WEIGHTS, OPTIMIZERS, FORWARDS, OBJECTS)
CASES = {name: case for kind in (*THINNED, EXPERTS) for name, case in kind.items()}
NAMES = [name for kind in THINNED for name in thinned(kind, 4)] + [*EXPERTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_trains_as_plain_pytorch_or_says_why_not(name: str) -> None:
    assert len(NAMES) == len(CASES), "each name is that of one case"
    run(CASES[name])
