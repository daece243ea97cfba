"""Mixtures of experts: a layer of many feed-forward networks, of which each token is sent to one or two.

After GShard (Lepikhin et al. 2020, section 2.2 and algorithm 1), whose einsums are the form "dense", and Switch
Transformers (Fedus et al. 2021, section 2), which send to one. Letters: G groups of S tokens, E experts, C places that
an expert has for the tokens of a group, M d_model, H d_ff.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from pipedream.core.errors import PipelineError, PlanError
from pipedream.extensions.meshes.sharding.functions import (
    SUM,
    WHOLE,
    Table,
    all_to_all,
    compute_on_parts,
    make_dtensors,
    sum_partials,
)
from pipedream.tensors.auxiliary_loss import add_auxiliary_loss

_MIN_CAPACITY = 4


def capacity(tokens: int, experts: int, factor: float) -> int:
    """Returns C, the places that each expert has for a group of so many tokens; at least 4."""
    return max(_MIN_CAPACITY, min(tokens, int(tokens * factor / experts)))


class Gate(NamedTuple):
    """Where tokens go, as masks.

    Attributes:
        combine: [G, S, E, C]; how much the expert's output at a place counts for the token.
        dispatch: [G, S, E, C]; 1 where combine is not 0, without a gradient.
        loss: the balance loss, 1 for a uniform gate; without a coefficient.
    """

    combine: torch.Tensor
    dispatch: torch.Tensor
    loss: torch.Tensor


class _Routes(NamedTuple):
    """Where tokens go, by number. The first dimension of the first four is the choice, [top, G, S].

    Attributes:
        expert, place: expert and place of the choice; where nothing is sent, the place has no meaning.
        sent: whether the choice has a place.
        weight: weight of the expert's output; 0 where nothing is sent.
        loss: see `Gate`.
    """

    expert: torch.Tensor
    place: torch.Tensor
    sent: torch.Tensor
    weight: torch.Tensor
    loss: torch.Tensor


def gate(
    logits: torch.Tensor,
    capacity: int,
    *,
    top: int = 2,
    second: str = "random",
    threshold: float = 0.5,
    uniform: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
    normalise: str = "before",
) -> Gate:
    """Returns where the tokens of each group go (GShard, algorithm 1).

    First choices take places in the order of the tokens, second choices what the first ones leave. Beyond the capacity
    nothing is sent.

    Args:
        logits: [G, S, E]; the softmax is taken in float32, or in float64 if they are.
        capacity: C.
        top: choices of a token. With 1, an output counts by its probability (Switch).
        second: "random" sends a second choice of weight g with probability min(1, g / threshold), "all" always.
        uniform: [G, S], numbers from [0, 1) for "random"; drawn if None.
        importance: [G, S]. Tokens of 1 are sent to both choices. Those between 0 and 1 have no first choice: their
            second is the most probable of all experts. Those of 0 (padding) are sent nowhere. None is 1 for all.
        normalise: divides both weights by their sum "before" it is known what is sent, or "after" (lingvo's later
            form), when a choice that is sent alone counts 1.

    Raises:
        PipelineError: an option is unknown, or there are fewer experts than choices.
    """
    _check(logits.shape[-1], top, second, normalise)
    routes = _route(logits, capacity, top, second, threshold, uniform, importance, normalise)
    return _build_masks(routes, logits.shape[-1], capacity)


def _build_masks(routes: _Routes, experts: int, capacity: int) -> Gate:
    choices = zip(routes.expert, routes.place, routes.weight, strict=True)
    combine = sum(
        (F.one_hot(expert, experts) * weight.unsqueeze(-1)).unsqueeze(-1)
        * F.one_hot(place.clamp(max=capacity - 1), capacity).unsqueeze(-2)
        for expert, place, weight in choices
    )
    assert isinstance(combine, torch.Tensor)
    return Gate(combine, (combine != 0).to(combine.dtype), routes.loss)


def _route(
    logits: torch.Tensor,
    capacity: int,
    top: int,
    second: str,
    threshold: float,
    uniform: torch.Tensor | None,
    importance: torch.Tensor | None,
    normalise: str,
) -> _Routes:
    probabilities = logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    groups, _, experts = logits.shape
    important = torch.ones_like(logits[..., 0], dtype=torch.bool) if importance is None else importance == 1
    first = probabilities.argmax(-1)
    weight = probabilities.gather(-1, first.unsqueeze(-1)).squeeze(-1) * important
    chosen = F.one_hot(first, experts) * important.unsqueeze(-1)
    share = chosen.to(probabilities.dtype).mean(1)
    loss = experts**2 * (share * (probabilities * important.unsqueeze(-1)).mean(1)).mean()
    place, has_place = _assign_places(first, chosen, logits.new_zeros((groups, 1, experts), dtype=torch.long), capacity)
    if top == 1:
        return _Routes(first[None], place[None], has_place[None], (weight * has_place)[None], loss)

    others = probabilities.detach().masked_fill(chosen.bool(), -1.0)
    next_best = others.argmax(-1)
    weights = torch.stack([weight, probabilities.gather(-1, next_best.unsqueeze(-1)).squeeze(-1)])
    if normalise == "before":
        weights = weights / (weights.sum(0) + 1e-9)
    occupied = chosen.sum(1, keepdim=True).clamp(max=capacity)
    eligible = torch.ones_like(important) if importance is None else importance > 0
    if second == "random":
        uniform = torch.rand_like(weights[1]) if uniform is None else uniform
        eligible = eligible & (uniform < weights[1].detach() / max(threshold, 1e-9))
    next_place, has_next_place = _assign_places(
        next_best, F.one_hot(next_best, experts) * eligible.unsqueeze(-1), occupied, capacity
    )
    sent = torch.stack([has_place, has_next_place])
    weights = weights * sent
    if normalise == "after":
        total = weights.sum(0)
        weights = weights / torch.where(total > 0, total, torch.ones_like(total))
    return _Routes(torch.stack([first, next_best]), torch.stack([place, next_place]), sent, weights, loss)


def _assign_places(
    expert: torch.Tensor, chosen: torch.Tensor, occupied: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's place at its expert, and whether it is chosen and has one, both [G, S].

    Args:
        chosen: [G, S, E], 1 for the expert that the token is to be sent to.
        occupied: [G, 1, E], places that earlier tokens have.
    """
    places = chosen.cumsum(1) - chosen + occupied
    place = places.gather(-1, expert.unsqueeze(-1)).squeeze(-1)
    return place, chosen.any(-1) & (place < capacity)


