"""Joining the others: which GPU a process has, what all must have in common, and over what they exchange texts."""

import gc
import itertools
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import processes
import pytest
import torch
import torch.distributed as dist
from built import Built
from hypothesis import given, strategies as st
from marks import slow
from torch import nn
from torch.distributed import distributed_c10d

import pipedream as pd
from pipedream.runtime.comm import process_group
from pipedream.services.joining import joining, launcher


def _machine(monkeypatch: pytest.MonkeyPatch, gpus: int, **variables: object) -> list[str]:
    """A machine with some GPUs, seen by a process with these variables; returns the devices made current."""
    chosen: list[str] = []
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", *launcher.LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    return chosen


@pytest.mark.parametrize(
    ("gpus", "variables", "device"),
    [
        (4, {}, "cuda:0"),
        (4, {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 3}, "cuda:3"),
        (4, {"WORLD_SIZE": 8, "SLURM_LOCALID": 2}, "cuda:2"),
        (4, {"WORLD_SIZE": 8, "OMPI_COMM_WORLD_LOCAL_RANK": 1}, "cuda:1"),
        (1, {"WORLD_SIZE": 8, "SLURM_LOCALID": 5}, "cuda:0"),
        (1, {"WORLD_SIZE": 8}, "cuda:0"),
        (1, {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 3, "CUDA_VISIBLE_DEVICES": 3}, "cuda:0"),
    ],
)
def test_gpu_of_a_process(monkeypatch: pytest.MonkeyPatch, gpus: int, variables: dict[str, int], device: str) -> None:
    chosen = _machine(monkeypatch, gpus, **variables)
    assert str(joining.process_device("cuda")) == device
    assert chosen == [device]


FOUR = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 1}


@pytest.mark.parametrize(
    ("name", "gpus", "variables", "words"),
    [
        *((name, 0, {}, f"^device '{name}' is not known; choose cpu or cuda$") for name in ("tpu", "cuda:x", "")),
        ("cuda", 0, {}, "device 'cuda:0' was requested, but no GPUs were found on this machine; use cpu"),
        ("cuda", 4, {"WORLD_SIZE": 8}, "GPU is not known: none of LOCAL_RANK.*4 GPUs.*torchrun.*set LOCAL_RANK"),
        ("cuda", 2, FOUR, r"4 processes .* on this machine.*but 2 GPUs were found; start 2 \(--workers or --nproc-per"),
        ("cuda", 1, FOUR, r"but 1 GPU was found; start 1 \(--workers or --nproc-per-node"),
        ("cuda", 0, FOUR, "no GPUs were found; start them with --device cpu"),
        ("cuda", 2, {"WORLD_SIZE": 4, "SLURM_LOCALID": 2}, "'cuda:2' was requested, but 2 GPUs.*start fewer processes"),
    ],
)
def test_a_device_that_a_process_does_not_have(
    name: str, gpus: int, variables: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, gpus, **variables)
    with pytest.raises(pd.errors.PlanError, match=words):
        joining.process_device(name)


def _join_with(versions: list[str]) -> tuple[int, int]:
    joining.__version__ = versions[dist.get_rank()]
    return joining.join_group("cpu")


@pytest.mark.processes
def test_ranks_with_different_software() -> None:
    assert processes.results(_join_with, 2, ["0.1", "0.1"]) == [(0, 2), (1, 2)]
    words = r"different software: pipedream 0.1 .source \w{12}., torch .*, Python 3.* on ranks 0, 2; pipedream 0.2"
    for end in processes.launch(_join_with, 3, ["0.1", "0.2", "0.1"]):
        assert isinstance(end.error, pd.errors.PlanError)
        assert re.search(f"{words} .*, torch .* on ranks 1; install the same on all", str(end.error))


