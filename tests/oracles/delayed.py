"""Methods whose forward and backward read different weights, as their papers write them, one microbatch at a time.

Nothing of the library is used but its seeding rule. A stage is plain modules; all weights that it ever had are kept,
with what the optimizer knew then. A forward runs on copies of the weights that the paper names; what autograd has saved
of them is swapped, when the backward comes, for the weights that the paper names there (the rule 'graph'), or the
forward is done again at those ('recompute').
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, floor
from typing import Any

import torch
from reference import Answer, Total, pieces
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipedream.core.seeds import layer_seed

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Paper:
    """A method for p stages. s counts stages from 0, k microbatches since the last drain.

    Attributes:
        forward, backward: (s, k) -> number of updates in the weights that the pass reads, before any prediction.
        rule: 'graph', 'recompute' or 'stash'.
        ahead, back: s -> updates by which the weights of a forward, a backward are predicted; negative: corrected back.
        by: what one update is taken to add.
        decay: decay of the average.
        share: share of the weights one update old in those of a backward. Their significance decays exponentially
            with the updates between them and the newest. None reads the newest alone.
    """

    forward: Callable[[int, int], int]
    backward: Callable[[int, int], int]
    rule: str = "graph"
    ahead: Callable[[int], float] = lambda s: 0.0
    back: Callable[[int], float] = lambda s: 0.0
    by: str = "velocity"
    decay: float = exp(-2)
    share: float | None = None

    def gamma(self, s: int) -> float:
        """Returns the weight of the average so far, in one update."""
        return self.decay ** (1 / abs(self.back(s))) if self.back(s) else 0.0


def pipelined_backprop(p: int, m: int) -> Paper:
    """Kosson et al., section 3: forward at w(t - D), D = 2(S - s) for s = 1..S, backward at w(t)."""
    return Paper(lambda s, k: max(0, k - 2 * (p - 1 - s)), lambda s, k: k)


def pb_lwp(p: int, m: int, scale: float = 1.0) -> Paper:
    """The same, section 3.2: the forward at w - lr T v, T = D."""
    return replace(pipelined_backprop(p, m), ahead=lambda s: scale * 2 * (p - 1 - s))


def pipemare(p: int, m: int) -> Paper:
    """Yang et al., section 3.2: u = w - D delta, forward 2(p-1-s) microbatches before the backward, m in an update."""
    return Paper(
        lambda s, k: max(0, floor((k - 2 * (p - 1 - s)) / m)), lambda s, k: k // m,
        back=lambda s: -2 * (p - 1 - s) / m, by="average",
    )  # fmt: skip


def spectrain(p: int, m: int) -> Paper:
    """Chen et al., section 4: s_fwd = floor(k/2) + N - k - 1, s_bwd = floor(k/2) at GPU k of N."""
    return Paper(
        lambda s, k: max(0, k - (p - 1 - s)), lambda s, k: k, ahead=lambda s: s // 2 + p - s - 1, back=lambda s: s // 2
    )


def spectrain_v2(p: int, m: int) -> Paper:
    """The second version: predicted for the forward by N - k, kept for the backward."""
    late = lambda s, k: max(0, k - (p - 1 - s))  # noqa: E731
    return Paper(late, late, "stash", ahead=lambda s: p - s)


def pipeoptim(p: int, m: int) -> Paper:
    """Guan et al. 2023, section 3: the forward at w - lr s dw, s = D - rank - 1; the backward at w."""
    return Paper(lambda s, k: max(0, k - (p - 1 - s)), lambda s, k: k, ahead=lambda s: p - s - 1)


def xpipe(p: int, m: int) -> Paper:
    """Guan et al. 2019: all microbatches of a minibatch read what its first one predicted."""
    return Paper(
        lambda s, k: max(0, floor((k - k % m - (p - 1 - s)) / m)), lambda s, k: k // m,
        ahead=lambda s: -((s + 1 - p) // m),
    )  # fmt: skip


def stash(late: Callable[[int, int], int]) -> Callable[[int, int], Paper]:
    """Returns methods of staleness (p, s) -> updates, whose backwards read the weights of the forward."""

    def make(p: int, m: int) -> Paper:
        def read(s: int, k: int) -> int:
            return max(0, k // m - late(p, s))

        return Paper(read, read, "stash")

    return make


def paci(p: int, m: int) -> Paper:
    """1F1B with p - s in flight, an update every m microbatches, live weights."""
    return Paper(lambda s, k: max(0, floor((k - (p - 1 - s)) / m)), lambda s, k: k // m)


def nf1b(p: int, n: int, minibatches: int) -> list[list[str]]:
    """Returns what each worker does in each slot, F or B, by the rule of TiMePReSt's section 3.

    A forward of a microbatch takes a slot, the backward of a minibatch too; backwards come first; a worker s of p has
    at most p - s minibatches that it has begun and not gone back through.
    """
    forwards, backwards = [0] * p, [0] * p
    done: list[list[str]] = [[] for _ in range(p)]
    while backwards[0] < minibatches:
        now = []
        for s in range(p):
            ready = forwards[s] // n if s == p - 1 else backwards[s + 1]
            arrived = s == 0 or forwards[s - 1] > forwards[s]
            goes_on = arrived and forwards[s] // n - backwards[s] < p - s
            now.append("B" if ready > backwards[s] else "F" if goes_on else ".")
        for s, what in enumerate(now):
            forwards[s] += what == "F"
            backwards[s] += what == "B"
            done[s].append(what)
    return done


def v_timeprest(p: int, m: int) -> Paper:
    """Order nF1B; each pass at the weights that there are, which are those of the backwards before it."""
    rows = ["".join(row) for row in nf1b(p, m, 60)]
    before = [[part.count("B") for part in _prefixes(row)] for row in rows]
    return Paper(lambda s, k: before[s][k], lambda s, k: k // m)


def timeprest(p: int, m: int) -> Paper:
    """The same order; each forward at the version that its microbatch met at the input stage, as vertical sync has it;
    each backward at the newest weights of its stage, which has made its updates of all minibatches before."""
    before = _prefixes("".join(nf1b(p, m, 60)[0]))
    return Paper(lambda s, k: before[k].count("B"), lambda s, k: k // m)


def timeprest_interpolated(p: int, m: int, share: float = exp(-1)) -> Paper:
    """The same order; forwards at the newest weights, backwards towards the newest from those that are stashed."""
    return replace(v_timeprest(p, m), share=share)


def _prefixes(row: str) -> list[str]:
    """Returns what lies before each forward."""
    return [row[:i] for i, what in enumerate(row) if what == "F"]


_METHODS = (
    pipelined_backprop, pb_lwp, pipemare, spectrain, spectrain_v2, pipeoptim, xpipe, paci, v_timeprest, timeprest,
    timeprest_interpolated,
)  # fmt: skip
PAPERS: dict[str, Callable[..., Paper]] = {method.__name__: method for method in _METHODS}


class Sgd:
    """v <- mu v + g + c w; w <- w - lr v."""

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self._mu, self._decay = lr, momentum, weight_decay
        self._v: Values = {}

    def step(self, weights: Values, gradients: Values, rate: float) -> Values:
        for name, g in gradients.items():
            self._v[name] = self._mu * self._v.get(name, 0.0) + g + self._decay * weights[name]
        return {name: w - rate * self._v[name] if name in gradients else w for name, w in weights.items()}

    def direction(self) -> Values:
        return dict(self._v)


class SpikeSgd(Sgd):
    """v <- mu v + g + c w; w <- w - lr (mu^D v + (1 - mu^D) / (1 - mu) (g + c w)): Kosson et al., SC_D."""

    def __init__(self, lr: float, momentum: float, weight_decay: float, delay: int = 0) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.compensate(delay)

    def compensate(self, delay: int) -> None:
        """Compensates another delay from now on; of 0 it is momentum SGD."""
        self._a, self._b = self._mu**delay, (1 - self._mu**delay) / (1 - self._mu)

    def step(self, weights: Values, gradients: Values, rate: float) -> Values:
        g = {name: gradient + self._decay * weights[name] for name, gradient in gradients.items()}
        super().step(weights, gradients, rate)
        return {
            name: w - rate * (self._a * self._v[name] + self._b * g[name]) if name in g else w
            for name, w in weights.items()
        }


class OfTorch:
    """One of torch's optimizers.

    Args:
        make: makes it of named parameters.
        lr: what the optimizer's own rates are counted in.

    Attributes:
        handles: what it steps, by name.
    """

    def __init__(
        self, make: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer], lr: float = 1.0
    ) -> None:
        self._make, self.lr = make, lr
        self.handles: dict[str, nn.Parameter] = {}

    def begin(self, weights: Values) -> None:
        """Makes the optimizer, before its first update."""
        self.handles = {name: nn.Parameter(w.clone()) for name, w in weights.items()}
        self.optimizer = self._make(list(self.handles.items()))
        self.rates = [group["lr"] / self.lr for group in self.optimizer.param_groups]
        self.update: Callable[[], Any] = self.optimizer.step

    def step(self, weights: Values, gradients: Values, rate: float) -> Values:
        if not weights:  # of a stage without layers that are trained
            return {}
        if not self.handles:
            self.begin(weights)
        for name, handle in self.handles.items():
            handle.data.copy_(weights[name])
            handle.grad = gradients[name].contiguous() if name in gradients else None
        for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * rate
        self.update()
        return {name: handle.detach().clone() for name, handle in self.handles.items()}

    def direction(self) -> Values:
        """Returns v of momentum SGD, or Adam's m / (sqrt(v) + eps), m and v corrected for their beginning."""
        names, direction = {id(handle): name for name, handle in self.handles.items()}, dict[str, Any]()
        if not self.handles:
            return direction
        for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            for handle in group["params"]:
                state = self.optimizer.state[handle]
                if "momentum_buffer" in state:
                    direction[names[id(handle)]] = lr * state["momentum_buffer"]
                elif "exp_avg" in state:
                    first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
                    size = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
                    direction[names[id(handle)]] = lr * state["exp_avg"] / first / size
        return direction


