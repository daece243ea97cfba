"""PyTorch's notation: its own schedules are read, proved and run; ours are written, and its loader takes them."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import processes
import pytest
import torch
import torch_schedules
import zoo
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.extensions.torch_csv.notation import from_torch_csv, write as to_torch_csv
from pipedream.testing import Reads, Training, assert_near

SIZES = ((1, 2), (2, 4), (2, 7), (3, 6))  # ranks and microbatches
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # with I and W


def theirs() -> list[tuple[str, int, int, int]]:
    """Returns PyTorch's schedules at several sizes: name, ranks, microbatches, stages a rank."""
    rows = []
    for name, count in torch_schedules.STAGES_A_RANK.items():
        for (p, m), v in product(SIZES, (count, 3) if name in ("Interleaved1F1B", "LoopedBFS") else (count,)):
            if name.startswith("Interleaved") and m % max(1, m // p):
                continue  # PyTorch refuses it
            if name == "DualPipeV" and m < 2 * p:
                continue
            rows.append((name, p, m, v))
    return rows


def read(name: str, p: int, m: int, v: int) -> pd.Schedule:
    return from_torch_csv(torch_schedules.text_of(torch_schedules.orders(name, p, m, v)), name=name)


# -- theirs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "p", "m", "v"), theirs())
def test_theirs_are_read_and_proved(name: str, p: int, m: int, v: int) -> None:
    schedule = read(name, p, m, v)
    vee = name in ("ZBVZeroBubble", "DualPipeV")
    ranks = [s if s < p else 2 * p - 1 - s for s in range(2 * p)] if vee else [s % p for s in range(v * p)]
    assert schedule.placement.ranks == tuple((rank,) for rank in ranks)
    assert schedule.microbatches == m
    assert schedule.splits_backward == (name in SPLIT)
    proof = pd.verify(pd.lower(schedule))
    assert set(proof.staleness) == {0}
    assert proof.peak_versions == (v,) * p
    if name != "GPipe":  # with its messages it is the same schedule
        text = torch_schedules.text_of(torch_schedules.lowered(name, p, m, v))
        assert "SEND_F" in text or p == 1
        assert from_torch_csv(text, name=name) == schedule
    again = from_torch_csv(to_torch_csv(schedule), name=name)
    assert again == schedule
    assert to_torch_csv(pd.lower(again)) == to_torch_csv(schedule)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 7), (3, 6), (4, 11)])
@pytest.mark.parametrize(
    ("ours", "name"),
    [("gpipe", "GPipe"), ("interleaved_1f1b", "Interleaved1F1B"), ("zbv", "ZBVZeroBubble"), ("dualpipev", "DualPipeV")],
)
def test_ours_are_theirs(ours: str, name: str, p: int, m: int) -> None:
    """The same order, op by op, written twice from the same papers."""
    m -= m % p if ours == "interleaved_1f1b" else 0
    theirs = read(name, p, m, 1 if ours == "gpipe" else 2)
    mine = pd.schedules.build(ours, pd.schedules.uniform(ours, p), m)
    for rank in range(p):
        rows = [[op for op in schedule.ops(rank, m) if op.kind != "U"] for schedule in (mine, theirs)]
        assert rows[0] == rows[1]


def test_two_kinds_of_theirs_are_broken_and_refused() -> None:
    """The last rank of its own 1F1B order, which PyTorch does not run, begins with microbatch 1. Deferred receives
    change the order in which a rank takes what another one sends it; but messages have no names there.
    """
    deferred = torch_schedules.lowered("ZBVZeroBubble", 2, 4, 2, defer_pp_recv=True)
    for rows, words in (
        (torch_schedules.orders("1F1B", 2, 4, 1), r"row 1 \(rank 0\) lacks 0F4: row 2 \(rank 1\), column \d+: 1F4"),
        (deferred, "are received in the order in which they are sent"),
    ):
        with pytest.raises(pd.errors.ScheduleError, match=words):
            from_torch_csv(torch_schedules.text_of(rows))


# -- ours -----------------------------------------------------------------------------------------------


WRITABLE = [
    name
    for name in sorted(pd.schedules.SCHEDULES)
    if pd.schedules.build(name, pd.schedules.uniform(name, 2)).flushes
    and max(pd.schedules.uniform(name, 2).replicas) == 1
    and name != "roundpipe"
]


