"""Partitions a step over 2**k ranks by k cuts (Tofu, Wang et al., EuroSys 2019), and by the baselines of its paper."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.extensions.meshes.layouts.description.operators import Operators
from pipedream.extensions.meshes.layouts.search.minimise import Variable
from pipedream.extensions.meshes.layouts.search.search import Halving, Search, State, list_choices

_TIES = 256
"""Equally cheap cuts that the recursion follows, in a step of a few operators."""
_WORK = 30_000
"""Ties times variables, which bounds the time for larger ones."""
_CELLS = 4_000_000
"""The most cells of a table of `joint`."""


@dataclass(frozen=True)
class Partition:
    """The cuts that a search has found.

    Attributes:
        at_least: no partition that cuts each operator moves fewer elements: the number of `joint` where that was
            searched, else a bound. "data" leaves operators without the batch whole, and may move fewer.
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
    is_known = batch in operators.inputs or any(batch in step.sizes for step in operators.steps)
    if not is_known and (batch or method == "data"):
        raise PlanError(
            f"the partition method {method!r} was asked for with the batch index {batch!r}, which no operator has; "
            "give the index of the samples, such as batch='b', or an input whose first dimension counts them"
        )
    if method == "data" and not replicate:
        raise PlanError(
            "the partition method 'data' was asked for without replicas, but it keeps weights whole; take another one"
        )
    search = Search(operators, None if replicate else partial(_list_choices_without_replicas, operators))
    cuts = METHODS[method](search, ranks.bit_length() - 1, batch)
    draft = Partition(method, ranks, cuts, 0)
    return replace(
        draft, at_least=draft.elements if method == "joint" else min(draft.elements, _bound(search, len(cuts)))
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


def complete_partition(operators: Operators, ranks: int, fixed: Mapping[str, Sequence[int | None]]) -> Partition:
    """Returns a recursive partition in which the `fixed` tensors, and those alike, have the schemes given there."""
    group = {name: names[0] for names in operators.groups for name in names}
    schemes = {group[name]: cuts for name, cuts in fixed.items()}

    def allowed(at: int, variable: Variable, part: Any) -> Sequence[Any]:
        return [schemes[variable][at]] if variable in schemes else list_choices(operators, variable, part)

    state, halvings = State.uncut(operators), []
    for at in range(ranks.bit_length() - 1):
        elements, choices = Search(operators, partial(allowed, at)).find_cheapest(state)
        (choice,) = next(choices)
        halvings.append(replace(choice, elements=elements))
        state = state.after(choice)
    return Partition("recursive", ranks, tuple(halvings), 0)


def _list_choices_without_replicas(operators: Operators, variable: Variable, part: Any) -> Sequence[Any]:
    choices = list_choices(operators, variable, part)
    if not isinstance(variable, str):
        return choices
    return [cut for cut in choices if cut is not None and len(part[cut]) % 2 == 0] or [None]


def _search_recursively(search: Search, cuts: int, batch: str = "") -> tuple[Halving, ...]:
    """Makes one cut after the other, each at the least cost, and follows ties until they differ."""
    ties = max(1, min(_TIES, _WORK // max(1, len(search.sizes))))
    cheapest: list[tuple[State, tuple[Halving, ...]]] = [(search.uncut, ())]
    for cut in range(cuts):
        most = ties if cut < cuts - 1 else 1  # after the last cut, any of them
        candidates = [(*search.find_cheapest(state, most=most), state, before) for state, before in cheapest]
        least = min(elements for elements, *_ in candidates)
        ways_per_tie = -(-most // sum(elements == least for elements, *_ in candidates))
        ways = (
            (state.after(choice), (*before, replace(choice, elements=elements)))
            for elements, choices, state, before in candidates
            if elements == least
            for (choice,) in islice(choices, ways_per_tie)
        )
        cheapest = list(islice(ways, most))
    return cheapest[0][1]


def _search_jointly(search: Search, cuts: int, batch: str = "") -> tuple[Halving, ...]:
    if not search.uniform and (cells := search.cells**cuts) > _CELLS:
        raise PlanError(
            f"all {cuts} cuts of {len(search.operators.steps)} operators at once were asked for, whose largest table "
            f"would have about {cells:.1g} entries, more than {_CELLS:.1g}; use 'recursive'"
        )
    return _count_moves(search, next(search.find_cheapest(search.uncut, cuts)[1]) if cuts else ())


def _count_moves(search: Search, choices: Iterable[Halving]) -> tuple[Halving, ...]:
    state, halvings = search.uncut, []
    for choice in choices:
        halvings.append(replace(choice, elements=search.count_elements(state, choice)))
        state = state.after(choice)
    return tuple(halvings)


def _search_without_reduction(search: Search, cuts: int, batch: str) -> tuple[Halving, ...]:
    """Cuts no index that is reduced, where there is another (as in Jia et al., ICML 2018)."""

    def only(variable: Variable, part: Any) -> Sequence[Any]:
        choices = search.allowed(variable, part)
        if isinstance(variable, str):
            return choices
        reduced = search.operators.steps[variable].reduced
        return [index for index in choices if index not in reduced] or choices

    return _search_recursively(Search(search.operators, only), cuts)


def _shard_along(search: Search, cuts: int, batch: str, *, at: int) -> tuple[Halving, ...]:
    """Cuts every tensor along its first or last dimension."""

    def only(variable: Variable, part: Any) -> Sequence[Any]:
        if not isinstance(variable, str):
            return list_choices(search.operators, variable, part)
        return [at % len(part)] if part else [None]

    return _search_recursively(Search(search.operators, only), cuts)


def _shard_batch(search: Search, cuts: int, batch: str) -> tuple[Halving, ...]:
    """Cuts what has the batch along it; everything else is whole, and computed by all."""
    dimension, index = _locate_samples(search.operators, batch)

    def only(variable: Variable, part: Any) -> Sequence[Any]:
        if isinstance(variable, str):
            return [dimension.get(variable)]
        # Where samples are the inner of merged dimensions, halves of them are no parts.
        name = index.get(variable)
        return [name if name in list_choices(search.operators, variable, part) else None]

    return _search_recursively(Search(search.operators, only), cuts)


def _locate_samples(operators: Operators, batch: str) -> tuple[dict[str, int], dict[int, str]]:
    """Returns the dimension of each tensor and the index of each operator that count the samples.

    `batch` is that index in all operators, or an input whose first dimension it is. From the input it leads to the
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
            (max(expression.terms, key=lambda term: term[1])[0], access.tensor, at)  # of a merged dimension the slowest
            for access in steps[number].accesses
            for at, expression in enumerate(access.indices)
            if expression is not None and expression.terms and not expression.offset
        ]
        name = index.get(number) or next((name for name, tensor, at in places if dimension.get(tensor) == at), None)
        if name is None:
            continue
        index[number] = name
        for other, tensor, at in places:
            if other == name and tensor not in dimension:
                dimension |= dict.fromkeys(group[tensor], at)
                waiting |= dict.fromkeys(number for member in group[tensor] for number in uses[member])
    return dimension, index


def _search_greedily(search: Search, cuts: int, batch: str) -> tuple[Halving, ...]:
    """Lets one tensor after the other, the largest first, take its cheapest scheme (Huang et al., ATC 2015)."""

    def yield_choices() -> Iterator[Halving]:
        state = search.uncut
        for _ in range(cuts):
            yield (choice := search.choose_greedily(state))
            state = state.after(choice)

    return _count_moves(search, yield_choices())


_Method = Callable[[Search, int, str], tuple[Halving, ...]]

METHODS: Mapping[str, _Method] = {
    "recursive": _search_recursively,
    "joint": _search_jointly,
    "all-row": partial(_shard_along, at=0),
    "spartan": _search_greedily,
    "equal": lambda search, cuts, batch: _search_jointly(Search(search.operators, search.allowed, uniform=True), cuts),
    "no-reduction": _search_without_reduction,
    "data": _shard_batch,
    "model": partial(_shard_along, at=-1),
}
"""Name -> what finds the cuts."""


def _bound(search: Search, cuts: int) -> int:
    """Returns elements that any partition moves: what the first cuts do together, as many as can be searched."""
    together = max((at for at in range(1, cuts + 1) if search.cells**at <= _CELLS), default=min(cuts, 1))
    try:
        return search.find_cheapest(search.uncut, together)[0] if cuts else 0
    except PlanError:
        return 0  # too large to search: nothing is known
