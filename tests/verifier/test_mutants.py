"""Programs changed at random: what provably breaks is refused by name, and what is accepted trains as it should.

The second half is what makes the first worth something: the proof decides, and whatever it lets pass is run by the
real runtime and compared with plain PyTorch, or with the serial loop of the method's published rule.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from heapq import heappop, heappush
from math import copysign

import cases
import pytest
from cases import Case
from hypothesis import assume, given, settings, strategies as st
from marks import slow, spread, thinned
from programs import program_of, with_rank

import pipedream as pd
from pipedream.core.schedule import moves
from pipedream.core.schedule.program import Instruction, RankProgram

RULES = ("flush", "stash", "vertical_sync", "double_buffer", "stamped", "interpolated")
GIVES = (pd.schedules.Kind.BACKWARD, pd.schedules.Kind.WEIGHT_GRADIENT)
REPLICAS = ((1, 1), (1, 1, 1), (2, 1), (1, 2))


@cache
def make_program(name: str, which: int) -> pd.Program:
    """Returns a small program of a method."""
    if pd.schedules.uniform(name, 2).worker_order:  # stages share workers
        workers = 2 + 2 * (which % 2)
        return program_of(name, pd.schedules.uniform(name, workers), 2 * workers)
    plan = pd.Plan.uniform(len(REPLICAS[which]), replicas=REPLICAS[which])
    schedule = pd.schedules.build(name, plan)
    return pd.lower(pd.schedules.build(name, plan, 4) if schedule.microbatches > 1 else schedule)


names = st.sampled_from(sorted(pd.schedules.SCHEDULES))
ruled = st.sampled_from([name for name in pd.schedules.SCHEDULES if make_program(name, 0).weights.name in RULES])
numbers = st.integers(0, len(REPLICAS) - 1)


@dataclass(frozen=True)
class Place:
    """Where an instruction stands in a program's text."""

    program: pd.Program = field(repr=False)
    rank: int
    part: str
    index: int

    @property
    def items(self) -> list[Instruction]:
        """The part of the text that it stands in."""
        return list(getattr(self.program.ranks[self.rank], self.part))

    @property
    def item(self) -> Instruction:
        return self.items[self.index]

    def put(self, items: list[Instruction]) -> pd.Program:
        """Returns the program with another text in place of that part."""
        return with_rank(self.program, self.rank, **{self.part: tuple(items)})

    def swap(self, other: int) -> pd.Program:
        items = self.items
        items[other], items[self.index] = items[self.index], items[other]
        return self.put(items)

    def move(self, to: int) -> pd.Program:
        items = self.items
        items.insert(to, items.pop(self.index))
        return self.put(items)


def places(program: pd.Program) -> list[Place]:
    parts = [(rank, part) for rank in range(len(program.ranks)) for part in ("warmup", "period")]
    return [
        Place(program, rank, part, index) for rank, part in parts
        for index in range(len(getattr(program.ranks[rank], part)))
    ]  # fmt: skip


def reason(program: pd.Program) -> str:
    """Returns why a program is refused; '' if it is accepted."""
    try:
        pd.verify(program)
    except pd.errors.ScheduleError as error:
        return str(error)
    return ""


def refused(program: pd.Program, *named: Instruction | None) -> str:
    """Checks that a program is refused, and that one of these instructions is named (by its text)."""
    text = reason(program)
    assert text, "it was accepted"
    words = {re.sub(r"\d+$", "", str(item)) for item in named if item is not None}
    assert not words or any(word in text for word in words), f"none of {words} in: {text}"
    assert re.search(r"rank \d", text)
    return text


@pytest.mark.parametrize("times", [0, 2])
@given(names, numbers, st.data())
def test_an_instruction_dropped_or_doubled(times: int, name: str, which: int, data: st.DataObject) -> None:
    program = make_program(name, which)
    place = data.draw(st.sampled_from(places(program)))
    items = place.items
    if times:
        items.insert(data.draw(st.integers(0, len(items))), place.item)
    else:
        items.pop(place.index)
    refused(place.put(items), *near(program, place.item))


