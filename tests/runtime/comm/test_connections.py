"""Connecting: each group is used once before the first message, and ranks that do not connect are named."""

import os
import re
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import processes
import pytest
import torch
import torch.distributed as dist

import pipedream as pd
from pipedream.runtime.comm import connections, transport

CPU = torch.device("cpu")


def connect_without_rank_2() -> str:
    """Rank 2 does not send what rank 0 waits for, a second long; busy machines need longer for the others."""
    run = connections._Connector.run

    def run_for_a_second(self: Any, ranks: Any, function: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "CONNECT_TIMEOUT_S", 1.0 if 2 in ranks else 60.0)
            return run(self, ranks, function)

    connections._Connector.run = run_for_a_second  # type: ignore[method-assign]
    if dist.get_rank() == 2:
        connections._share_memory = lambda *of: None
    try:
        connected = connections.connect_groups([(0, 1), (0, 2)], [[0], [1], [2]], [], CPU, CPU)
    except pd.errors.WorkerError as error:
        outcome = str(error)
    else:
        outcome = f"connected, {connected.everyone._get_backend(CPU).options._timeout}"
    dist.barrier()
    if dist.get_rank() == 2:
        connected.everyone.send([torch.zeros(1, dtype=torch.uint8)], 0, 0).wait()  # its thread still waits
    dist.barrier()
    return outcome


@pytest.mark.processes
def test_ranks_that_do_not_connect_are_named() -> None:
    outcomes = processes.results(connect_without_rank_2, 3)
    assert outcomes[1] == "connected, 0:30:00", "the limit for connecting is none for messages"
    words = "(?s)rank 0, connecting: no connection from rank 0 at .* to rank 2 at .*nothing came within 1 s.*GLOO_SO"
    assert re.match(words, outcomes[0])


def test_an_error_of_a_connection_is_reported_with_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("connection refused")

    connecting = connections._Connector(0, ["first (10.0.0.1)", "second (10.0.0.2)", "third (10.0.0.3)"], CPU)
    words = r"from rank 0 at first .* to rank 2 at third \(10.0.0.3\); torch's error"
    with pytest.raises(pd.errors.WorkerError, match=words):
        connecting.run((0, 2), refuse)
    connecting.run((1, 2), refuse)  # does not concern this rank
    monkeypatch.setattr(dist, "new_group", lambda *of, **options: refuse())
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(pd.errors.WorkerError, match=r"(?s)torch's error: connection refused.*ulimit -u"):
        connections.make_gloo_group()


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
    # Where each launch waits, two ranks that send to each other would wait for ever.
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    words = "CUDA_LAUNCH_BLOCKING=1 makes each send wait .* through the memory of the CPU"
    with pytest.warns(UserWarning, match=words) if uses_nccl else nullcontext():
        assert not connections.has_nccl(torch.device(device), cards)


@pytest.mark.parametrize("ends", [True, False])
def test_after_a_failure_all_communicators_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """One by one, each would wait for the others' kernels; an abort that does not end must not keep the process."""
    calls, at_exit, aborts, everyone = list[str](), list[Any](), threading.Event(), Mock()
    groups = [Mock() for _ in range(3)]  # over NCCL
    for group in groups:
        group._get_backend = {torch.device("cuda"): group}.__getitem__
        group._group_start, group._group_end = (partial(calls.append, name) for name in ("start", "end"))
        group.abort = lambda: calls.append("abort" if aborts.wait(60.0) else "never")
    monkeypatch.setattr(connections, "_ABORT_S", 10.0 if ends else 0.01)
    monkeypatch.setattr(connections.atexit, "register", at_exit.append)
    if ends:
        aborts.set()
    links = {(0, 1): groups[0], (1, 0): groups[1]}
    connections.Connections(everyone, everyone, (groups[2], None), (), {}, links).abort()
    if ends:
        assert calls == ["start", "abort", "abort", "abort", "end"]
    assert at_exit == ([] if ends else [connections._end_process])
    aborts.set()
    connections.Connections(everyone, everyone, (groups[2],), (), {}, {}).abort()  # gloo's need nothing


def test_links_between_gpus_have_a_device_few_ctas_and_no_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    make_options = lambda: SimpleNamespace(_timeout=None, config=SimpleNamespace(max_ctas=-1))  # noqa: E731
    monkeypatch.setenv("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "1")
    monkeypatch.delenv("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING")
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=make_options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: calls.append({"ranks": ranks} | options))
    gpu = torch.device("cuda:1")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(connections, "unsplit_groups", nullcontext)
    connections._make_group((1, 0), gpu, 4)
    connections._make_group((0, 1), gpu)
    connections.make_link_group((1, 0), gpu)
    connections.make_link_group((1, 0), CPU)
    link, sums, measured, over_gloo = calls
    assert over_gloo.pop("timeout").seconds == 60, "gloo waits for a rank that could start no thread"
    assert measured["pg_options"].config.max_ctas == connections._LINK_CTAS, "the probe measures what messages use"
    assert over_gloo == {"ranks": [1, 0], "backend": "gloo"}
    assert set(link) == {"ranks", "backend", "timeout", "pg_options", "device_id"}, "torch 2.11 has no sort_ranks"
    assert (link["ranks"], link["backend"], sums["backend"]) == ([0, 1], "nccl", "cpu:gloo,cuda:nccl")
    assert link["pg_options"]._timeout == link["timeout"], "torch warns"
    assert link["pg_options"].config.max_ctas == 4
    assert os.environ["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] == "0"
    for call in calls[:3]:
        assert call["device_id"] == gpu
        assert 7 <= call["timeout"].days <= 24, "milliseconds in 32 bits"


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_up_and_down_use_groups_of_their_own(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """While a rank sends on a connection, it would wait to read what arrives on the same one."""
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    everyone, upward = Mock(), Mock()
    run_connections = connections.Connections(everyone, upward, (), (), {}, {})
    connection = transport.PeerConnection(run_connections, CPU, 1 - rank, number=0, depth=1, max_unread=1)
    ends: Any = [connection.open_sender(), connection.open_receiver()]
    assert [end._endpoint.group for end in ends] == ([upward, everyone] if rank == 0 else [everyone, upward])