@dataclass
class Moment:
    """A stage's weights after so many updates, and what one update more is taken to add to them, by each way."""

    weights: Values
    added: dict[str, Values]

    def prediction(self, by: str, horizon: float) -> Values:
        """Returns the weights so many updates ahead."""
        return {
            name: w + horizon * self.added[by][name] if horizon and name in self.added[by] else w.clone()
            for name, w in self.weights.items()
        }


class Stage:
    """Layers, their weights and their optimizer."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], optimizer: Any, seed: int, gamma: float) -> None:
        self.layers, self.optimizer, self._seed = layers, optimizer, seed
        weights = {f"{n}.{k}": p.detach().clone() for n, layer in layers for k, p in layer.named_parameters()}
        self.versions = [Moment(weights, {"velocity": {}, "difference": {}, "average": {}})]
        self.switch_to(gamma)

    def switch_to(self, gamma: float) -> None:
        """Takes another average from now on, of nothing at first."""
        self._gamma = gamma
        self.average = {name: torch.zeros_like(w) for name, w in self.versions[-1].weights.items()}
        self.versions[-1].added["average"] = self.average

    def run(self, value: Any, weights: Mapping[str, Tensor], number: int) -> Any:
        for name, layer in self.layers:
            torch.default_generator.manual_seed(layer_seed(self._seed, number, name))
            layer_weights = {k.removeprefix(f"{name}."): w for k, w in weights.items() if k.startswith(f"{name}.")}
            value = functional_call(layer, layer_weights, (value,))
        return value

    def update(self, gradients: Values, rate: float, coming: float) -> None:
        """Makes an update; `rate` is its learning rate, `coming` that of the next one."""
        old = self.versions[-1].weights
        new = self.optimizer.step(old, gradients, rate)
        added = {name: new[name] - w for name, w in old.items()}
        self.average = {n: self._gamma * d + (1 - self._gamma) * added[n] for n, d in self.average.items()}
        velocity = {name: -coming * d for name, d in self.optimizer.direction().items()}
        self.versions.append(Moment(new, {"velocity": velocity, "difference": added, "average": self.average}))

    def buffers(self) -> list[Tensor]:
        return [b for _, layer in self.layers for b in layer.buffers()]


@dataclass
class Flight:
    """A microbatch at a stage, between its forward and its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    leaves: Values
    swapped: Values = field(default_factory=dict)


