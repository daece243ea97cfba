"""Measures a cluster with the processes that would train on it."""

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from pipedream import schedules
from pipedream.core.artifact import decode, encode
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import LOOPBACK, Cluster, Level
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.units import format_rate, format_seconds
from pipedream.profiler.device import name_device
from pipedream.runtime.comm import process_group
from pipedream.runtime.comm.connections import has_nccl, make_link_group, name_card
from pipedream.services.failure.launch import set_threads
from pipedream.services.joining import joining
from pipedream.services.probe import links, machine
from pipedream.services.probe.calibration import calibrate, measure_encodings
from pipedream.services.probe.survey import Fan, Link, MeasuredWorker, Sum, Survey, machines_of
from pipedream.verifier import verify

Step = tuple[str, int, tuple[int, ...]]
"""A measurement ('link', 'out', 'into' or 'sum'), its network level, and its ranks."""

_DETECTION_S = 5.0  # of `detect_cluster`
_MAX_LINKS = 6
_MAX_PEERS = 3

_INSTANT_BYTES_PER_S = 1e30


def probe(*, device: str = "cpu", most_s: float = 10.0) -> Survey:
    """Measures links, all-reduces, speed and memory of all workers. Every rank calls it and gets the same answer.

    Nothing else should use the cluster meanwhile.

    Args:
        device: 'cpu' (gloo) or 'cuda' (NCCL).
        most_s: approximate limit. What every level needs is measured first, the rest as time allows.

    Raises:
        PlanError: there is a single process, or the ranks of a machine are not consecutive.
    """
    began_s = time.perf_counter()
    torch_device = joining.process_device(device)
    rank, processes = joining.join_group(torch_device)
    if processes == 1:
        raise PlanError(
            "a single process has no links to measure; start a worker on each device of the cluster (torchrun ... -m "
            "pipedream probe), or try it on this machine with --workers 2"
        )
    set_threads(processes)
    world = process_group.world_group()
    # A barrier: all then compute at the same time.
    names = process_group.gather_json([machine.machine_name(), machine.memory_name(torch_device)], world)
    worker = MeasuredWorker(
        names[rank][0],
        name_device(torch_device),
        machine.work_s(torch_device, most_s / 30),
        machine.available_bytes(torch_device, Counter(memory for _, memory in names)[names[rank][1]]),
        machine.host_bytes_per_s(torch_device),
    )
    needed, further = choose_steps(machines_of([name for name, _ in names]))
    # A link takes about 60 messages of this length.
    target_s = min(0.05, most_s / 100 / len(needed))
    results: list[Link | Fan | Sum] = []
    for step in (*needed, *further):
        is_late = step in further and time.perf_counter() - began_s > 0.8 * most_s
        if process_group.broadcast_text("late" if is_late else "", world):
            break
        results += _measure_step(step, rank, torch_device, target_s)
    kinds = (MeasuredWorker, Link, Fan, Sum)
    rows = [[encode(result) for result in (worker, *results) if isinstance(result, kind)] for kind in kinds]
    reports = process_group.gather_json([time.perf_counter() - began_s, *rows], world)
    workers, pairs, fans, sums = (
        tuple(decode(kind, row, kind.__name__) for report in reports for row in report[number])
        for number, kind in enumerate(kinds, 1)
    )
    return Survey(workers, pairs, fans, sums, reports[0][0])


def detect_cluster(device: str, *, workers: int | None = None) -> tuple[Cluster, str]:
    """Returns the cluster of these processes, and at rank 0 a line that says what was measured. Every rank calls it.

    On one machine it is that of `probe_gpus` or `Cluster.local`, the latter with the link that messages see, and the
    line is empty.

    Args:
        workers: of a single process; by default one for each core or GPU.

    Raises:
        PlanError: the ranks of a machine are not consecutive.
    """
    torch_device = joining.process_device(device)
    rank, processes = joining.join_group(torch_device)
    count = processes if processes > 1 else workers
    rows = process_group.gather_json([machine.machine_name(), name_card(torch_device)], process_group.world_group())
    names, cards = zip(*rows, strict=True)
    machines = len(set(names))
    if machines > 1 and (torch_device.type == "cpu" or has_nccl(torch_device, cards)):
        survey = probe(device=device, most_s=_DETECTION_S)
        cluster = survey.cluster()
        message = f"{machines} machines, measured in {survey.seconds:.1f} s: {cluster}" if rank == 0 else ""
        return cluster, message
    if torch_device.type == "cpu":
        return measure_runtime("cpu").on_links(Cluster.local(count)), ""
    # Rank 0's, because all must make the same plan.
    text = joining.make_on_rank_0(
        lambda: machine.probe_gpus(count, device="cuda" if processes > 1 else device).to_json(), rank
    )
    return Cluster.from_json(text, "rank 0's cluster"), ""


def warn_of_loopback(plan: Plan, rank: int) -> None:
    """Warns at rank 0 if a plan assumes one machine (`Cluster.local`) and its workers are on several.

    Every rank calls it.
    """
    bandwidth, latency_s = LOOPBACK
    if plan.cluster.levels != (Level(plan.cluster.workers, bandwidth, latency_s),):
        return
    names = process_group.gather_texts(machine.machine_name(), process_group.world_group())
    machines = len(set(names))
    if machines > 1 and rank == 0:
        warnings.warn(
            f"the plan assumes one machine ({format_rate(bandwidth)}, {format_seconds(latency_s)} between workers), "
            f"but the workers are on {machines}; leave out the cluster, and pipedream.plan(profile) measures the links",
            stacklevel=4,
        )