def near(program: pd.Program, item: Instruction) -> Iterator[Instruction]:
    """Yields an instruction and those that an error may name in its place: an op's messages, the other end of a
    message, the op that lacks it, the update that lacks a sum."""
    yield item
    if isinstance(item, pd.schedules.Op):
        # Its messages are then without what makes them, or what reads them.
        for number in range(len(program.channels)):
            yield moves.Transfer(moves.SEND, number, 0)
            yield moves.Transfer(moves.RECEIVE, number, 0)
        yield item._replace(kind=pd.schedules.Kind.UPDATE)
    elif item.kind is moves.SYNC:
        yield pd.schedules.Op(pd.schedules.Kind.UPDATE, item.channel, item.index)
    else:
        ends = program.channels[item.channel]
        yield item._replace(kind=moves.RECEIVE if item.kind is moves.SEND else moves.SEND)
        yield pd.schedules.Op(
            pd.schedules.Kind.BACKWARD if ends.carries == "gradient" else pd.schedules.Kind.FORWARD,
            ends.target,
            item.index,
        )


def refuse_swap(program: pd.Program, data: st.DataObject, clash: Callable[[Instruction, Instruction], bool]) -> None:
    """Swaps two instructions of a rank, the later of which clashes with the earlier one."""
    pairs = [
        (place, i) for place in places(program) for i, two in enumerate(place.items[: place.index])
        if clash(place.item, two)
    ]  # fmt: skip
    assume(pairs)
    place, i = data.draw(st.sampled_from(pairs))
    refused(place.swap(i), *near(program, place.item), *near(program, place.items[i]))


@given(names, numbers, st.data())
def test_two_dependent_ops_swapped(name: str, which: int, data: st.DataObject) -> None:
    """Of two ops of one rank, of which one needs the other."""
    program = make_program(name, which)
    refuse_swap(program, data, lambda op, need: isinstance(op, pd.schedules.Op) and need in program.requires(op))


@given(names, numbers, st.data())
def test_a_message_out_of_line(name: str, which: int, data: st.DataObject) -> None:
    """Two messages of a channel change places, at one of its ends."""
    messages = (moves.SEND, moves.RECEIVE)
    program = make_program(name, which)
    refuse_swap(program, data, lambda item, two: item.kind in messages and item[:2] == two[:2] and item != two)


def shifted(rule: pd.schedules.WeightRule, by: int, only: int = 1, keeps: int = 0) -> pd.schedules.WeightRule:
    """Returns a rule whose forwards read later or earlier versions, each or each `only`th, and that keeps more."""

    def forward_version(_: pd.schedules.WeightRule, stage: int, microbatch: int) -> int:
        version = rule.forward_version(stage, microbatch)
        return max(0, version + by) if microbatch % only == only - 1 else version

    def versions(_: pd.schedules.WeightRule, stage: int) -> int:
        return rule.versions(stage) + keeps

    return changed_rule(rule, "shifted", forward_version=forward_version, versions=versions)


def changed_rule(rule: pd.schedules.WeightRule, name: str, **methods: Callable[..., int]) -> pd.schedules.WeightRule:
    try:
        kind = type("Changed", (type(rule),), {"name": name, **methods})
        changed: pd.schedules.WeightRule = kind(**{field.name: getattr(rule, field.name) for field in fields(rule)})
        return changed
    finally:
        del pd.schedules.WeightRule.kinds[name]


@given(ruled, numbers)
def test_a_version_too_new_or_too_old(name: str, which: int) -> None:
    program = make_program(name, which)
    text = refused(replace(program, weights=shifted(program.weights, +1)))
    assert re.search(r"\dF\d+: needs \dU\d+, which comes later|>\d+:\d+: \dU\d+, which makes it, does not come", text)
    text = refused(replace(program, weights=shifted(program.weights, -1)))
    pattern = r"versions of stage \d's weights exist at once, its weight rule 'shifted' keeps"
    assert re.search(rf"{pattern}|sends version \d+, in whose place \dU\d+ has written", text)
    # Dropped too early: one less than are read.
    text = refused(replace(program, weights=shifted(program.weights, 0, keeps=-1)))
    assert "versions of stage" in text
    pd.verify(replace(program, weights=shifted(program.weights, 0)))


