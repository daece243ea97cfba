"""Golden pictures: each method's staircase, as its paper draws it; tests/apps/report/test_grid.py has files'.

A forward and a backward take one slot each, an update and a message none; every op starts as early as its
worker and its needs allow. ``'`` marks an update after an op, ``.`` a slot in which the worker waits.
"""

import pytest

import pipedream as pd


def slots_of(schedule: pd.Schedule, slots: int) -> dict[pd.schedules.Op, int]:
    """Returns for each op the slot in which it starts; a flushing method does one minibatch."""
    workers = range(schedule.placement.workers)
    m = schedule.microbatches
    orders = [schedule.ops(rank, m) if schedule.flushes else schedule.order(rank) for rank in workers]
    total = m if schedule.flushes else None
    waiting = [next(order, None) for order in orders]
    free = [0] * len(orders)
    start: dict[pd.schedules.Op, int] = {}
    end: dict[pd.schedules.Op, int] = {}
    moving = True
    while moving:
        moving = False
        for rank in workers:
            op = waiting[rank]
            while op is not None and all(need in end for need in schedule.requires(op, total)):
                begins = max([free[rank], *(end[need] for need in schedule.requires(op, total))])
                if begins >= slots and op.kind is not pd.schedules.Kind.UPDATE:
                    op = None
                    break
                start[op] = begins
                free[rank] = end[op] = begins + (op.kind is not pd.schedules.Kind.UPDATE)
                op = next(orders[rank], None)
                moving = True
            waiting[rank] = op
    return start


def picture(schedule: pd.Schedule, slots: int) -> list[str]:
    """Returns one line a worker."""
    rows = [["."] * slots for _ in range(schedule.placement.workers)]
    for op, slot in slots_of(schedule, slots).items():
        rank = schedule.placement.ranks[op.stage][op.replica]
        if op.kind is pd.schedules.Kind.FORWARD:
            rank = schedule.placement.rank_of(op.stage, op.index, forward=True)
        if op.kind is pd.schedules.Kind.UPDATE:
            last = max(i for i in range(slots) if rows[rank][i] != ".")
            rows[rank][last] = rows[rank][last].rstrip("'") + "'"
        else:
            shared = len(schedule.placement.stage_replicas(rank)) > 1
            rows[rank][slot] = str(op) if shared else f"{op.kind.value}{op.index}"
    width = max(len(cell) for row in rows for cell in row)
    lines = []
    for rank, row in enumerate(rows):
        while row[-1] == ".":
            row.pop()
        lines.append(f"rank {rank} | " + " ".join(cell.ljust(width) for cell in row).rstrip())
    return lines


