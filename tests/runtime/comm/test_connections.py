"""Connecting: each group is used once before the first message, and ranks that do not connect are named."""

from __future__ import annotations

from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist

from pipedream.core.errors import WorkerError
from pipedream.runtime.comm import connections
from pipedream.runtime.comm.connections import connect_groups
from pipedream.runtime.comm.transport import PeerConnection

CPU = torch.device("cpu")


def connect_without_rank_2() -> str:
    """Rank 2 does not send what rank 0 waits for."""
    connections.CONNECT_TIMEOUT_S = 1.0
    if dist.get_rank() == 2:
        connections._share_memory = lambda *of: None
    try:
        connect_groups([(0, 1), (0, 2)], [[0], [1], [2]], [], CPU)
    except WorkerError as error:
        outcome = str(error)
    else:
        outcome = "connected"
    dist.barrier()
    if dist.get_rank() == 2:
        dist.group.WORLD.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait()  # its thread still waits
    dist.barrier()
    return outcome


@pytest.mark.processes
def test_ranks_that_do_not_connect_are_named() -> None:
    outcomes = processes.results(connect_without_rank_2, 3)
    assert outcomes[1] == "connected"
    assert outcomes[0].startswith("rank 0, connecting: no connection from rank 0 at ")
    assert " to rank 2 at " in outcomes[0]
    assert "nothing came within 1 s" in outcomes[0]
    assert "GLOO_SOCKET_IFNAME" in outcomes[0]


def test_an_error_of_a_connection_is_reported_with_both_ranks() -> None:
    def refuse() -> None:
        raise RuntimeError("connection refused")

    connecting = connections._Connecting(0, ["first (10.0.0.1)", "second (10.0.0.2)", "third (10.0.0.3)"], CPU)
    with pytest.raises(WorkerError, match=r"from rank 0 at first .* to rank 2 at third \(10.0.0.3\); torch's error"):
        connecting.run((0, 2), refuse)
    connecting.run((1, 2), refuse)  # does not concern this rank


@pytest.mark.parametrize(
    ("device", "backends", "cards", "uses_nccl"),
    [
        ("cpu", "cpu:gloo", ["", ""], False),
        ("cuda", "cpu:gloo,cuda:nccl", ["a", "b"], True),
        ("cuda", "cpu:gloo,cuda:nccl", ["a", "a"], False),
        ("cuda", "cpu:gloo,cuda:gloo", ["a", "b"], False),
    ],
)
def test_nccl_is_used_if_the_group_has_it_and_each_rank_a_card(
    monkeypatch: pytest.MonkeyPatch, device: str, backends: str, cards: list[str], uses_nccl: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert connections.has_nccl(torch.device(device), cards) is uses_nccl


def test_links_between_gpus_have_a_device_few_ctas_and_no_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        class config:
            max_ctas = -1

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Double", (), {"Options": Options}), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: calls.append({"ranks": ranks} | options))
    gpu = torch.device("cuda:1")
    connections._make_group((1, 0), gpu, 4)
    connections._make_group((0, 1), gpu)
    link, sums = calls
    assert link["ranks"] == [1, 0]
    assert link["sort_ranks"] is False
    assert link["backend"] == "nccl"
    assert link["pg_options"].config.max_ctas == 4
    assert sums["backend"] == "cpu:gloo,cuda:nccl"
    assert all(call["device_id"] == gpu and call["timeout"].days >= 7 for call in calls)


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_up_and_down_use_groups_of_their_own(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """While a rank sends on a connection, it would wait to read what arrives on the same one."""
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    everyone: Any = object()
    upward: Any = object()
    run_connections = connections.Connections(everyone, upward, (), (), {}, {})
    connection = PeerConnection(run_connections, CPU, 1 - rank, number=0, depth=1, max_unread=1)
    ends: Any = [connection.open_sender(), connection.open_receiver()]
    assert [end._endpoint.group for end in ends] == ([upward, everyone] if rank == 0 else [everyone, upward])