@given(ruled, st.integers(0, 1), st.integers(2, 3))
def test_versions_that_fall(name: str, which: int, only: int) -> None:
    program = make_program(name, which)
    assume(max(program.placement.replicas) == 1)  # each replica drops versions by itself
    text = refused(replace(program, weights=shifted(program.weights, -2, only=only, keeps=9)))
    assert re.search(r"\dF\d+: weight rule 'shifted' reads version \d+, but version \d+ for an earlier", text)


def test_a_backward_at_other_weights_than_its_rule_says() -> None:
    def backward_version(rule: pd.schedules.WeightRule, stage: int, microbatch: int) -> int:
        return rule.forward_version(stage, microbatch) + (microbatch > 6 and stage == 0)

    program = make_program("pipedream", 1)
    why = reason(replace(program, weights=changed_rule(program.weights, "newer", backward_version=backward_version)))
    assert re.search("0F7: .* 'newer' reads version 5 here and version 6 in the backward", why)


def with_update(schedule: pd.Schedule, stage: int, late: int) -> pd.Schedule:
    """Returns a schedule whose updates of a stage come that many ops of its rank later, or earlier."""

    def order(rank: int) -> Iterator[pd.schedules.Op]:
        window: list[tuple[float, pd.schedules.Op]] = []
        for number, op in enumerate(schedule.order(rank)):
            is_moved = op.kind is pd.schedules.Kind.UPDATE and op.stage == stage
            heappush(window, (number + is_moved * (late + copysign(0.5, late)), op))
            if len(window) > 8:
                yield heappop(window)[1]

    return replace(schedule, order=order)


@given(names, numbers, st.integers(0, 2), st.data())
def test_an_update_too_early(name: str, which: int, more: int, data: st.DataObject) -> None:
    """Before the last of its own gradients, and up to two ops more."""
    program = make_program(name, which)
    m = program.microbatches
    schedule = pd.schedules.build(program.name, program.plan, m if m > 1 else None)
    stage = data.draw(st.integers(0, len(program.plan.stages) - 1))
    ops = list(schedule.ops(schedule.placement.ranks[stage][0], 4 * schedule.cycle))
    at = next(i for i, op in enumerate(ops) if (op.kind, op.stage, op.index) == (pd.schedules.Kind.UPDATE, stage, 2))
    last = max(i for i, op in enumerate(ops[:at]) if op.kind in GIVES and op.stage == stage)
    text = refused(pd.lower(with_update(schedule, stage, last - at - more)))
    assert re.search(rf"{stage}U\d+: needs {stage}[BW]\d+, which comes later", text)


def test_an_update_after_a_gradient_of_the_next_one() -> None:
    """PipeDream-2BW's second buffer leaves time for an update, but later gradients belong to the next one."""
    schedule = pd.schedules.build("pipedream_2bw", pd.Plan.uniform(2), 2)
    pd.verify(pd.lower(with_update(schedule, 1, 1)))  # after the next forward
    why = reason(pd.lower(with_update(schedule, 1, 2)))
    assert "1U1: 1B2 comes before it, but its gradient is for update 2" in why