def golden(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


STAIRCASES = {
    ("naive", 2, 17): """
        rank 0 | F0  .   .   .   .   .   .   B0  F1  .   .   .   .   .   .   B1'
        rank 1 | .   F0  .   .   .   .   B0  .   .   F1  .   .   .   .   B1'
        rank 2 | .   .   F0  .   .   B0  .   .   .   .   F1  .   .   B1'
        rank 3 | .   .   .   F0  B0  .   .   .   .   .   .   F1  B1'
    """,
    ("gpipe", 4, 15): """
        rank 0 | F0  F1  F2  F3  .   .   .   .   .   .   B0  B1  B2  B3'
        rank 1 | .   F0  F1  F2  F3  .   .   .   .   B0  B1  B2  B3'
        rank 2 | .   .   F0  F1  F2  F3  .   .   B0  B1  B2  B3'
        rank 3 | .   .   .   F0  F1  F2  F3  B0  B1  B2  B3'
    """,
    ("1f1b", 8, 23): """
        rank 0 | F0  F1  F2  F3  .   .   .   B0  F4  B1  F5  B2  F6  B3  F7  B4  .   B5  .   B6  .   B7'
        rank 1 | .   F0  F1  F2  .   .   B0  F3  B1  F4  B2  F5  B3  F6  B4  F7  B5  .   B6  .   B7'
        rank 2 | .   .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3  F5  B4  F6  B5  F7  B6  .   B7'
        rank 3 | .   .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6  F7  B7'
    """,
    ("interleaved_1f1b", 4, 22): """
rank 0 | 0F0  0F1  0F2  0F3  4F0  4F1  4F2  4F3  .    .    .    4B0  .    4B1  .    4B2  .    4B3' 0B0  0B1  0B2  0B3'
rank 1 | .    1F0  1F1  1F2  1F3  5F0  5F1  5F2  5F3  .    5B0  .    5B1  .    5B2  .    5B3' 1B0  1B1  1B2  1B3'
rank 2 | .    .    2F0  2F1  2F2  2F3  6F0  6F1  6F2  6B0  6F3  6B1  .    6B2  .    6B3' 2B0  2B1  2B2  2B3'
rank 3 | .    .    .    3F0  3F1  3F2  3F3  7F0  7B0  7F1  7B1  7F2  7B2  7F3  7B3' 3B0  3B1  3B2  3B3'
    """,
    ("breadth_first", 4, 22): """
rank 0 | 0F0  0F1  0F2  0F3  4F0  4F1  4F2  4F3  .    .    .    .    .    .    4B0  4B1  4B2  4B3' 0B0  0B1  0B2  0B3'
rank 1 | .    1F0  1F1  1F2  1F3  5F0  5F1  5F2  5F3  .    .    .    .    5B0  5B1  5B2  5B3' 1B0  1B1  1B2  1B3'
rank 2 | .    .    2F0  2F1  2F2  2F3  6F0  6F1  6F2  6F3  .    .    6B0  6B1  6B2  6B3' 2B0  2B1  2B2  2B3'
rank 3 | .    .    .    3F0  3F1  3F2  3F3  7F0  7F1  7F2  7F3  7B0  7B1  7B2  7B3' 3B0  3B1  3B2  3B3'
    """,
    ("chimera_doubled", 8, 18): """
        rank 0 | 0F0  0F2  0F4  0F6  3F1  3F3  3B1  3B3  3F5  3F7  3B5  3B7  0B0  .    .    0B2  0B4  0B6'
        rank 1 | .    1F0  1F2  2F1  2F3  1F4  1F6  2F5  2F7  2B1  2B3  1B0  2B5  2B7  1B2  1B4  1B6'
        rank 2 | .    1F1  1F3  2F0  2F2  1F5  1F7  2F4  2F6  2B0  2B2  1B1  2B4  2B6  1B3  1B5  1B7'
        rank 3 | 0F1  0F3  0F5  0F7  3F0  3F2  3B0  3B2  3F4  3F6  3B4  3B6  0B1  .    .    0B3  0B5  0B7'
    """,
    ("zbv", 8, 22): """
rank 0 | 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7 0I0 0W0
rank 1 | .   1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1F6 1I0 1W0 6F4 6I3
rank 2 | .   .   2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0 5F4 5I2 5W2 2F6
rank 3 | .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1
    """,
    ("v_half", 8, 22): """
rank 0 | 0F0 0F1 0F2 .   .   .   .   7F0 7I0 7W0 0F3 .   7F1 7I1 7W1 0F4 .   7F2 7I2 7W2 0I0 0W0
rank 1 | .   1F0 1F1 .   .   .   6F0 1F2 .   6I0 6W0 6F1 1F3 .   6I1 6W1 6F2 1F4 1I0 6I2 6W2 6F3
rank 2 | .   .   2F0 2F1 .   5F0 .   .   2F2 5F1 5I0 5W0 .   2F3 5F2 5I1 5W1 2I0 2W0 2F4 5F3 5I2
rank 3 | .   .   .   3F0 4F0 3F1 4F1 .   .   3F2 .   4I0 4W0 4F2 3F3 3I0 4I1 4W1 4F3 3W0 3F4 3I1
    """,
    ("v_min", 8, 22): """
rank 0 | 0F0 0F1 .   .   .   .   .   7F0 7I0 7W0 0F2 .   .   7F1 7I1 0I0 7W1 0W0 0F3 7F2 7I2 0I1
rank 1 | .   1F0 .   .   .   .   6F0 1F1 .   6I0 6W0 .   6F1 1F2 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2
rank 2 | .   .   2F0 .   .   5F0 .   .   2F1 .   5I0 5F1 5W0 2I0 2F2 2W0 5I1 5F2 5W1 2I1 2F3 2W1
rank 3 | .   .   .   3F0 4F0 .   .   .   .   3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3
    """,
    ("dualpipev", 8, 22): """
rank 0 | 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 0F7 7I3 7W3 7F4 0I0
rank 1 | .   1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 1F6 6I2 6W2 6F4 1I0 1W0 1F7
rank 2 | .   .   2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 2F5 5I1 5W1 5F4 2I0 2W0 2F6 5I2 5W2
rank 3 | .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4I0 4W0 4F4 3I0 3W0 3F5 4I1 4W1 4F5 3I1
    """,
    ("chimera", 4, 10): """
        rank 0 | 0F0  0F2  .    3F1  3B1  3F3  3B3  0B0  .    0B2'
        rank 1 | .    1F0  2F1  1F2  2F3  2B1  1B0  2B3  1B2'
        rank 2 | .    1F1  2F0  1F3  2F2  2B0  1B1  2B2  1B3'
        rank 3 | 0F1  0F3  .    3F0  3B0  3F2  3B2  0B1  .    0B3'
    """,
    ("roundpipe", 4, 22): """
rank 0 | .    .    .    3F0  3F1  3F2  3F3  7F0  7B0  7F1  7B1  7F2  7B2  7F3  7B3' 3B0  3B1  3B2  3B3'
rank 1 | 0F0  0F1  0F2  0F3  4F0  4F1  4F2  4F3  .    6B0  .    6B1  .    6B2  .    6B3' 2B0  2B1  2B2  2B3'
rank 2 | .    1F0  1F1  1F2  1F3  5F0  5F1  5F2  5F3  .    5B0  .    5B1  .    5B2  .    5B3' 1B0  1B1  1B2  1B3'
rank 3 | .    .    2F0  2F1  2F2  2F3  6F0  6F1  6F2  6F3  .    4B0  .    4B1  .    4B2  .    4B3' 0B0  0B1  0B2  0B3'
    """,
    ("zb_h1", 6, 21): """
        rank 0 | F0  F1  F2  F3  .   .   .   I0  W0  F4  I1  W1  F5  I2  W2  I3  W3  I4  W4  I5  W5'
        rank 1 | .   F0  F1  F2  .   .   I0  F3  I1  W0  F4  I2  W1  F5  I3  W2  I4  W3  I5  W4  W5'
        rank 2 | .   .   F0  F1  .   I0  F2  I1  F3  I2  W0  F4  I3  W1  F5  I4  W2  I5  W3  W4  W5'
        rank 3 | .   .   .   F0  I0  F1  I1  F2  I2  F3  I3  W0  F4  I4  W1  F5  I5  W2  W3  W4  W5'
    """,
    ("zb_h2", 7, 24): """
        rank 0 | F0  F1  F2  F3  F4  F5  F6  I0  W0  I1  W1  I2  W2  I3  W3  I4  W4  I5  W5  I6  W6'
        rank 1 | .   F0  F1  F2  F3  F4  I0  F5  I1  F6  I2  W0  I3  W1  I4  W2  I5  W3  I6  W4  W5  W6'
        rank 2 | .   .   F0  F1  F2  I0  F3  I1  F4  I2  F5  I3  F6  I4  W0  I5  W1  I6  W2  W3  W4  W5  W6'
        rank 3 | .   .   .   F0  I0  F1  I1  F2  I2  F3  I3  F4  I4  F5  I5  F6  I6  W0  W1  W2  W3  W4  W5  W6'
    """,
    ("pipedream", None, 12): """
        rank 0 | F0  F1  F2  F3  .   .   .   B0' F4  B1' F5  B2'
        rank 1 | .   F0  F1  F2  .   .   B0' F3  B1' F4  B2' F5
        rank 2 | .   .   F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
        rank 3 | .   .   .   F0  B0' F1  B1' F2  B2' F3  B3' F4
    """,
    ("pipedream_2bw", 4, 15): """
        rank 0 | F0  F1  F2  F3  .   .   .   B0  F4  B1  F5  B2  F6  B3' F7
        rank 1 | .   F0  F1  F2  .   .   B0  F3  B1  F4  B2  F5  B3' F6  B4
        rank 2 | .   .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3' F5  B4  F6
        rank 3 | .   .   .   F0  B0  F1  B1  F2  B2  F3  B3' F4  B4  F5  B5
    """,
    ("pipelined_backprop", None, 15): """
        rank 0 | F0  F1  F2  F3  F4  F5  F6  B0' F7  B1' F8  B2' F9  B3' F10
        rank 1 | .   F0  F1  F2  F3  F4  B0' F5  B1' F6  B2' F7  B3' F8  B4'
        rank 2 | .   .   F0  F1  F2  B0' F3  B1' F4  B2' F5  B3' F6  B4' F7
        rank 3 | .   .   .   F0  B0' F1  B1' F2  B2' F3  B3' F4  B4' F5  B5'
    """,
    ("pipemare", 4, 15): """
        rank 0 | F0  F1  F2  F3  F4  F5  F6  B0  F7  B1  F8  B2  F9  B3' F10
        rank 1 | .   F0  F1  F2  F3  F4  B0  F5  B1  F6  B2  F7  B3' F8  B4
        rank 2 | .   .   F0  F1  F2  B0  F3  B1  F4  B2  F5  B3' F6  B4  F7
        rank 3 | .   .   .   F0  B0  F1  B1  F2  B2  F3  B3' F4  B4  F5  B5
    """,
    ("v_timeprest", 3, 16): """
        rank 0 | F0  F1  F2  F3  F4  F5  F6  F7  F8  B0  B1  B2' F9  F10 F11 B3
        rank 1 | .   F0  F1  F2  F3  F4  F5  F6  B0  B1  B2' F7  F8  F9  B3  B4
        rank 2 | .   .   F0  F1  F2  F3  F4  B0  B1  B2' F5  F6  F7  B3  B4  B5'
        rank 3 | .   .   .   F0  F1  F2  B0  B1  B2' F3  F4  F5  B3  B4  B5' F6
    """,
}
# Methods that differ in the weights alone share a staircase.
ALIKE = {
    ("pipelined_backprop", None, 15): ("pb_lwp",),
    ("pipedream", None, 12): ("pipedream_vertical_sync", "spectrain", "spectrain_v2", "pipeoptim"),
    ("pipedream_2bw", 4, 15): ("xpipe", "paci"),
    ("v_timeprest", 3, 16): ("timeprest", "timeprest_interpolated"),
}
STAIRCASES |= {(name, *shown[1:]): STAIRCASES[shown] for shown, names in ALIKE.items() for name in names}


@pytest.mark.parametrize("method", STAIRCASES, ids=lambda method: f"{method[0]}-{method[1]}")
def test_four_stages(method: tuple[str, int | None, int]) -> None:
    name, m, slots = method
    assert picture(pd.schedules.build(name, pd.schedules.uniform(name, 4), m), slots) == golden(STAIRCASES[method])


def test_every_method_has_its_staircase() -> None:
    other = set(pd.schedules.SCHEDULES) ^ {name for name, _, _ in STAIRCASES}
    assert not other, f"add a golden grid to STAIRCASES in {__file__} for {sorted(other)}, or take it away"


def test_a_replicated_input_stage() -> None:
    """1F1B-RR: replica k mod 2 takes minibatch k; both wait, at an update, for the round's other gradient."""
    assert picture(pd.schedules.build("pipedream", pd.Plan.uniform(2, replicas=(2, 1))), 12) == golden("""
        rank 0 | F0  F2  .   B0' .   .   F4  B2' .   .   F6  B4
        rank 1 | F1  F3  .   .   .   B1' F5  .   .   B3' F7
        rank 2 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4  B4' F5
    """)