def _check(experts: int, top: int, second: str, normalise: str) -> None:
    if top not in (1, 2) or top > experts:
        raise PipelineError(f"top={top} of {experts} experts was asked for; give 1 or 2, and at least as many experts")
    for name, value, choices in (("second", second, ("random", "all")), ("normalise", normalise, ("before", "after"))):
        if value not in choices:
            raise PipelineError(f"{name}={value!r} was asked for; give {choices[0]!r} or {choices[1]!r}")


# x, gate, up, down -> the output, and their gradients. The last row is GShard's: dispatching is an all-to-all.
_PLACEMENTS: Table = {
    (WHOLE, WHOLE, WHOLE, WHOLE): (WHOLE, (WHOLE, WHOLE, WHOLE, WHOLE)),
    (Shard(0), WHOLE, WHOLE, WHOLE): (Shard(0), (Shard(0), SUM, SUM, SUM)),
    (WHOLE, WHOLE, Shard(0), Shard(0)): (SUM, (SUM, SUM, Shard(0), Shard(0))),
    (WHOLE, WHOLE, Shard(2), Shard(1)): (SUM, (SUM, SUM, Shard(2), Shard(1))),
    (Shard(0), WHOLE, Shard(0), Shard(0)): (Shard(0), (Shard(0), SUM, Shard(0), Shard(0))),
}


