"""The proof before the run: all methods pass it, programs broken on purpose do not."""

import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from operator import attrgetter
from pathlib import Path

import pytest
from drawn import STRAIGHT, laid_out, runs, schedules, straight
from hypothesis import given, settings, strategies as st
from marks import few, long, slow
from programs import edited, program_of, uniform_program as of, with_rank

import pipedream as pd
from pipedream.core.plan import depth
from pipedream.extensions.torch_csv.notation import from_torch_csv, write as to_torch_csv
from pipedream.simulator import Costs, Stragglers, simulate
from pipedream.verifier.unrolled import Unrolled, unroll

ASYNCHRONOUS = ("pipedream", "pipedream_vertical_sync", "pipedream_2bw")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipedream", "pipedream: gradients are stale by up to 2 updates; the schedule 1f1b trains as one process"),
        ("pipedream_2bw", "pipedream_2bw: gradients are stale by up to 1 update; the schedule 1f1b"),
        ("1f1b", ""),
    ],
)
def test_stale_gradients_are_reported(name: str, words: str) -> None:
    note = pd.verify(of(name, 1, 1, 1)).staleness_note
    assert note.startswith(words)
    assert bool(note) == bool(words)


@given(schedules())
def test_all_methods_pass(schedule: pd.Schedule) -> None:
    program = pd.lower(schedule)
    proof = pd.verify(program)
    weights, placement = program.weights, program.placement
    for rank in range(placement.workers):
        visiting = min(1, len(placement.passes_on_copies(rank, forward=True)))
        own_versions = sum(weights.versions(s) for s, _ in placement.stage_replicas(rank))
        assert proof.peak_versions[rank] <= visiting + own_versions
    for stage in range(placement.stages):
        peaks = [proof.peak_versions[rank] for rank in placement.ranks[stage]]
        in_flight = [proof.peak_in_flight[rank] for rank in placement.ranks[stage]]
        assert proof.staleness[stage] == weights.staleness(stage)
        if program.name in ASYNCHRONOUS:
            assert max(in_flight) == program.plan.in_flight[stage]
            assert program.name == "pipedream_2bw" or max(peaks) == weights.versions(stage)


@given(laid_out(most=6))
def test_several_stages_a_worker_pass(schedule: pd.Schedule) -> None:
    proof = pd.verify(pd.lower(schedule))
    p, m, claims = schedule.placement.workers, schedule.microbatches, schedule.claims
    if m >= claims.least(p) or schedule.name == "chimera_doubled":
        assert proof.peak_in_flight == tuple(claims.in_flight(p, m, rank) for rank in range(p))
    assert set(proof.staleness) == {0}
    assert proof.peak_versions == tuple(claims.versions(p, m, rank) for rank in range(p))
    assert schedule.name == "roundpipe" or set(proof.peak_versions) == {len(schedule.placement.stage_replicas(0))}
    pd.verify(pd.lower(schedule), lanes=attrgetter("sender", "receiver", "carries", "source"))


def test_updates_that_wait_for_all_stages_stand_behind_all_gradients_of_their_rank() -> None:
    for name in ("chimera", "interleaved_1f1b"):
        schedule = pd.schedules.build(name, pd.schedules.uniform(name, 2), 2)
        pd.verify(pd.lower(schedule.couple_updates()))
    with pytest.raises(pd.errors.ScheduleError, match="waits for all stages, but 0B0 on this rank comes later"):
        pd.verify(pd.lower(replace(schedule, couples_updates=True)))  # a first stage is done before the second begins


@given(straight())
def test_one_lane_a_direction_never_deadlocks(schedule: pd.Schedule) -> None:
    """Two ranks that share several boundaries may read them in orders that have nothing to do with each other."""
    pd.verify(pd.lower(schedule), lanes=attrgetter("sender", "receiver"))


def unchecked(replicas: tuple[int, ...], in_flight: tuple[int, ...], update_delay: tuple[int, ...]) -> pd.Plan:
    """Returns a plan past the check that a depth is legal."""
    plan = pd.Plan.uniform(len(replicas), replicas=replicas)
    object.__setattr__(plan, "in_flight", in_flight)
    object.__setattr__(plan, "update_delay", update_delay)
    return plan