def forward(stage: Stage, value: Any, weights: Values, number: int) -> tuple[Any, Flight]:
    """Runs a stage on copies of weights, such that what is saved of them is read from `Flight.swapped` later."""
    tensors, structure = tree_flatten(value)
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in tensors]
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    flight = Flight([t for t in inputs if isinstance(t, Tensor) and t.requires_grad], [], leaves)
    places = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items()}

    def pack(tensor: Tensor) -> Any:
        name = places.get(tensor.untyped_storage().data_ptr())
        return tensor if name is None else (name, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else flight.swapped[packed[0]].as_strided(*packed[1:])

    # Copies: a layer may write into what it is given.
    copies = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = stage.run(tree_unflatten(copies, structure), leaves, number)
    flight.outputs = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.requires_grad]
    return output, flight


def backward(flight: Flight, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Values]:
    """Returns the gradients of what came in, and of the weights."""
    pairs = [(t, g) for t, g in zip(flight.outputs, gradients, strict=True) if g is not None]
    leaves = [*flight.inputs, *flight.leaves.values()]
    if not pairs or not leaves:
        return [None] * len(flight.inputs), {}
    outputs, output_gradients = zip(*pairs, strict=True)
    leaf_gradients = torch.autograd.grad(outputs, leaves, output_gradients, allow_unused=True)
    weight_gradients = zip(flight.leaves, leaf_gradients[len(flight.inputs) :], strict=True)
    return list(leaf_gradients[: len(flight.inputs)]), {name: g for name, g in weight_gradients if g is not None}