@st.composite
def flushing(draw: st.DrawFn) -> pd.Schedule:
    """Any registered method that flushes and has no replicas, of any size."""
    name, p = draw(st.sampled_from(WRITABLE)), draw(st.integers(1, 4))
    plan = pd.schedules.uniform(
        name, p, chunks=draw(st.integers(1, 3)) if pd.schedules.STAGE_ORDERS.get(name) is pd.schedules.looped else None
    )
    try:
        return pd.schedules.build(name, plan, draw(st.integers(1, 16)))
    except pd.errors.ScheduleError:  # it wants another multiple, or more
        return pd.schedules.build(name, plan, 2 * p * draw(st.integers(1, 3)))


@given(flushing())
def test_ours_return_and_their_loader_takes_them(tmp_path_factory: pytest.TempPathFactory, ours: pd.Schedule) -> None:
    text, m = to_torch_csv(ours), ours.microbatches
    again = from_torch_csv(text, name=ours.name, plan=ours.plan)
    assert text == to_torch_csv(pd.lower(ours)) == to_torch_csv(again)
    workers = range(ours.placement.workers)
    passes = [[[op for op in s.ops(rank, 3 * m) if op.kind != "U"] for rank in workers] for s in (ours, again)]
    assert passes[0] == passes[1]
    assert pd.verify(pd.lower(again)).peak_in_flight == pd.verify(pd.lower(ours)).peak_in_flight
    file = tmp_path_factory.mktemp("csv") / "ours.csv"
    file.write_text(text)
    loaded = torch_schedules.load(file, ours.placement.stages, ours.placement.workers, m)
    assert loaded.stage_index_to_group_rank == {s: row[0] for s, row in enumerate(ours.placement.ranks)}
    # What their lowering makes of it is consistent by our rules, and the same schedule.
    assert from_torch_csv(torch_schedules.text_of(loaded.pipeline_order_with_comms), name=ours.name) == from_torch_csv(
        text, name=ours.name
    )


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (pd.schedules.build("pipedream", pd.Plan.uniform(2)), "updates without a flush, .* neither updates nor"),
        (pd.schedules.build("pipedream_2bw", pd.Plan.uniform(2)), "updates without a flush"),
        (pd.schedules.evaluation(pd.Plan.uniform(2)), "updates without a flush"),
        (pd.schedules.build("gpipe", pd.Plan.uniform(2, replicas=(2, 1))), "2-1 replicas .* one rank for each stage"),
        (pd.schedules.build("roundpipe", pd.schedules.uniform("roundpipe", 4)), "forwards of stage 0 on rank 1 and"),
    ],
)
def test_what_cannot_be_written_is_refused(schedule: pd.Schedule, reason: str) -> None:
    for either in (schedule, pd.lower(schedule)):
        with pytest.raises(pd.errors.ScheduleError, match=reason):
            to_torch_csv(either)


# -- files that are wrong -------------------------------------------------------------------------------

LOWERED = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""
PASSES = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


def changed(old: str, new: str, text: str = PASSES) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def swapped(first: str, other: str, text: str = LOWERED) -> str:
    return changed("?", other, changed(other, first, changed(first, "?", text)))