@few
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4).map(tuple), st.data())
def test_a_depth_is_legal_where_pipedream_does_not_deadlock(replicas: tuple[int, ...], data: st.DataObject) -> None:
    """With update delays, and in-flight counts around the border of what is legal."""
    update_delay = tuple(data.draw(st.integers(0, 1)) if r > 1 else 0 for r in replicas)
    warmup = [data.draw(st.integers(0, 2))]
    for after, r in pairwise(reversed(replicas)):
        warmup.insert(0, max(0, -(-warmup[0] * after // r) + data.draw(st.integers(-1, 2))))
    in_flight = tuple(count + 1 for count in warmup)
    program = program_of("pipedream", unchecked(replicas, in_flight, update_delay))
    enough = depth.raise_to_legal(in_flight, replicas, update_delay)
    if enough != in_flight:
        with pytest.raises(pd.errors.PlanError, match=re.escape(f"{enough} would do")):
            depth.check_in_flight(in_flight, replicas, update_delay)
        with pytest.raises(pd.errors.DeadlockError):
            pd.verify(program)
        pd.verify(program_of("pipedream", unchecked(replicas, enough, update_delay)))
        return
    depth.check_in_flight(in_flight, replicas, update_delay)
    proof = pd.verify(program)
    assert proof.staleness == tuple(count - 1 + late for count, late in zip(in_flight, update_delay, strict=True))


@pytest.mark.parametrize("name", STRAIGHT)
def test_one_lane_a_pair_deadlocks(name: str) -> None:
    """Both directions on one communicator: each side's receive, posted ahead, stands before its send."""
    for replicas in ((1, 1), (2, 1)):
        with pytest.raises(pd.errors.DeadlockError, match="same lane"):
            pd.verify(of(name, *replicas), lanes=lambda channel: frozenset((channel.sender, channel.receiver)))


def test_prints_as_a_table_with_each_stage_of_a_worker_that_has_several() -> None:
    header, *rows = (" ".join(line.split()) for line in str(pd.verify(of("pipedream", 1, 1, 1))).splitlines()[2:])
    assert (header, rows) == ("rank stages in flight versions staleness", ["0 0 3 3 2", "1 1 2 2 1", "2 2 1 1 0"])
    proof = pd.verify(program_of("interleaved_1f1b", pd.schedules.uniform("interleaved_1f1b", 2), 4))
    assert [" ".join(line.split()) for line in str(proof).splitlines()[3:]] == [
        "0 0,2 5 2 0", ". 0 4 1 0", ". 2 2 1 0", "1 1,3 3 2 0", ". 1 3 1 0", ". 3 1 1 0"
    ]  # fmt: skip
    assert proof.stage_in_flight == ((4, 2), (3, 1))
    assert proof.stage_versions == ((1, 1), (1, 1))


# Programs broken on purpose. 1F1B, two stages, two microbatches, all of it in the period:
#
#   rank 0: ( 0F0 >0:0 >2:0 0F1 >0:1 >2:1 <1:0 0B0 <1:1 0B1 0U1 )
#   rank 1: ( <2:0 <0:0 1F0 1B0 >1:0 <2:1 <0:1 1F1 1B1 >1:1 1U1 )


BROKEN = {
    "backward before forward": (1, "1F0 1B0", "1B0 1F0", r"rank 1, instruction 2, 1B0: needs 1F0.* later"),
    "an op dropped": (0, "0B1", "", "rank 0 lacks 0B1 in a run of 2"),
    "a send dropped": (0, ">0:1", "", "rank 1, instruction 6, <0:1: .* received but never sent"),
    "a receive dropped": (1, "<0:1", "", "rank 0, instruction 4, >0:1: .* sent but never received"),
    "a receive twice": (1, "<0:0", "<0:0 <0:0", "rank 1, instruction 2, <0:0: microbatch 0 was received before"),
    "a send too early": (0, "0F0 >0:0", ">0:0 0F0", "rank 0, instruction 0, >0:0: 0F0, which makes it"),
    "a receive too late": (1, "<0:0 1F0", "1F0 <0:0", "<0:0: 1F0, which reads it, does not follow"),
    "an update too early": (0, "0B1 0U1", "0U1 0B1", "rank 0, instruction 9, 0U1: needs 0B1.* later"),
    "sent in another order": (
        0, "0F0 >0:0 >2:0 0F1 >0:1 >2:1", "0F0 0F1 >0:1 >0:0 >2:0 >2:1",
        "rank 1, instruction 1, <0:0: message 0 .* sent as microbatch 1 and received as microbatch 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rank", "old", "new", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_programs_are_refused(rank: int, old: str, new: str, words: str) -> None:
    program = of("1f1b", 1, 1, microbatches=2)
    pd.verify(program)
    with pytest.raises(pd.errors.ScheduleError, match=words) as caught:
        pd.verify(edited(program, rank, (old, new)))
    assert "1f1b" in str(caught.value)


def test_ops_that_are_not_of_the_program_are_refused() -> None:
    program = of("1f1b", 1, 1, microbatches=2)
    *period, update = program.ranks[0].period
    with pytest.raises(pd.errors.ScheduleError, match=r"rank 0 lacks 0U1 in a run of 2 microbatches"):
        pd.verify(with_rank(program, 0, period=(*period, update._replace(index=0))))
    for stray, words in ((0, "0F0: an op of another rank"), (1, ">0:0: this rank is not at this end")):
        with pytest.raises(pd.errors.ScheduleError, match=f"rank 1, instruction 0, {words}"):
            pd.verify(with_rank(program, 1, period=(period[stray], *program.ranks[1].period)))


def test_two_orders_that_are_each_legal_deadlock_together() -> None:
    """Rank 0 wants a backward before it sends microbatch 1, rank 1 wants microbatch 1 before a backward."""
    naive, gpipe = (of(name, 1, 1, microbatches=2) for name in ("naive", "gpipe"))
    with pytest.raises(pd.errors.DeadlockError) as caught:
        pd.verify(replace(naive, name="1f1b", ranks=(naive.ranks[0], gpipe.ranks[1])))
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "rank 0 waits at instruction 3, <1:0, for the gradient of microbatch 0 from rank 1",
        "message 1:0 (rank 1 to 0, gradient) waits for rank 1 to send it",
        "rank 1 waits at instruction 3, <2:1, for the input of microbatch 1 from rank 0",
        "message 2:1 (rank 0 to 1, input) waits for rank 0 to send it",
    ]


def test_a_receive_waits_for_those_before_it_on_its_lane() -> None:
    """The receive of microbatch 2 is posted before that of 1, and replica 0 sends 2 behind the sum of 0 and 1."""
    program = program_of("pipedream", pd.Plan.uniform(2, replicas=(2, 1)).with_depth((1, 1)))
    pd.verify(program)
    with pytest.raises(pd.errors.DeadlockError, match=r"issued before it on the same lane of rank 2"):
        pd.verify(program, lanes=attrgetter("receiver"))


def test_crossing_sends_deadlock_only_on_a_shared_lane() -> None:
    """Activations and inputs go out in one order and are wanted in another: two channels bear it, and so does one
    lane, for receives are posted in the sender's order. With rings of one, the lane stands still."""
    program = of("gpipe", 1, 1, microbatches=2)
    program = replace(program, channels=tuple(replace(channel, depth=1) for channel in program.channels))
    crossing = edited(program, 0, ("0F0 >0:0 >2:0 0F1 >0:1 >2:1", "0F0 0F1 >0:0 >0:1 >2:0 >2:1"))
    pd.verify(crossing)
    with pytest.raises(pd.errors.DeadlockError, match="whose receive is posted before"):
        pd.verify(crossing, lanes=attrgetter("sender", "receiver"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("sums", "change", "words"),
    [
        ("full", ("=0:1", ""), "0U1: no sum over the replicas, =0:1, comes before"),
        ("every:2", ("@0:1", ""), r"no average over the replicas, @0:\d+"),
        ("every:2", ("0U1 @0:1", "@0:1 0U1"), r"no average over the replicas, @0:\d+"),
    ],
)
def test_replicas_must_all_join_a_sum_or_an_average(sums: str, change: tuple[str, str], words: str, rank: int) -> None:
    program = program_of("pipedream", pd.Plan.uniform(2, replicas=(2, 1)).choosing(sums=sums))
    pd.verify(program)
    with pytest.raises(pd.errors.ScheduleError, match=f"rank {rank}, .*{words}"):
        pd.verify(edited(program, rank, change))
    assert "@" not in str(program.ranks[2])


def test_coupled_updates() -> None:
    """With a flush they cost nothing; PipeDream's output stage stands still until the input stage follows."""
    for name in ("1f1b", "gpipe", "pipedream", "pipedream_2bw"):
        split = None if name == "pipedream" else 4
        pd.verify(pd.lower(pd.schedules.build(name, pd.Plan.uniform(3), split).couple_updates()))
    schedule = pd.schedules.build("1f1b", pd.Plan.uniform(2), 1)
    # Rank 1 keeps back the gradient until the update that rank 0 makes with it.
    pd.verify(edited(pd.lower(schedule), 1, (">1:0 1U1", "1U1 >1:0")))
    late = edited(pd.lower(schedule.couple_updates()), 1, (">1:0 |0:1 1U1", "|0:1 1U1 >1:0"))
    words = r"rank 1 waits at instruction 4, \|0:1, for rank 0 to reach the sum of norms over all ranks"
    with pytest.raises(pd.errors.DeadlockError, match=words):
        pd.verify(late)


def test_messages_without_a_channel_are_refused() -> None:
    """Nothing of a channel is left: what it brought is missed where it is read."""
    program = edited(of("1f1b", 1, 1, microbatches=1), 0, (">0:0", ""), ("<1:0", ""))
    with pytest.raises(pd.errors.ScheduleError, match=r"0B0: needs 1B0 of rank 1, but <1:0 is not before it"):
        pd.verify(edited(program, 1, ("<0:0", ""), (">1:0", "")))
    forwards = pd.lower(pd.schedules.evaluation(pd.Plan.uniform(2)))
    forwards = edited(edited(forwards, 0, (">0:0", "")), 1, ("<0:0", ""))
    renamed = replace(forwards.channels[0], carries="gradient")
    with pytest.raises(pd.PipelineError, match=r"1F0: needs 0F0 of rank 0, but no channel brings its activation"):
        pd.verify(replace(forwards, channels=(renamed, *forwards.channels[1:])))


# -- sends that face each other ----------------------------------------------------------------------------------------
# A large send over NCCL ends once the other host has read its header. If two ranks have such a send for each other, and
# each is in an op that waits for its whole device (an allocation that frees memory, the first use of a kernel, the
# user's own `torch.cuda.synchronize`), both wait for ever.


Passes = list[tuple[int, int]]
"""(position of the send at its rank, position at the other one that reads its header) of the messages of a link."""


def _list_links(run: Unrolled) -> dict[tuple[int, int], Passes]:
    """Returns the messages of each link, (sender, receiver), in the order of their sends."""
    links: dict[tuple[int, int], Passes] = defaultdict(list)
    for message, sent in sorted(run.sent.items(), key=lambda item: item[1]):
        channel = run.program.channels[message[0]]
        links[channel.sender, channel.receiver].append((sent, run.received[message]))
    for passes in links.values():  # whoever reads a later header has read the earlier ones
        for at in range(len(passes) - 2, -1, -1):
            passes[at] = passes[at][0], min(passes[at][1], passes[at + 1][1])
    return links


def _count_facing(run: Unrolled) -> int:
    """Counts pairs of moments of two ranks, each in an op, at which each has a send that the other has not read."""
    links, count = _list_links(run), 0
    for a, b in combinations(range(len(run.streams)), 2):
        there, back = links.get((a, b), []), links.get((b, a), [])
        moments = [
            [at for at, instruction in enumerate(run.streams[rank]) if isinstance(instruction, pd.schedules.Op)]
            for rank in (a, b)
        ]
        for i in moments[0]:
            for j in moments[1]:
                came = all(sent < i for sent, read in there if read < j)
                came = came and all(sent < j for sent, read in back if read < i)
                outstanding = any(sent < i and read > j for sent, read in there)
                count += came and outstanding and any(sent < j and read > i for sent, read in back)
    return count


NEVER = ("1f1b", "gpipe", "zb_h1", "pipedream", "pipedream_2bw", "spectrain", "xpipe", "pipeoptim", "paci")


FACING = [("interleaved_1f1b", 2), ("zb_h2", 4), ("zbv", 2), ("dualpipev", 2), ("pipemare", 2), ("roundpipe", 2)]


@pytest.mark.parametrize(("name", "workers"), [*product(NEVER, (2, 4)), *FACING])
def test_methods_whose_sends_face_each_other(name: str, workers: int) -> None:
    splits = pd.schedules.build(name, pd.schedules.uniform(name, workers), None).microbatches > 1
    program = program_of(name, pd.schedules.uniform(name, workers), 2 * workers if splits else None)
    assert (_count_facing(unroll(program, 4 * max(4, program.microbatches))) == 0) == (name in NEVER)


def test_docs_name_the_methods_that_may_wait_for_their_gpus() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8").split())
    names = ", ".join(f"`{name}`" for name in NEVER[:-1])
    assert f"Only with {names} or `{NEVER[-1]}` may the loop wait" in text


# -- long runs ---------------------------------------------------------------------------------------------------------
# Thousands of random programs: none stands still, leaves an op out or does it twice, or holds a version too many. With
# one to three replicas at each of three stages every method is proved: no draw can miss one.


@pytest.mark.parametrize("programs", [slow(50), long(10_000)])
def test_random_programs_endure(programs: int) -> None:
    """Some as they come back from a file in PyTorch's notation; with ranks that are slow, and ops that jitter."""

    @settings(max_examples=programs)
    @given(runs(st.one_of(straight(), laid_out(most=6))), st.data())
    def endure(run: tuple[pd.Schedule, Costs, int], data: st.DataObject) -> None:
        schedule, seconds, total = run
        plan, placement, m = schedule.plan, schedule.placement, schedule.microbatches
        stays = not any(map(placement.runs_backward_elsewhere, range(len(plan.stages))))
        if schedule.flushes and stays and max(plan.replicas) == 1 and data.draw(st.booleans()):
            schedule = from_torch_csv(to_torch_csv(schedule), name=schedule.name, plan=plan)
        slow_ranks = st.dictionaries(st.integers(0, placement.workers - 1), st.floats(1.0, 4.0), max_size=1)
        stragglers = Stragglers(data.draw(st.sampled_from([0.0, 0.5])), data.draw(slow_ranks), data.draw(st.integers()))
        program, total = pd.lower(schedule), -(-total // m) * m
        proof, timeline = pd.verify(program), simulate(program, seconds, total, stragglers)
        done, updates = Counter(span.kind for span in timeline.work()), schedule.updates.per_update
        replicas = zip(updates, schedule.placement.ranks, strict=True)
        assert done.pop("U") == sum(-(-total // count) * len(ranks) for count, ranks in replicas)
        assert set(done.values()) == {total * len(plan.stages)}
        assert all(map(int.__le__, timeline.peak_versions, proof.peak_versions))

    endure()


def test_a_depth_that_rests_on_a_lag() -> None:
    """Found by one of ten thousand: ZB-H2 doubles a depth that is legal only because a stage lags."""
    plan = replace(pd.Plan.uniform(4, replicas=(1, 1, 2, 1)), in_flight=(3, 2, 1, 2), update_delay=(0, 0, 1, 0))
    for name in ("1f1b", "zb_h1", "zb_h2"):
        pd.verify(program_of(name, plan, 4))


REPLICAS = tuple(product((1, 2, 3), repeat=3))


@pytest.mark.parametrize(("depth", "workers"), [("noam", 4), long("noam", 9), slow("full", 6), long("full", 9)])
@pytest.mark.parametrize("name", [name for name in STRAIGHT if "[" not in name])
def test_all_replica_counts(name: str, depth: str, workers: int) -> None:
    """With m = 7, which no number of replicas but one divides, where the method takes it."""
    properties, proved = pd.schedules.properties_of(name), set()
    expected = {replicas for replicas in REPLICAS if sum(replicas) <= workers}
    for replicas in expected:
        plan = pd.Plan.uniform(3, replicas=replicas).with_depth(depth)
        for m in (7, None) if properties.splits_minibatch else (None,):
            with suppress(pd.errors.ScheduleError):
                pd.verify(program_of(name, plan, m))
                proved.add(replicas)
                break
    assert proved == expected if properties.replicates_stages else proved