def choose_steps(machines: Sequence[Sequence[int]]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Returns the necessary measurements, and those to make if there is time."""
    leaders = tuple(ranks[0] for ranks in machines)
    multi_rank = sorted((tuple(ranks) for ranks in machines if len(ranks) > 1), key=len, reverse=True)
    # Of each level: the groups within which messages are sent, and the ranks of the largest all-reduce.
    levels = [(multi_rank, multi_rank[0])] if multi_rank else []
    if len(machines) > 1:
        levels.append(([leaders], tuple(rank for ranks in machines for rank in ranks)))
    needed: list[Step] = []
    further: list[Step] = []
    for level, (groups, all_ranks) in enumerate(levels):
        pairs = [group[:2] for group in groups] + [pair for group in groups for pair in pairwise(group[1:])]
        first = groups[0]
        needed += [("link", level, pairs[0]), ("sum", level, all_ranks)]
        if len(first) > 2:
            star = first[: _MAX_PEERS + 1]
            needed += [("out", level, star), ("into", level, star)]
        further += [("link", level, pair) for pair in pairs[1:_MAX_LINKS]]
        if all_ranks != first:  # all-reduces between machines: one rank of each, then all
            further.append(("sum", level, first))
        further += [("sum", level, first[:count]) for count in (2, 4, 8, 16, 32) if count < len(first)]
    return tuple(needed), tuple(further)


def _measure_step(step: Step, rank: int, device: Any, target_s: float) -> list[Link | Fan | Sum]:
    """Returns the results that this rank reports: of a link what it receives, of other steps the first rank's."""
    kind, level, ranks = step
    # The few CTAs of a message move less than a whole card could.
    group = make_link_group(ranks, device) if kind == "link" else process_group.make_group(ranks)
    if rank not in ranks:
        return []
    result: Link | Fan | Sum
    if kind == "link":
        sender, latency_s = ranks[rank == ranks[0]], links.echo(rank, ranks, group, device)
        ways = {pair[0]: links.one_way(rank, pair, group, device, target_s) for pair in (ranks, ranks[::-1])}
        both = links.both_ways(sender, group, min(size for _, size in ways.values()), device)
        result = Link(level, sender, rank, latency_s, ways[sender][0], both)
    elif kind == "sum":
        result = Sum(level, ranks, *links.sum_over(group, len(ranks), device, target_s))
    else:
        result = Fan(level, kind == "out", ranks, links.fan(rank, ranks, group, device, target_s, sends=kind == "out"))
    process_group.leave_group(group)
    return [result] if kind == "link" or rank == ranks[0] else []


@dataclass(frozen=True)
class MeasuredRuntime:
    """The runtime's costs at a worker, and the effective link between two workers.

    Attributes:
        bandwidth_bytes_per_s, latency_s: None if unknown; within a single process a message arrives at once.
    """

    costs: RuntimeCosts
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    def on_links(self, cluster: Cluster) -> Cluster:
        """Returns a cluster of one level with the measured link."""
        (level,) = cluster.levels
        bandwidth = self.bandwidth_bytes_per_s or level.bandwidth_bytes_per_s
        latency_s = level.latency_s if self.latency_s is None else self.latency_s
        return replace(cluster, levels=(replace(level, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s),))


def measure_runtime(device: str = "cpu") -> MeasuredRuntime:
    """Runs the runtime on small layers of known cost: in this process, or over the processes of this group.

    Takes some tenths of a second, once per process. Every rank calls it and gets the same answer. GPU workers are
    measured on CPUs, without the cost of message bytes: the host does the same work otherwise.
    """
    torch_device = joining.process_device(device)
    _, processes = joining.join_group(torch_device, check_software=False)  # the session of `calibrate` does
    measured = _measure_processes(processes)
    if torch_device.type == "cpu":
        return measured
    return MeasuredRuntime(replace(measured.costs, message_s_per_byte=0.0, overlap_device=True))


@cache
def _measure_processes(processes: int) -> MeasuredRuntime:
    stages = max(2, processes)
    plan = Plan.uniform(stages)
    schedule = schedules.build("pipedream", plan)
    program, evaluation = lower(schedule), lower(schedules.evaluation(plan, schedule.placement))
    verify(program)
    verify(evaluation)
    small, large = calibrate(program, evaluation)
    # The first of several workers also reads the data.
    small_s, large_s = (max(0.0, sum(calibration.other_s[1:] or calibration.other_s)) for calibration in (small, large))
    # An activation and its gradient at each boundary, and the targets from the first to the last stage, at both ends.
    large_ends = 4 if processes == 1 else 4 * (stages - 2) + 2
    ends = large_ends + (2 if processes == 1 else 1)
    rise_bytes = large.message_bytes - small.message_bytes
    message_s = small_s / ends
    costs = RuntimeCosts(
        op_s=max(0.0, small.op_s),
        message_s=message_s,
        message_s_per_byte=max(0.0, large_s - small_s) / large_ends / rise_bytes,
        update_s=small.update_s,
        load_s=0.0 if processes == 1 else max(0.0, small.other_s[0] - 3 * message_s),
        encodings_s_per_byte=measure_encodings(),
    )
    if processes == 1:
        return MeasuredRuntime(costs, _INSTANT_BYTES_PER_S, 0.0)
    links_s = [
        max(0.0, calibration.arrival_s - 2 * float(costs.end_s(calibration.message_bytes)))
        for calibration in (small, large)
    ]
    rise_s = links_s[1] - links_s[0]
    return MeasuredRuntime(costs, rise_bytes / rise_s if rise_s > 0 else None, links_s[0])