def _values_in_a_group_for_gpus() -> list[list[list[int]]]:
    """The default group accepts CUDA tensors only, as one of NCCL does."""
    rank, workers, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    values = []
    for number in range(2):  # a group made for texts is not used after its default group has gone
        dist.barrier()
        dist.destroy_process_group()
        how: Any = {"rank": rank, "world_size": workers, "timeout": timedelta(seconds=20)}
        dist.init_process_group("cuda:gloo", store=dist.PrefixStore(f"own/{number}", store), **how)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.broadcast(torch.ones(1), 0)
        assert joining.join_group("cpu") == (rank, workers)
        values.append(process_group.gather_json((number, rank), process_group.world_group()))
        dist.barrier(process_group.world_group())
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"back/{number}", store), **how)
    return values


@pytest.mark.processes
def test_values_in_a_users_own_group_of_nccl() -> None:
    assert processes.results(_values_in_a_group_for_gpus, 2) == [[[[0, 0], [0, 1]], [[1, 0], [1, 1]]]] * 2


def test_a_gpu_has_a_queue_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    _machine(monkeypatch, 1)
    queues: list[str] = []

    # It starts CUDA, which reads the variable.
    note = lambda: not queues.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", note)
    joining.process_device("cuda")
    assert set(queues) == {"32"}
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    joining.process_device("cuda:0")  # alone, without messages
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "CUDA was initialized before the pipeline .* set CUDA_DEVICE_MAX_CONNECTIONS=32"
    with pytest.warns(UserWarning, match=words):
        joining.process_device("cuda:0")


def _make_groups_in_a_bound_world() -> tuple[list[int], str]:
    """Returns what `make_group` asked of the world's communicator, and the device that the world keeps."""
    splits: list[int] = []
    communicator = SimpleNamespace(perform_nocolor_split=lambda device: splits.append(dist.get_rank()))
    everyones = dist.group.WORLD
    everyones.bound_device_id = torch.device("cuda:0")
    with mock.patch.object(distributed_c10d, "_get_split_source", return_value=communicator):
        process_group.make_group([0])
    bound, everyones.bound_device_id = str(everyones.bound_device_id), None
    dist.barrier()
    return splits, bound