WRONG = {
    "no word": (changed("1B0", "1X0"), r"row 2 \(rank 1\), column 3: '1X0' is not an action; a cell is empty or STAGE"),
    "a huge number": (changed("0F1", "0F" + "9" * 5000), r"column 2: '0F9+' is not an action"),
    "a pair with a message": (
        changed("0F1", "(0F1;0SEND_F0)OVERLAP_F_B"),
        r"column 2: '0SEND_F0' in '\(0F1;0SEND_F0\)OVERLAP_F_B' is not an action",
    ),
    "nothing": ("\n\n", "there is no row"),
    "a rank without a stage": (PASSES.replace("\n", "\n\n", 1), r"row 2 \(rank 1\): found no forward"),
    "a stage on two ranks": (changed("1F1", "0F2"), r"row 2 \(rank 1\), column 4: 0F2 runs stage 0, which rank 0 runs"),
    "a stage left out": (PASSES.replace("1F", "2F").replace("1B", "2B"), "no row runs stage 1, but there is a stage 2"),
    "an op dropped": (
        changed("1B1", ""),
        r"row 2 \(rank 1\) lacks 1B1: row 1 \(rank 0\), column 2: 0F1 names",
    ),
    "an op doubled": (changed("1B1", "1B1,1B0"), r"row 2 \(rank 1\), column 6: 1B0 is also in column 3"),
    "a microbatch left out": (PASSES.replace("F1", "F2").replace("B1", "B2"), r"lacks 0F1: the last microbatch is 2"),
    "half a backward": (changed("1B1", "1I1"), r"row 2 \(rank 1\) lacks 1W1"),
    "a backward and a half": (changed("1B1", "1B1,1I1"), r"row 2 \(rank 1\) has 1B1 and a half of it"),
    "a send dropped": (changed("0SEND_F1,", "", LOWERED), r"row 1 .*, column 4: 0F1: .*, but row 1 lacks 0SEND_F1"),
    "a send too early": (swapped("0F1", "0SEND_F1"), r"column 4: 0SEND_F1 sends .* has yet to compute: 0F1"),
    "a receive too late": (swapped("1F1", "1RECV_F1"), r"row 2 .*, column 7: 1RECV_F1 comes too late .* 1F1 is in"),
    "a message to oneself": (
        "0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n",
        r"column 2: 0SEND_F0 is a message to the rank itself, which runs stage 1 too",
    ),
    "a message to nobody": (changed("1REDUCE_GRAD", "1SEND_F0", LOWERED), r"1SEND_F0 needs a stage 2, but .* 0 to 1"),
    "a message of a stranger": (changed("1REDUCE_GRAD", "0SEND_F0", LOWERED), r"0SEND_F0 is in the row of rank 1"),
    "a message of no pass": (changed("0REDUCE_GRAD", "0SEND_F7", LOWERED), "0SEND_F7 belongs to no pass: the file"),
    "crossing messages": (
        changed("0F0,0SEND_F0,0F1,0SEND_F1", "0F0,0F1,0SEND_F1,0SEND_F0", LOWERED),
        r"row 2 .*, column 2: 1RECV_F0 is received where 0SEND_F1 of rank 0 \(column 4\) arrives",
    ),
    "receives that wait for each other": (
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
        r"wait for each other forever: row 1 .*, column 3: 0RECV_B0, from rank 1; row 2 .*, column 3: 1RECV_F1",
    ),
    "a sum too early": (swapped("0B1", "0REDUCE_GRAD"), r"column 10: 0B1 comes after the sum of stage 0's gradients"),
}  # fmt: skip


@pytest.mark.parametrize("story", WRONG)
def test_wrong_files_are_refused_by_row_column_and_cell(story: str) -> None:
    text, message = WRONG[story]
    assert from_torch_csv(PASSES).microbatches == from_torch_csv(LOWERED).microbatches == 2
    with pytest.raises(pd.errors.ScheduleError, match=message) as caught:
        from_torch_csv(text, name="mine.csv")
    assert str(caught.value).startswith("schedule 'mine.csv': ")


@given(st.data())
def test_whatever_stands_in_a_file_is_read_or_refused(data: st.DataObject) -> None:
    cells = st.sampled_from([*"FBIW", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "REDUCE_GRAD", "X", ""])
    rows = [line.split(",") for line in data.draw(st.sampled_from([PASSES, LOWERED])).splitlines()]
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(rows))
        at = data.draw(st.integers(0, len(row) - 1))
        kind = data.draw(st.sampled_from(["swap", "drop", "write", "copy"]))
        if kind == "swap":
            other = data.draw(st.integers(0, len(row) - 1))
            row[at], row[other] = row[other], row[at]
        elif kind == "drop":
            row[at] = ""
        elif kind == "copy":
            row.insert(at, data.draw(st.sampled_from(data.draw(st.sampled_from(rows)))))
        else:
            row[at] = (
                f"{data.draw(st.integers(-1, 3))}{data.draw(cells)}{data.draw(st.sampled_from(['', '0', '1', '7']))}"
            )
    try:
        schedule = from_torch_csv("\n".join(",".join(row) for row in rows))
        pd.verify(pd.lower(schedule))
    except pd.errors.ScheduleError:
        return
    assert from_torch_csv(to_torch_csv(schedule)) == schedule


