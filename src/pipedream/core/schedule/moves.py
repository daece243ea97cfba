"""What ranks do beside ops: messages, sums over ranks, waits, updates by a thread. A `Move` is a kind of it.

Lowering places moves, the proof refuses a program that lacks one, the clock and the worker do what the text says. The
library's are below; a method may have others (`Rules.moves`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.op import Kind, Op

if TYPE_CHECKING:
    from pipedream.core.schedule.rules import Rules

Place = Callable[["Rules", int, Op, bool], Iterable[int]]


@dataclass(frozen=True, eq=False, repr=False)
class Move:
    """A kind of what ranks do beside ops; there is one object of each.

    Attributes:
        value: signs that come before the numbers in a program's text.
        words, when: description, which the index follows.
        kind: of the ops to which it belongs, and whose indices it has.
        place: (rules, rank, op, is_first) -> its numbers beside an op; none where it does not belong. `is_first`: the
            rank has not yet made an update with the index of this one; after an op it is always true.
        follows: it comes directly after the op, not before.
        counts: what its number is.
        is_joint: the ranks that have it wait for each other.
        run: (worker, number, index) -> what the worker waits for; None if it is done. For a method's own moves. Without
            it all workers wait for each other. If the move is joint, it must wait for the other ranks itself.

    Raises:
        ScheduleError: the library has these signs; it has no `run` and is no barrier; or its number is of no stage,
            although it is not joint.
    """

    value: str
    words: str
    when: str
    kind: Kind
    _: KW_ONLY
    place: Place | None = None
    follows: bool = False
    counts: Literal["stages", "channels", "tied weights", "all ranks"] = "stages"
    is_joint: bool = False
    run: Callable[[Any, int, int], Any] | None = None

    by_signs: ClassVar[dict[str, Move]] = {}
    """The library's, and those of files that were run."""

    def __post_init__(self) -> None:
        if not LIBRARY:  # one of those below
            self.by_signs[self.value] = self
            return
        if self.run is None and not (self.is_joint and self.at_updates and self.counts == "all ranks"):
            raise ScheduleError(
                f"the move {self.words!r} has no `run`; give it one, or let all ranks wait for each other at an update "
                "(is_joint=True, counts='all ranks')"
            )
        if not (self.is_joint or self.at_stages):
            raise ScheduleError(
                f"the move {self.words!r} counts {self.counts}, and its ranks do not wait for each other; leave "
                "`counts` out, and number it by the stage of its op"
            )
        if self.value in LIBRARY or not re.fullmatch(r"[^\w\s]+", self.value):
            raise ScheduleError(f"a move has the signs {self.value!r}; give signs other than {' '.join(LIBRARY)}")
        self.by_signs[self.value] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Move.by_signs.__getitem__, (self.value,)

    @property
    def at_stages(self) -> bool:
        return self.counts == "stages"

    @property
    def at_updates(self) -> bool:
        """Whether its index is an update, not a microbatch."""
        return self.kind is Kind.UPDATE


LIBRARY: dict[str, Move] = {}
"""The library's moves by their signs: those of this file."""


class Transfer(NamedTuple):
    """One move of a rank.

    Attributes:
        channel: a channel, a stage, a number in `Plan.tied_weights`, or 0 for all ranks: see `Move.counts`.
        index: of a microbatch, or of an update.
    """

    kind: Move
    channel: int
    index: int  # type: ignore[assignment]  # a field, not the method of tuples

    def __str__(self) -> str:
        return f"{self.kind.value}{self.channel}:{self.index}"


def list_joint_stages(rules: Rules, rank: int, stage: int) -> list[int]:
    """Returns the stages of a rank whose gradients must be there before an update of one of them."""
    return [joined for joined, _ in rules.placement.stage_replicas(rank)] if _is_coupled(rules, rank) else [stage]


def needs_join(rules: Rules, rank: int, op: Op, join: Transfer) -> bool:
    """Returns whether an update that a thread makes must have been made before an op of its rank.

    A pass may read its version. An update takes gradients: those of all stages whose updates are made together.
    """
    _, stage, update = join
    if op.kind is Kind.UPDATE:
        return update < op.index and stage in list_joint_stages(rules, rank, op.stage)
    return op.stage == stage and rules.find_awaited_version(op) >= update


def _is_coupled(rules: Rules, rank: int) -> bool:
    return rules.couples_updates or any(rank in weights.ranks(rules.placement) for weights in rules.plan.tied_weights)


def _fetch_weights(rules: Rules, rank: int, op: Op, is_first: bool) -> list[int]:
    copied = rules.placement.passes_on_copies(rank, forward=True)
    return [op.stage] if any(stage == op.stage for stage, _ in copied) else []