@dataclass(frozen=True)
class Turn:
    """A method that takes its turn in a run.

    Attributes:
        microbatches: m, of a minibatch and of an update.
        rate: (s, update since the start of training) -> factor on the learning rate.
        spike: s -> delay that spike compensation makes up for, of a `SpikeSgd`.
    """

    paper: Paper
    microbatches: int
    rate: Callable[[int, int], float] = lambda s, update: 1.0
    spike: Callable[[int], int] = lambda s: 0


def synchronous(m: int) -> Turn:
    """Returns what all methods that flush are."""
    return Turn(Paper(lambda s, k: k // m, lambda s, k: k // m, "stash"), m)


def train(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    batches: Sequence[tuple[Tensor, Tensor]],
    total: Total,
    paper: Paper,
    optimizer: Callable[[], Any],
    *,
    microbatches: int = 1,
    replicas: Sequence[int] | None = None,
    rounds: bool = False,
    seed: int = 0,
    drains: Sequence[int] = (),
    rate_at: Callable[[int], float] = lambda update: 1.0,
    turns: Mapping[int, Turn] | None = None,
    watch: Callable[[int, float, Sequence[Stage]], bool] = lambda minibatches, loss, parts: True,
    versions_kept: int | None = None,
) -> Answer:
    """Trains a copy of the model, one microbatch after the other.

    Args:
        stages: for each stage the names of its layers, in run order.
        total: (output, targets) -> (sum, weight).
        optimizer: makes one for a stage.
        microbatches: m, of a minibatch.
        replicas: number of replicas of each stage.
        rounds: an update is the mean of the replicas' minibatches, each normalised by itself; else it is of one.
        drains: minibatch numbers before which all stages are at their newest; versions are counted from there.
        rate_at: number of an update -> factor on the learning rate.
        turns: minibatch number -> method that begins there, in the place of the one before; averages begin anew.
        watch: called with the number of minibatches so far, the last one's loss, and the stages; says whether to go on.
        versions_kept: newest versions of a stage that are kept; by default all.
    """
    model = copy.deepcopy(model)
    model.train()
    modules, counts = dict(model.named_modules()), tuple(replicas or (1,) * len(stages))
    parts = [
        Stage([(n, modules[n]) for n in names], optimizer(), seed, paper.gamma(s)) for s, names in enumerate(stages)
    ]
    turn = Turn(paper, microbatches)
    answer, base, updates = Answer(), 0, [0] * len(parts)
    sums: list[list[tuple[Values, float]]] = [[] for _ in parts]

    def rate_of(s: int, update: int) -> float:
        per_round = counts if rounds else (1,) * len(counts)
        number = update * per_round[s] // per_round[0]
        return float(parts[s].optimizer.lr * turn.rate(s, number) * rate_at(number) * per_round[s] / per_round[0])

    def update(s: int) -> None:
        waiting = sums[s]
        divisors = [w if rounds else 1.0 for _, w in waiting]
        divisor = float(len(waiting)) if rounds else sum(w for _, w in waiting)
        names = {name for gradients, _ in waiting for name in gradients}
        mean = {
            name: sum(g[name] / d for (g, _), d in zip(waiting, divisors, strict=True) if name in g) / divisor
            for name in names
        }
        present = len(waiting) / counts[s] if rounds else 1.0
        parts[s].update(mean, rate_of(s, updates[s]) * present, rate_of(s, updates[s] + 1))
        updates[s] += 1
        sums[s] = []

    for n, (x, y) in enumerate(batches):
        if n and (n in drains or n in (turns or {})):
            for s, part in enumerate(parts):
                if sums[s]:
                    update(s)
                part.versions = part.versions[-1:]
            base = n * microbatches
            answer.at_drains[n] = _loaded(model, parts)
        if turns and n in turns:
            turn = turns[n]
            paper, microbatches, base = turn.paper, turn.microbatches, n * turn.microbatches
            for s, part in enumerate(parts):
                part.switch_to(paper.gamma(s))
                if isinstance(part.optimizer, SpikeSgd):
                    part.optimizer.compensate(turn.spike(s))
        loss = weight = 0.0
        answer.rates.append(rate_of(0, updates[0]))
        for part_number, (xs, ys) in enumerate(pieces(x, y, microbatches)):
            number = n * microbatches + part_number
            k = number - base
            gradients: list[Tensor | None] = []
            amount = 0.0
            flights: list[Flight] = []
            value: Any = xs.clone()
            saved_buffers = [[b.clone() for b in stage.buffers()] for stage in parts]
            stage_inputs: list[Any] = []
            for s, stage in enumerate(parts if len(xs) else ()):
                stage_inputs.append(value)
                weights = stage.versions[paper.forward(s, k)].prediction(paper.by, paper.ahead(s))
                value, flight = forward(stage, value, weights, number)
                flights.append(flight)
            if len(xs):
                part_loss, amount, slope = _slope(total, value, ys)
                gradients = [slope]
                loss, weight = loss + part_loss, weight + amount
            for s in reversed(range(len(parts))):
                weight_gradients: Values = {}
                if len(xs):
                    now = parts[s].versions[paper.backward(s, k)].prediction(paper.by, paper.back(s))
                    if paper.share is not None:
                        old = parts[s].versions[paper.forward(s, k)].weights
                        significance = paper.share ** (paper.backward(s, k) - paper.forward(s, k))
                        now = {name: (1 - significance) * w + significance * old[name] for name, w in now.items()}
                    if paper.rule == "stash":
                        now = flights[s].leaves
                    if paper.rule == "recompute":
                        after = [b.clone() for b in parts[s].buffers()]
                        _put(parts[s].buffers(), saved_buffers[s])
                        again, flights[s] = forward(parts[s], stage_inputs[s], now, number)
                        _put(parts[s].buffers(), after)
                        if s == len(parts) - 1:  # the loss is a part of the last stage
                            gradients = [_slope(total, again, ys)[2]]
                    flights[s].swapped = {name: w.detach().clone() for name, w in now.items()}
                    gradients, weight_gradients = backward(flights[s], gradients)
                sums[s].append((weight_gradients, amount))
                if len(sums[s]) == (counts[s] if rounds else microbatches):
                    update(s)
        answer.losses.append(loss / weight)
        answer.weights.append(weight)
        for part in parts if versions_kept else ():
            part.versions[:-versions_kept] = [None] * (len(part.versions) - versions_kept)
        if not watch(n + 1, answer.losses[-1], parts):
            break
    for s in range(len(parts)):
        if sums[s]:
            update(s)
    answer.state = {k: v.detach().clone() for k, v in _loaded(model, parts).state_dict().items()}
    return answer


def _slope(total: Total, value: Any, targets: Tensor) -> tuple[float, float, Tensor]:
    """Returns the loss of an output, its weight, and its gradient by the output."""
    output = value.detach().requires_grad_()
    loss, amount = total(output, targets)
    (slope,) = torch.autograd.grad(loss, output)
    return float(loss.detach()), amount, slope


def _loaded(model: nn.Module, parts: Sequence[Stage]) -> nn.Module:
    loaded = copy.deepcopy(model)
    for part in parts:
        for name, weight in part.versions[-1].weights.items():
            loaded.get_parameter(name).data.copy_(weight)
    return loaded


def _put(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