class _RankPart(NamedTuple):
    """The part of a layer that a rank of a mesh computes.

    Attributes:
        groups, experts: its own.
        share: of the layer's losses that its groups count for; 0 on all but one of the ranks with the same groups.
        batch: process groups over which the batch is sharded.
        exchange: over which tokens are sent to their experts.
    """

    groups: range
    experts: range
    share: float = 1.0
    batch: tuple[dist.ProcessGroup, ...] = ()
    exchange: dist.ProcessGroup | None = None

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all groups."""
        number = number.detach().clone()
        for group in self.batch:
            dist.all_reduce(number, group=group)
        return number


class MixtureOfExperts(nn.Module):
    """Experts of two matrices and a ReLU between them, and the gate that sends each token to one or two of them.

    The tokens are divided into `groups` of equal size, in their order, and each group into the places of the experts. A
    token that finds no place gets 0, so a residual connection belongs around the layer. In training it adds the balance
    loss and the z-loss to the objective (`pipedream.add_auxiliary_loss`). Random routing draws from torch's generator;
    in evaluation mode nothing is drawn and every second choice is sent.

    Args:
        top, second, threshold, normalise: see `gate`.
        capacity_factor: see `capacity`.
        form: "sorted" gathers the tokens of each expert; "dense" multiplies with the masks of `gate`, as GShard's
            einsums do. Their numbers are equal.
        balance_loss: coefficient of the balance loss.
        z_loss: coefficient of the mean square of the logits' logsumexp (ST-MoE, Zoph et al. 2022, section 3.2), over
            tokens of importance 1.

    On a mesh (`docs/meshes.md`) a layout may shard the batch, with the groups, the experts, over the same or another
    dimension of the mesh, and `d_ff`.

    Attributes:
        layout_names: weight -> its dimensions, for `Layout.of_model`. The gate's experts have a name of their own,
            since each token needs all logits.
        last_balance_loss: balance loss of the last forward, without its coefficient: 1 if experts are chosen alike, at
            most E.

    Raises:
        PipelineError: an option is unknown, or a number is out of range.
    """

    layout_names: ClassVar[Mapping[str, str]] = {
        "gate": "d_model experts_unsplit",
        "up": "experts d_model d_ff",
        "down": "experts d_ff d_model",
    }

    last_balance_loss: torch.Tensor | None

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        experts: int,
        *,
        groups: int = 1,
        top: int = 2,
        capacity_factor: float = 2.0,
        second: str = "random",
        threshold: float = 0.5,
        normalise: str = "before",
        form: str = "sorted",
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        _check(experts, top, second, normalise)
        if form not in ("sorted", "dense"):
            raise PipelineError(f"form={form!r} was asked for; give 'sorted' or 'dense'")
        if min(d_model, d_ff, groups) < 1 or capacity_factor <= 0:
            raise PipelineError(
                f"d_model={d_model}, d_ff={d_ff}, groups={groups}, capacity_factor={capacity_factor} were asked for; "
                "give positive numbers"
            )
        self.experts, self.groups, self.top, self.capacity_factor = experts, groups, top, capacity_factor
        self.second, self.threshold, self.normalise, self.form = second, threshold, normalise, form
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self.gate = nn.Parameter(torch.empty(d_model, experts))
        self.up = nn.Parameter(torch.empty(experts, d_model, d_ff))
        self.down = nn.Parameter(torch.empty(experts, d_ff, d_model))
        self.last_balance_loss = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights, each matrix as an `nn.Linear` does."""
        for weight in (self.gate, self.up, self.down):
            bound = weight.shape[-2] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={getattr(self, name)}" for name in ("experts", "groups", "top", "capacity_factor", "form")
        )

    @property
    def mixes_samples(self) -> bool:
        """Whether a token's output depends on the others, which may take the places of its experts."""
        return self.capacity_factor < self.experts

    def forward(self, x: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the experts' outputs, of x's shape.

        Args:
            x: [batch, length, d_model], or any shape that ends in d_model.
            importance: x's shape without d_model; see `gate`.

        Raises:
            PipelineError: the groups do not divide the tokens.
        """
        tokens = x.numel() // x.shape[-1]
        if tokens % self.groups:
            raise PipelineError(
                f"{self.groups} groups were asked for, but {tuple(x.shape)} has {tokens} tokens, which they do not "
                "divide; use a number of groups that divides the tokens of every microbatch, the last one's too"
            )
        weights = self.gate, self.up, self.down
        if any(isinstance(tensor, DTensor) for tensor in (x, *weights)):
            return self._run_on_mesh(x, weights, importance)
        return self._run_part(_RankPart(range(self.groups), range(self.experts)), importance, x, *weights)

    def _run_on_mesh(self, x: Any, weights: tuple[Any, ...], importance: Any) -> torch.Tensor:
        x, gate, up, down = make_dtensors(x, *weights)
        x, mesh = sum_partials(x), x.device_mesh
        groups, experts, share = range(self.groups), range(self.experts), 1.0
        batch, exchange = [], None
        for at, over in enumerate(mesh.mesh_dim_names or ()):
            ranks, rank = mesh.size(at), mesh.get_local_rank(at)
            if x.placements[at] == Shard(0):
                if len(groups) % ranks or x.shape[0] % ranks:
                    raise PlanError(
                        f"the layout shards the batch over {over!r} of the mesh, and with it the groups of a mixture "
                        f"of experts, but there are {self.groups} groups in {x.shape[0]} samples, which {ranks} ranks "
                        f"do not divide; use groups=N with an N that they divide, or do not shard the batch over "
                        f"{over!r}"
                    )
                groups, share = _take_range(groups, ranks, rank), share / ranks
                batch.append(mesh.get_group(at))
                exchange = mesh.get_group(at) if up.placements[at] == Shard(0) else exchange
            elif up.placements[at] != WHOLE:  # every rank has all tokens
                experts = _take_range(experts, ranks, rank) if up.placements[at] == Shard(0) else experts
                share = share if rank == 0 else 0.0
        if importance is not None:
            importance = make_dtensors(x, importance)[1].redistribute(placements=x.placements).to_local()
        part = _RankPart(groups, experts, share, tuple(batch), exchange)
        output: torch.Tensor = compute_on_parts(
            "a mixture of experts (x, gate, up, down)",
            _PLACEMENTS,
            partial(self._run_part, part, importance),
            (x, gate, up, down),
        )
        return output

    def _run_part(
        self,
        part: _RankPart,
        importance: torch.Tensor | None,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        grouped = x.reshape(len(part.groups), -1, x.shape[-1])
        if importance is not None:
            importance = importance.reshape(grouped.shape[:2])
        logits = grouped @ gate
        places = capacity(grouped.shape[1], self.experts, self.capacity_factor)
        second = self.second if self.training else "all"
        uniform = self._draw_uniform(part, logits) if self.top == 2 and second == "random" else None
        routes = _route(logits, places, self.top, second, self.threshold, uniform, importance, self.normalise)
        output = (self._run_sorted if self.form == "sorted" else self._run_dense)(
            part, grouped, routes, places, up, down
        )
        self.last_balance_loss = routes.loss.detach()
        if part.batch:
            self.last_balance_loss = part.sum(routes.loss) * (len(part.groups) / self.groups)
        if self.training:
            losses = self._compute_losses(part, logits, routes.loss, importance)
            output = add_auxiliary_loss(output, part.share * losses)
        return output.reshape(x.shape)

    def _draw_uniform(self, part: _RankPart, logits: torch.Tensor) -> torch.Tensor:
        """Draws for all groups, so that the numbers equal those of one process."""
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        drawn = torch.rand(self.groups, logits.shape[1], dtype=dtype, device=logits.device)
        return drawn[part.groups.start : part.groups.stop]

    def _compute_losses(
        self, part: _RankPart, logits: torch.Tensor, balance: torch.Tensor, importance: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the losses of this rank's groups, whose mean over all ranks with groups is that of the layer."""
        if not self.z_loss:
            return self.balance_loss * balance
        squares = logits.to(balance.dtype).logsumexp(-1).square()
        if importance is None:
            return self.balance_loss * balance + self.z_loss * squares.mean()
        counts = importance == 1
        count = part.sum(counts.sum()).clamp(min=1) * (len(part.groups) / self.groups)
        return self.balance_loss * balance + self.z_loss * (squares * counts).sum() / count

    def _run_dense(
        self, part: _RankPart, x: torch.Tensor, routes: _Routes, places: int, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        masks, local_experts = _build_masks(routes, self.experts, places), slice(part.experts.start, part.experts.stop)
        inside = torch.einsum("GSM,GSEC->EGCM", x, masks.dispatch[:, :, local_experts].to(x.dtype))
        if part.exchange is not None:
            inside = all_to_all(inside, part.exchange, 1, 0, len(part.groups) * part.exchange.size())
        hidden = torch.einsum("EGCM,EMH->EGCH", inside, up).relu()
        outside = torch.einsum("EGCH,EHM->GECM", hidden, down)
        if part.exchange is not None:
            outside = all_to_all(outside, part.exchange, 1, 0, self.experts)
        return torch.einsum("GSEC,GECM->GSM", masks.combine[:, :, local_experts].to(outside.dtype), outside)

    def _run_sorted(
        self, part: _RankPart, x: torch.Tensor, routes: _Routes, places: int, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        groups, size, width = x.shape
        tokens, choices, experts = groups * size, routes.sent.numel(), len(part.experts)
        slots = experts * groups * places
        group = torch.arange(groups, device=x.device).unsqueeze(-1)
        expert, sent = routes.expert, routes.sent
        if experts < self.experts:
            expert = expert - part.experts.start
            sent = sent & (expert >= 0) & (expert < experts)
        # A place at an expert is a slot; what is not sent goes to one more, which is dropped.
        slot = torch.where(sent, (expert * groups + group) * places + routes.place, slots)
        choice = torch.full((slots + 1,), choices, device=x.device)  # the number of choices for an empty slot
        choice = choice.scatter(0, slot.flatten(), torch.arange(choices, device=x.device))[:-1]
        # A CPU computes only what is filled. Elsewhere the host would have to wait for the counts, or cannot know them.
        plain = type(x) is torch.Tensor and x.is_cpu and not torch.is_autocast_enabled("cpu")
        counts: list[int] | None = None
        if plain and part.exchange is None and not torch.compiler.is_compiling():
            filled = choice < choices
            counts = filled.view(experts, -1).sum(1).tolist()
            choice = choice[filled]
        token = choice % tokens  # an empty slot computes with token 0, with weight 0
        inside = x.reshape(tokens, width).index_select(0, token)
        if counts is not None:
            outside: torch.Tensor = _Experts.apply(inside, up, down, counts)  # type: ignore[no-untyped-call]
        else:
            inside = inside.view(experts, -1, width)
            if part.exchange is not None:
                inside = all_to_all(inside, part.exchange, 1, 0, groups * places * part.exchange.size())
            outside = torch.bmm(torch.bmm(inside, up).relu(), down)
            if part.exchange is not None:
                outside = all_to_all(outside, part.exchange, 0, 1, experts)
            outside = outside.flatten(0, 1)
        weight = F.pad(routes.weight.flatten(), (0, 1)).index_select(0, choice).unsqueeze(-1)
        weighted = outside * weight.to(outside.dtype)
        return weighted.new_zeros(tokens, width).index_add(0, token, weighted).view(groups, size, width)


def _take_range(whole: range, parts: int, at: int) -> range:
    size = len(whole) // parts
    return whole[at * size : (at + 1) * size]


class _Experts(torch.autograd.Function):
    """The experts' products, each on its own number of rows.

    Written out, because autograd joins the gradients of the experts' weights by a copy: 8% of the time of a step.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor, counts: list[int]) -> torch.Tensor:
        hidden, output = rows.new_empty(len(rows), up.shape[2]), torch.empty_like(rows)
        parts = (t.split(counts) for t in (rows, hidden, output))  # type: ignore[no-untyped-call]
        slices = zip(*parts, up, down, strict=True)
        for inputs, inner, outputs, expert_up, expert_down in slices:
            torch.mm(inputs, expert_up, out=inner).relu_()
            torch.mm(inner, expert_down, out=outputs)
        ctx.save_for_backward(rows, hidden, up, down)
        ctx.counts = counts
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        rows, hidden, up, down = ctx.saved_tensors
        results = torch.empty_like(rows), torch.empty_like(up), torch.empty_like(down)
        counts: list[int] = ctx.counts
        parts = (t.split(counts) for t in (rows, hidden, gradients[0], results[0]))
        slices = zip(*parts, up, down, results[1], results[2], strict=True)
        for inputs, inner, arrived, back, expert_up, expert_down, to_up, to_down in slices:
            torch.mm(inner.t(), arrived, out=to_down)
            through = torch.ops.aten.threshold_backward(torch.mm(arrived, expert_down.t()), inner, 0)
            torch.mm(inputs.t(), through, out=to_up)
            torch.mm(through, expert_up.t(), out=back)
        return *results, None