@pytest.mark.processes
def test_groups_are_not_split_from_a_users_group_with_a_device() -> None:
    """Rank 1 would wait for a split to which rank 0 does not come: its group is gloo's."""
    assert processes.results(_make_groups_in_a_bound_world, 2) == [([], "cuda:0")] * 2


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        slow(1, r"no connection from rank 1 at \S+ \(.*\) to rank 0 at 127.0.0.1:{port} within 0.5 s; read what"),
        (0, r"rank 0 at \S+ \(.*\) is not connected within 0.5 s: ranks 1, 2 did not come to 127.0.0.1:{port}; read"),
    ],
)
def test_ranks_that_do_not_meet_are_named(monkeypatch: pytest.MonkeyPatch, rank: int, words: str) -> None:
    monkeypatch.setattr(joining, "JOIN_TIMEOUT_S", 0.5)
    with socket.socket() as kept:  # the port is nobody else's meanwhile; rank 0's store may listen there
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        _machine(monkeypatch, 0, RANK=rank, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(pd.errors.PlanError, match=words.format(port=port)):
            joining.join_group("cpu")
    assert not dist.is_initialized()


def test_rank_0_that_does_not_come_to_torchruns_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    _machine(monkeypatch, 0, RANK=1, WORLD_SIZE=3, **meeting)
    words = rf"is not connected%s: rank 0 did not come to \S+:{store.port}; read what"
    monkeypatch.setattr(joining, "JOIN_TIMEOUT_S", 0.1)
    with pytest.raises(pd.errors.PlanError, match=words % " within 0.1 s"):
        joining.join_group("cpu")
    monkeypatch.setattr(joining, "JOIN_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(joining, "_open_attempt", lambda *_: (store, [0]))
    with pytest.raises(pd.errors.PlanError, match=words % ""):  # long before the limit
        joining.join_group("cpu")


def test_an_attempt_meets_under_a_name_of_its_own() -> None:
    """Whatever ranks of earlier ones have left in the store: of each the others did not come, or in time."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clients = [store.clone() for _ in range(3)]  # once: some machines take seconds for some connections
    runs = map(str, itertools.count())

    def open_attempt(run: str, ranks: set[int], limit_s: float) -> list[tuple[dist.Store, list[int]]]:
        def open_one(rank: int) -> tuple[dist.Store, list[int]]:
            clients[rank].set_timeout(timedelta(seconds=limit_s))
            return joining._open_attempt(dist.PrefixStore(run, clients[rank]), rank, 3)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(ranks)) as threads:
            patch.setattr(joining, "JOIN_TIMEOUT_S", limit_s)
            return list(threads.map(open_one, ranks))

    @given(st.lists(st.sets(st.integers(0, 2), min_size=1), max_size=3))
    def check(attempts: list[set[int]]) -> None:
        run = next(runs)
        for ranks in attempts:
            for earlier, _ in open_attempt(run, ranks, 0.02):
                earlier.set("earlier", "1")
        stores, absent = zip(*open_attempt(run, {0, 1, 2}, 20.0), strict=True)
        assert absent == ([], [], [])
        stores[0].set("now", "1")
        assert all(store.check(["now", "address/0", "address/1", "address/2"]) for store in stores)
        assert not any(store.check(["earlier"]) for store in stores)

    check()


def _one_ends(how: str) -> str:
    process_group.gather_texts("all are here", process_group.world_group())
    if dist.get_rank() == 1:
        os._exit(3)
    return getattr(process_group, how)("mine", process_group.world_group())


@pytest.mark.processes
@pytest.mark.parametrize("how", ["gather_texts", slow("broadcast_text")])
def test_a_worker_that_ends_is_named_as_the_cause(how: str) -> None:
    """Not gloo's error, which says that the connection was closed."""
    ends = processes.launch(_one_ends, 3, how)
    for end in (ends[0], ends[2]):
        assert isinstance(end.error, pd.errors.PeerError)
        assert "waiting for the other ranks: one of them has ended, whose own message says why" in str(end.error)


def _profile_alone(others_wait: bool) -> None:
    """Rank 0 alone profiles, and then frees its group, as the interpreter's end does."""
    joining.CALL_TIMEOUT_S = 2.0
    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            pd.profile(nn.Linear(4, 4), torch.zeros(8, 4))
        except pd.errors.PlanError as error:
            message = str(error)
        process_group.leave_group()
        gc.collect()
        store.set("profiled", "")
        raise pd.errors.PlanError(message)
    elif others_wait:
        dist.barrier()
    else:
        store.wait(["profiled"], timedelta(seconds=20))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("others_wait", [True, False])
def test_who_profiles_alone_does_not_wait_for_ever(others_wait: bool) -> None:
    end = processes.launch(_profile_alone, 3, others_wait, timeout_s=40.0)[0]
    assert isinstance(end.error, pd.errors.PlanError)
    text = r"rank 0 is in pipedream.profile \(test_joining.py:\d+\), and ranks 1, 2 made no such call within 2 s"
    assert re.match(text, str(end.error))
    assert end.seconds < 20.0


def _sleep_on_rank_0(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 0:
        time.sleep(1.0)
    return x * 1


def _end_while_rank_0_profiles() -> None:
    if dist.get_rank() == 1:
        threading.Timer(4.0, os._exit, (3,)).start()
    pd.profile(nn.Sequential(nn.Linear(4, 4), Built(_sleep_on_rank_0)), torch.zeros(8, 4), runs=30)


@pytest.mark.slow
@pytest.mark.processes
def test_profiling_ends_if_a_rank_does() -> None:
    """Rank 0 computes alone for as long as the model takes, and hears nothing on its connections."""
    ends = processes.launch(_end_while_rank_0_profiles, 2, timeout_s=40.0)
    assert [end.exit_code for end in ends] == [1, 3]
    assert ends[0].seconds < 4.0 + 15.0


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), process_group.peers_may_end():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
