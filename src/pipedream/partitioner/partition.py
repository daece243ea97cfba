"""Partitions a step over 2**k ranks by k cuts (Tofu, Wang et al., EuroSys 2019), and by the baselines of its paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.operators.operators import Operators
from pipedream.partitioner.minimise import Variable
from pipedream.partitioner.search import Choice, Search, State, all_choices

_TIES = 256
"""Equally cheap cuts that the recursion follows, in a step of a few operators."""
_WORK = 30_000
"""Ties times variables, which bounds the time for larger ones."""
_CELLS = 4_000_000
"""Of a table of `joint`."""


@dataclass(frozen=True)
class Halving(Choice):
    """One cut, of everything in two halves.

    Attributes:
        elements: that the halves move; in the i-th cut (from 0) 2**i pairs of them do.
    """

    elements: int = 0


@dataclass(frozen=True)
class Partition:
    """What was found.

    Attributes:
        at_least: elements that any partition moves which cuts each operator: the number of `joint` where that was
            searched, else a bound. "data" leaves operators without the batch whole, and may move less.
    """

    method: str
    ranks: int
    cuts: tuple[Halving, ...]
    at_least: int

    @property
    def elements(self) -> int:
        """All that is moved in a step."""
        return sum(2**at * cut.elements for at, cut in enumerate(self.cuts))


def partition(
    operators: Operators, ranks: int, method: str = "recursive", *, batch: str = "", replicate: bool = True
) -> Partition:
    """Divides all tensors and operators of a step so that the ranks move few elements.

    Args:
        ranks: a power of two.
        method: one of `METHODS`: "recursive" as published, one cut after the other; "joint", all at once, which is
            never worse; or a baseline of the paper.
        batch: the index of the samples, for "data"; or an input whose first dimension counts them, where operators
            have different names for that index, as those of a traced model do.
        replicate: tensors may be whole on both sides of a cut; the paper's are not, unless no dimension divides.

    Raises:
        PlanError: an unknown method, another number of ranks, no batch index for "data", or a step too large to search.
    """
    check_request(ranks, method)
    known = batch in operators.inputs or any(batch in step.sizes for step in operators.steps)
    if not known and (batch or method == "data"):
        raise PlanError(
            f"the partition method {method!r} was asked for with the batch index {batch!r}, which no operator has; "
            "give the index of the samples, such as batch='b', or an input whose first dimension counts them"
        )
    if method == "data" and not replicate:
        raise PlanError(
            "the partition method 'data' was asked for without replicas, but it keeps weights whole; take another one"
        )
    search = Search(operators, None if replicate else partial(_without_replicas, operators))
    cuts = METHODS[method](search, ranks.bit_length() - 1, batch)
    found = Partition(method, ranks, cuts, 0)
    return replace(
        found, at_least=found.elements if method == "joint" else min(found.elements, _bound(search, len(cuts)))
    )


def check_request(ranks: int, method: str) -> None:
    """Raises a `PlanError` for an unknown method or a number of ranks that is no power of two."""
    if method not in METHODS:
        near = get_close_matches(method, METHODS, n=1)
        raise PlanError(
            f"the partition method {method!r} was asked for; there are {', '.join(METHODS)}"
            f"{f'; did you mean {near[0]!r}?' if near else ''}"
        )
    if ranks < 1 or ranks & (ranks - 1):
        raise PlanError(
            f"a partition over {ranks} ranks was asked for, but each cut makes two halves; give a power of two"
        )


def completed(operators: Operators, ranks: int, given: Mapping[str, Sequence[int | None]]) -> Partition:
    """Returns a recursive partition in which some tensors, and those alike, have given schemes.

    Args:
        given: tensor -> the dimension that each cut divides, or None.
    """
    group = {name: names[0] for names in operators.groups for name in names}
    schemes = {group[name]: cuts for name, cuts in given.items()}

    def allowed(at: int, one: Variable, own: Any) -> Sequence[Any]:
        return [schemes[one][at]] if one in schemes else all_choices(operators, one, own)

    state, found = State.uncut(operators), []
    for at in range(ranks.bit_length() - 1):
        elements, choices = Search(operators, partial(allowed, at)).cheapest(state)
        (choice,) = next(choices)
        found.append(Halving(choice.schemes, choice.indices, elements))
        state = state.after(choice)
    return Partition("recursive", ranks, tuple(found), 0)


def _without_replicas(operators: Operators, one: Variable, own: Any) -> Sequence[Any]:
    found = all_choices(operators, one, own)
    if not isinstance(one, str):
        return found
    return [cut for cut in found if cut is not None and len(own[cut]) % 2 == 0] or [None]


def _recursive(search: Search, cuts: int, batch: str = "") -> tuple[Halving, ...]:
    """Makes one cut after the other, each at the least cost, and follows ties until they differ."""
    ties = max(1, min(_TIES, _WORK // max(1, len(search.sizes))))
    kept: list[tuple[State, tuple[Halving, ...]]] = [(search.uncut, ())]
    for cut in range(cuts):
        most = ties if cut < cuts - 1 else 1  # after the last cut, any of them
        found = [(*search.cheapest(state, most=most), state, before) for state, before in kept]
        least = min(elements for elements, *_ in found)
        each = -(-most // sum(elements == least for elements, *_ in found))
        ways = (
            (state.after(choice), (*before, Halving(choice.schemes, choice.indices, elements)))
            for elements, choices, state, before in found
            if elements == least
            for (choice,) in islice(choices, each)
        )
        kept = list(islice(ways, most))
    return kept[0][1]


def _joint(search: Search, cuts: int, batch: str = "") -> tuple[Halving, ...]:
    if not search.uniform and (cells := search.cells**cuts) > _CELLS:
        raise PlanError(
            f"all {cuts} cuts of {len(search.operators.steps)} operators at once were asked for, whose largest table "
            f"would have about {cells:.1g} entries, more than {_CELLS:.1g}; use 'recursive'"
        )
    return _counted(search, next(search.cheapest(search.uncut, cuts)[1]) if cuts else ())


def _counted(search: Search, choices: Iterable[Choice]) -> tuple[Halving, ...]:
    state, found = search.uncut, []
    for choice in choices:
        found.append(Halving(choice.schemes, choice.indices, search.elements(state, choice)))
        state = state.after(choice)
    return tuple(found)


def _equal(search: Search, cuts: int, batch: str) -> tuple[Halving, ...]:
    return _joint(Search(search.operators, search.allowed, uniform=True), cuts)


def _without_reduction(search: Search, cuts: int, batch: str) -> tuple[Halving, ...]:
    """Cuts no index that is reduced, where there is another (as in Jia et al., ICML 2018)."""

    def only(one: Variable, own: Any) -> Sequence[Any]:
        found = search.allowed(one, own)
        if isinstance(one, str):
            return found
        reduced = search.operators.steps[one].reduced
        return [index for index in found if index not in reduced] or found

    return _recursive(Search(search.operators, only), cuts)


def _along(search: Search, cuts: int, batch: str, *, at: int) -> tuple[Halving, ...]:
    """Cuts every tensor along its first or last dimension."""

    def only(one: Variable, own: Any) -> Sequence[Any]:
        if not isinstance(one, str):
            return all_choices(search.operators, one, own)
        return [at % len(own)] if own else [None]

    return _recursive(Search(search.operators, only), cuts)


def _data(search: Search, cuts: int, batch: str) -> tuple[Halving, ...]:
    """Cuts what has the batch along it; everything else is whole, and computed by all."""
    dimension, index = _samples(search.operators, batch)

    def only(one: Variable, own: Any) -> Sequence[Any]:
        if isinstance(one, str):
            return [dimension.get(one)]
        # Where samples are the inner of merged dimensions, halves of them are no parts.
        name = index.get(one)
        return [name if name in all_choices(search.operators, one, own) else None]

    return _recursive(Search(search.operators, only), cuts)


def _samples(operators: Operators, batch: str) -> tuple[dict[str, int], dict[int, str]]:
    """Returns the dimension of each tensor and the index of each operator that count the samples.

    Args:
        batch: that index in all operators, or an input whose first dimension it is. From the input it leads to the
            operators that have an index there, and to their other tensors.
    """
    steps = operators.steps
    group = {name: names for names in operators.groups for name in names}
    index = {at: batch for at, step in enumerate(steps) if batch in step.sizes}
    dimension = {} if index else dict.fromkeys(group[batch], 0)
    waiting = dict.fromkeys(range(len(steps)))
    uses: dict[str, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        for access in step.accesses:
            uses[access.tensor].append(number)
    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        places = [
            (max(one.terms, key=lambda term: term[1])[0], access.tensor, at)  # of a merged dimension the slowest
            for access in steps[number].accesses
            for at, one in enumerate(access.indices)
            if one is not None and one.terms and not one.offset
        ]
        name = index.get(number) or next((name for name, tensor, at in places if dimension.get(tensor) == at), None)
        if name is None:
            continue
        index[number] = name
        for other, tensor, at in places:
            if other == name and tensor not in dimension:
                dimension |= dict.fromkeys(group[tensor], at)
                waiting |= dict.fromkeys(number for one in group[tensor] for number in uses[one])
    return dimension, index


def _spartan(search: Search, cuts: int, batch: str) -> tuple[Halving, ...]:
    """Lets one tensor after the other, the largest first, take its cheapest scheme (Huang et al., ATC 2015)."""

    def each() -> Iterator[Choice]:
        state = search.uncut
        for _ in range(cuts):
            yield (choice := search.greedy(state))
            state = state.after(choice)

    return _counted(search, each())


_Method = Callable[[Search, int, str], tuple[Halving, ...]]

METHODS: Mapping[str, _Method] = {
    "recursive": _recursive,
    "joint": _joint,
    "all-row": partial(_along, at=0),
    "spartan": _spartan,
    "equal": _equal,
    "no-reduction": _without_reduction,
    "data": _data,
    "model": partial(_along, at=-1),
}
"""Name -> what finds the cuts."""


def _bound(search: Search, cuts: int) -> int:
    """Returns elements that any partition moves: what the first cuts do together, as many as can be searched."""
    together = max((at for at in range(1, cuts + 1) if search.cells**at <= _CELLS), default=min(cuts, 1))
    try:
        return search.cheapest(search.uncut, together)[0] if cuts else 0
    except PlanError:
        return 0  # too large to search: nothing is known