# -- run ------------------------------------------------------------------------------------------------


def check_training(schedule: pd.Schedule | str, plan: pd.Plan, m: int) -> None:
    """Trains the mlp for three minibatches."""
    animal, sgd = zoo.make("mlp"), partial(torch.optim.SGD, lr=0.05)
    how = {"data": animal.batches[:3], "loss": animal.loss, "optimizer": sgd, "plan": plan, "schedule": schedule}
    Training(model=animal.model, seed=3, **how).check(reads=Reads(lambda s, k: k // m))


OF_TWO_RANKS = {"Interleaved1F1B": 4, "LoopedBFS": 5, "InterleavedZeroBubble": 4, "ZBVZeroBubble": 4, "DualPipeV": 5}


@pytest.mark.parametrize(
    "text",
    [
        torch_schedules.text_of(torch_schedules.orders("GPipe", 4, 3, 1)),
        *(torch_schedules.text_of(torch_schedules.orders(name, 2, m, 2)) for name, m in OF_TWO_RANKS.items()),
        "0F0,3F0,3B0,0F1,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n",  # a V
        "0F0,1F0,1B0,0B0,(0F1;1F1)OVERLAP_F_B,1B1,0B1\n2F0,3F0,3B0,2B0,2F1,3F1,3B1,2B1\n",  # neighbours on a rank
        "3F0,3B0,3F1,3B1\n0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2B0,2F1,2B1\n",  # no order of ranks at all
    ],
    ids=["GPipe", *OF_TWO_RANKS, "v", "neighbours", "any"],
)
def test_theirs_and_any_map_of_stages_train_as_plain_pytorch(text: str) -> None:
    schedule = from_torch_csv(text)
    plan = zoo.plan_of(zoo.make("mlp"), schedule.placement.stages)
    plan = replace(plan, worker_order=schedule.plan.worker_order)
    check_training(from_torch_csv(text, plan=plan), plan, schedule.microbatches)


def test_a_file_is_taken_by_name(tmp_path: Path) -> None:
    file = tmp_path / "Mine.CSV"
    file.write_text(PASSES)
    plan = zoo.plan_of(zoo.make("mlp", torch.float64), 2)
    check_training(str(file), plan, 2)
    with pytest.raises(pd.errors.ScheduleError, match=r"Mine.CSV' with 3 microbatches a minibatch: the file has 2"):
        pd.schedules.build(str(file), plan, 3)
    with pytest.raises(pd.errors.ScheduleError, match=r"it has 2 stages on ranks 0, 1, the plan 1-1-1 on 0, 1, 2"):
        pd.schedules.build(str(file), pd.Plan.uniform(3))
    with pytest.raises(pd.errors.ScheduleError, match=r"nowhere.csv cannot be read"):
        pd.schedules.build(str(tmp_path / "nowhere.csv"), plan)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_pytorch_runs_ours_to_the_same_gradients(tmp_path: Path, name: str, chunks: int) -> None:
    """Over two processes PyTorch's runtime does what we have written; ours does it in one, from the same file."""
    file = tmp_path / "ours.csv"
    ours = pd.schedules.build(name, pd.schedules.uniform(name, 2, chunks=chunks), 4)
    file.write_text(to_torch_csv(ours))
    summed: dict[str, torch.Tensor] = {}
    for gradients in processes.team(2).results(torch_schedules.run, str(file), ours.placement.stages, 4):
        summed |= gradients
    model, x, y = torch_schedules.model_and_batch()
    per = len(model) // ours.placement.stages
    rows = [replace(row, first=i * per, last=(i + 1) * per) for i, row in enumerate(ours.plan.stages)]
    step, loss = partial(torch.optim.SGD, lr=1.0), torch.nn.functional.mse_loss
    plan = replace(ours.plan, stages=tuple(rows), schedule="")
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    with pd.Pipeline(model, plan, schedule=str(file), loss=loss, optimizer=step, sample=x) as pipeline:
        assert len(list(pipeline.train([(x, y)]))) == 1
        after = pipeline.state_dict()
    assert_near({key: before[key] - after[key] for key in before}, summed, 1e-12)