def _fetch_buffers(rules: Rules, rank: int, op: Op, is_first: bool) -> list[int]:
    # The last stage's forward has already waited for the buffers, which it changes.
    placement = rules.placement
    begins_turn = placement.rotates and op.index % placement.turn == 0 and placement.runs_backward_elsewhere(op.stage)
    return [op.stage] if begins_turn else []


def _fetch_gradients(rules: Rules, rank: int, op: Op, is_first: bool) -> list[int]:
    if not rules.placement.rotates or (_is_coupled(rules, rank) and not is_first):
        return []
    return list_joint_stages(rules, rank, op.stage)


def _sum_gradients(rules: Rules, rank: int, op: Op, is_first: bool) -> list[int]:
    return [op.stage] if rules.placement.replicas[op.stage] > 1 else []


def _sum_tied(rules: Rules, rank: int, op: Op, is_first: bool) -> list[int]:
    tied = enumerate(rules.plan.tied_weights if is_first else ())
    return [number for number, weights in tied if rank in weights.ranks(rules.placement)]


def _sum_norms(rules: Rules, rank: int, op: Op, is_first: bool) -> list[int]:
    return [0] if rules.couples_updates and is_first else []


def _average(rules: Rules, rank: int, op: Op, is_first: bool) -> list[int]:
    return _sum_gradients(rules, rank, op, is_first) if rules.plan.choices.sums.averages_weights else []


_FORWARD, _BACKWARD, _UPDATE = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
SEND = Move(">", "sending", "of microbatch", _FORWARD, counts="channels")
RECEIVE = Move("<", "receiving", "of microbatch", _FORWARD, counts="channels")
SYNC = Move("=", "sum over the replicas", "for update", _UPDATE, place=_sum_gradients, is_joint=True)
TIED = Move(
    *("~", "sum over the holders of tied weights", "for update", _UPDATE),
    place=_sum_tied,
    counts="tied weights",
    is_joint=True,
)
NORM = Move(
    *("|", "sum of norms over all ranks", "for update", _UPDATE), place=_sum_norms, counts="all ranks", is_joint=True
)
FETCH_WEIGHTS = Move("^F", "waiting for the weights", "of microbatch", _FORWARD, place=_fetch_weights)
FETCH_BUFFERS = Move("^B", "waiting for the buffers", "before microbatch", _BACKWARD, place=_fetch_buffers)
FETCH_GRADIENTS = Move("^U", "waiting for the gradients", "of update", _UPDATE, place=_fetch_gradients)
REPEAT = Move("*", "repeating the forward", "of microbatch", _BACKWARD)
BEGIN_SUM = Move("+", "beginning the sum in the backward", "of microbatch", _BACKWARD)
BEGIN_UPDATE = Move("{", "beginning", "update", _UPDATE)
JOIN_UPDATE = Move("}", "finishing", "update", _UPDATE)
AVERAGE = Move("@", "average over the replicas", "after update", _UPDATE, place=_average, follows=True, is_joint=True)
LIBRARY |= Move.by_signs

FETCHES = (FETCH_WEIGHTS, FETCH_BUFFERS, FETCH_GRADIENTS)
"""Waits for what other ranks leave in memory that they share, before an op of their kind reads it."""


def list_waits(rules: Rules, rank: int, op: Op, *, is_first: bool = True) -> list[Transfer]:
    """Returns the moves of a rank directly before an op, besides messages.

    Before an update of which no other stage on the rank has the same index (`is_first`), that is all that its updates
    with this index wait for together: sums over several stages, for which the gradients of all stages must be there.
    """
    if op.kind is not Kind.UPDATE and not rules.placement.forwards and not rules.moves:
        return []  # each rank has its stages' weights
    return _list_placed(rules, rank, op, is_first, _BEFORE)


def list_ends(rules: Rules, rank: int, op: Op) -> list[Transfer]:
    """Returns the moves of a rank directly after an op, besides messages."""
    return _list_placed(rules, rank, op, True, _AFTER)


def _list_placed(rules: Rules, rank: int, op: Op, is_first: bool, moves: tuple[Move, ...]) -> list[Transfer]:
    if rules.moves:
        moves = (*moves, *(move for move in rules.moves if move.follows == (moves is _AFTER)))
    return [
        Transfer(move, number, op.index)
        for move in moves
        if move.kind is op.kind and move.place
        for number in move.place(rules, rank, op, is_first)
    ]


_BEFORE = (FETCH_WEIGHTS, FETCH_BUFFERS, FETCH_GRADIENTS, SYNC, TIED, NORM)  # in the order in which they come
_AFTER = (AVERAGE,)
