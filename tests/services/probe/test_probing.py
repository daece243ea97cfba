"""Probing: what is measured on which machines, and that it comes to what is there."""

import json
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import processes
import pytest
import torch.distributed as dist
from two_machines import machines, on_both

import pipedream as pd
from pipedream.services.probe.probe import choose_steps, probe
from pipedream.slow_links import LINK, Network

__all__ = ["machines"]  # the fixture


@pytest.mark.parametrize("widths", [(1, 1), (2,), (5,), (2, 2), (1, 3, 2), (4,) * 4, (1,) * 9])
def test_every_level_gets_what_its_cluster_needs(widths: tuple[int, ...]) -> None:
    groups = [tuple(range(end - width, end)) for end, width in zip(accumulate(widths), widths, strict=True)]
    needed, further = choose_steps(groups)
    for level in range(2 if max(widths) > 1 and len(widths) > 1 else 1):
        assert [step[1] for step in needed if step[0] == "link"].count(level) == 1
        assert [step[1] for step in needed if step[0] == "sum"].count(level) == 1
    home = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    for what, level, ranks in (*needed, *further):
        assert len(set(ranks)) == len(ranks) > 1
        inside = len({home[rank] for rank in ranks}) == 1
        assert inside == (level == 0 and max(widths) > 1), f"{what} over {ranks}"
        if what != "sum" and not inside:
            assert len({home[rank] for rank in ranks}) == len(ranks), "a message between machines"
    widest = max((step for step in needed if step[0] == "sum"), key=lambda step: len(step[2]))
    assert len(widest[2]) == (sum(widths) if len(widths) > 1 else widths[0])
    assert len(set(needed) | set(further)) == len(needed) + len(further), "nothing twice"


def test_lone_process_has_nothing_to_measure() -> None:
    with pytest.raises(pd.PipelineError, match=r"torchrun.*--workers 2"):
        probe()


def _probe_with_rules_of_nccl() -> Any:
    """Single messages and batches use different communicators; a group's first batch waits for all its ranks."""
    send, recv, batch = dist.send, dist.recv, dist.batch_isend_irecv
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    connected: set[str] = set()

    def first_together(moves: list[Any]) -> Any:
        group = moves[0].group or dist.group.WORLD
        assert all((move.group or dist.group.WORLD) is group for move in moves)
        if group.group_name not in connected:
            connected.add(group.group_name)
            store.set(f"{group.group_name}/{rank}", "here")
            others = [f"{group.group_name}/{other}" for other in dist.get_process_group_ranks(group)]
            store.wait(others, timedelta(seconds=10))
        return batch(moves)

    dist.send, dist.recv = partial(send, tag=1), partial(recv, tag=1)
    dist.batch_isend_irecv = first_together
    return probe(most_s=1.0)


@pytest.mark.processes
def test_processes_of_one_machine_measure_their_links_under_the_rules_of_nccl() -> None:
    survey, *others = processes.results(_probe_with_rules_of_nccl, 3, timeout_s=45.0)
    assert others == [survey] * 2, "all ranks know the same"
    assert {(link.sender, link.receiver) for link in survey.links} >= {(0, 1), (1, 0)}
    (level,) = survey.cluster().levels
    assert (level.width, len(survey.workers), len(survey.fans)) == (3, 3, 2)
    assert level.bandwidth_bytes_per_s > 1e6
    assert 1e-6 < level.latency_s < 0.1
    assert level.sum_bytes_per_s is not None


@pytest.mark.network
@pytest.mark.processes
def test_shaped_link_is_measured_at_its_rate(machines: Network, tmp_path: Path) -> None:
    rates = (200, 60)  # mbit/s that each of the two machines sends
    for host, rate in zip(machines.hosts, rates, strict=True):
        host.namespace.batch("tc", [f"qdisc add dev {LINK} root tbf rate {rate}mbit burst 32kb limit 16mb"])
    arguments = ("-m", "pipedream", "probe", "-o", str(tmp_path / "cluster.json"), "--json")
    summary = json.loads(on_both(machines, "c10d", arguments, tmp_path)[0].out)
    rows = {(link["sender"], link["receiver"]): link for link in summary["measured"]["links"]}
    cluster = pd.Cluster.load(tmp_path / "cluster.json")
    assert [level.width for level in cluster.levels] == [2]
    measured = {pair: rows[pair]["alone_bytes_per_s"] for pair in ((0, 1), (1, 0))}
    measured |= {"both": cluster.bandwidth_bytes_per_s, "sum": cluster.levels[0].sum_bytes_per_s}
    # A sum is as fast as the slower machine. No link is faster than it is shaped; busy cores make it slower.
    for (what, bytes_per_s), mbit_per_s in zip(measured.items(), (*rates, sum(rates) / 2, min(rates)), strict=True):
        assert 0.5 * mbit_per_s <= bytes_per_s * 8 / 1e6 <= 1.1 * mbit_per_s, what