def test_sums_and_targets_that_nobody_asked_for() -> None:
    program = make_program("gpipe", 2)
    place = Place(program, 0, "period", 0)
    for update in (0, 7, 10**9):
        why = reason(place.put([*place.items, moves.Transfer(moves.SYNC, 0, update)]))
        assert re.search(r"rank 0, .*=0:\d+: .*this sum|rank 0 has the instruction =0:\d+", why)
    channels = tuple(channel for channel in program.channels if channel.carries != "input")
    assert channels == program.channels[: len(channels)]

    def kept(part: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        return tuple(item for item in part if not isinstance(item, moves.Transfer) or item.channel < len(channels))

    ranks = tuple(RankProgram(kept(mine.warmup), kept(mine.period)) for mine in program.ranks)
    why = reason(replace(program, channels=channels, ranks=ranks))
    assert "1F0: needs 0F0 of rank 0, but no channel brings its input" in why


def test_forwards_out_of_order() -> None:
    program = make_program("gpipe", 0)
    swapped = {0: 1, 1: 0, 2: 2, 3: 3}

    def other(item: Instruction) -> Instruction:
        backwards = item.kind is pd.schedules.Kind.BACKWARD or item.kind is pd.schedules.Kind.UPDATE
        if isinstance(item, moves.Transfer):
            backwards = program.channels[item.channel].carries == "gradient"
        return item if backwards else item._replace(index=swapped[item.index])

    ranks = tuple(RankProgram((), tuple(map(other, mine.period))) for mine in program.ranks)
    why = reason(replace(program, ranks=ranks))
    assert "0F0: comes after 0F1; microbatches are forwarded in their order" in why


RUNS = (
    Case("mlp", "naive", 3, microbatches=2),
    Case("mlp", "gpipe", 3, microbatches=3),
    Case("mlp", "gpipe", 2, replicas=(2, 1), microbatches=4),
    Case("mlp", "1f1b", 3, microbatches=4),
    Case("mlp", "1f1b", 2, replicas=(1, 2), microbatches=4, clip_grad_norm=0.1),
    Case("mlp", "interleaved_1f1b", 4, microbatches=4),
    Case("mlp", "roundpipe", 4, workers=3, microbatches=3),
    Case("mlp", "pipedream", 3),
    Case("mlp", "pipedream", 3, depth=(5, 3, 1)),
    Case("mlp", "pipedream", 2, replicas=(2, 1)),
    Case("mlp", "pipedream_vertical_sync", 3),
    Case("mlp", "pipedream_vertical_sync", 2, replicas=(1, 2)),
    Case("mlp", "pipedream_2bw", 3, microbatches=4),
    Case("mlp", "pipedream_2bw", 2, replicas=(2, 1), microbatches=4),
)


@cache
def of_case(case: Case) -> pd.Program:
    """Returns what a pipeline makes of a case."""
    couples = case.clip_grad_norm is not None
    return pd.lower(replace(pd.schedules.build(case.schedule, case.plan(), case.microbatches), couples_updates=couples))


@st.composite
def accepted(draw: st.DrawFn, case: Case) -> pd.Program:
    """Draws a program whose instructions stand in another order, in rings of other depths, and passes the proof."""
    program = of_case(case)
    moved = 0
    for _ in range(draw(st.integers(2, 12))):
        place = draw(st.sampled_from(places(program)))
        changed = place.move(max(0, min(len(place.items) - 1, place.index + draw(st.integers(-6, 6)))))
        if changed != program and not reason(changed):
            program, moved = changed, moved + 1
    depths = draw(st.lists(st.integers(1, 3), min_size=len(program.channels), max_size=len(program.channels)))
    for number, depth in enumerate(depths):
        channels = list(program.channels)
        channels[number] = replace(channels[number], depth=depth)
        changed = replace(program, channels=tuple(channels))
        program = program if reason(changed) else changed
    assume(moved)
    return program


QUICK = [Case("mlp", "interleaved_1f1b", 4, microbatches=4), *(case for case in RUNS if case.replicas == (1, 2))]


@pytest.mark.parametrize(
    "case", spread([*thinned(QUICK, 3), *(slow(case) for case in RUNS if case not in QUICK)], every=4), ids=str
)
@settings(max_examples=2)
@given(data=st.data())
def test_an_accepted_program_trains_as_it_should(case: Case, data: st.DataObject) -> None:
    """With a drain in between, compared with plain PyTorch or the method's own rule."""
    program, case = data.draw(accepted(case)), replace(case, epochs=2, evaluate_at=(3,))

    def lower(schedule: pd.Schedule) -> pd.Program:
        return pd.lower(schedule) if schedule.name == "evaluation" else program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipedream.workflows.prepare.lower", lower)
        outcome = cases.run(case)
    cases.check(case, outcome)
    assert len(outcome.drains) == 2
