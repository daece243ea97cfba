"""Joins the processes that a launcher started: each finds the others and its device, and all run the same code."""

import os
import platform
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed re-exports them privately
from torch.distributed import distributed_c10d

from pipedream._version import __version__, hash_sources
from pipedream.core.errors import PeerError, PlanError
from pipedream.core.user_code import name_call
from pipedream.runtime.comm.process_group import (
    broadcast_text,
    gather_texts,
    machine_address,
    set_timeout,
    world_group,
)
from pipedream.services.joining.launcher import LOCAL_RANKS, detect_launcher, read_launcher

JOIN_TIMEOUT_S = 300.0
"""How long ranks wait for each other; the slowest may still be importing torch."""

_ANSWER_PERIOD_S = 0.005

CALL_TIMEOUT_S = 60.0
"""How long the first rank that makes a call waits for the others to make it."""


def is_distributed() -> bool:
    """Returns whether a process group exists, or a launcher (torchrun, srun, mpirun) started this process."""
    read_launcher()
    return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_group(device: str | torch.device, *, check_software: bool = True) -> tuple[int, int]:
    """Returns (rank, workers); (0, 1) for a single process. Every rank calls it.

    Raises PlanError if a launcher's variables are incomplete, the ranks do not connect, or run different software.
    """
    if not is_distributed():
        return 0, 1
    if not dist.is_initialized():
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
        if missing:
            raise PlanError(
                f"{os.environ['WORLD_SIZE']} processes were started, but {', '.join(missing)} is not set; start them "
                "with torchrun or srun, or set it for all of them (mpirun -x MASTER_ADDR=<the machine of rank 0>)"
            )
        _join("cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo")
    if check_software:
        check_same_software()
    return dist.get_rank(), dist.get_world_size()


def _join(backend: str) -> None:
    """Raises PlanError if the ranks do not connect within `JOIN_TIMEOUT_S`."""
    began_s = time.monotonic()

    def spell_limit() -> str:  # an error may come earlier
        return f" within {JOIN_TIMEOUT_S:g} s" if time.monotonic() - began_s > 0.9 * JOIN_TIMEOUT_S else ""

    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, limit = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", timedelta(seconds=JOIN_TIMEOUT_S)
    advice = (
        "read what the other ranks printed, check that the machines reach each other on all ports, and name the "
        "interface that joins them on each (GLOO_SOCKET_IFNAME)"
    )
    who = f"rank {rank} at {machine_address()}"
    # torchrun's agent serves the store. Not with wait_for_workers, whose error does not name the missing ranks. With
    # multi_tenant, as torch does it: a store that this process already serves at the port is shared.
    serves_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        base_store = TCPStore(host, port, None, serves_store, limit, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        raise PlanError(
            f"no connection from {who} to rank 0 at {address}{spell_limit()}; {advice} ({error})"
        ) from error
    store, absent = _open_attempt(base_store, rank, processes)
    try:
        if absent:
            raise dist.DistStoreError("nothing of them is in the store")
        dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=limit)
    except RuntimeError as error:
        others = [other for other in range(processes) if other != rank]
        if absent := absent or [other for other in others if not store.check([f"address/{other}"])]:
            reason = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} did not come to {address}"
        else:
            tried = {other: store.get(f"address/{other}").decode() for other in others}
            reason = "it tried " + ", ".join(f"rank {other} at {machine}" for other, machine in tried.items())
        raise PlanError(f"{who} is not connected{spell_limit()}: {reason}; {advice} ({error})") from error
    set_timeout(dist.default_pg_timeout)  # the limit was for joining


def _open_attempt(base_store: TCPStore, rank: int, processes: int) -> tuple[PrefixStore, list[int]]:
    """Returns a store with the addresses of this attempt's ranks alone, and the ranks that did not come in time.

    torchrun's store outlives a restart, with its old contents, and its agents number attempts differently: each counts
    the failures of its own workers, and a machine that comes back starts from zero. So rank 0 names the attempt, and
    every other rank asks for the name under a key of its own.
    """
    name, question = uuid4().hex, "pipedream/question/{}".format
    if rank:
        base_store.set(question(rank), name)
        try:
            name = base_store.get(f"pipedream/answer/{name}").decode()
        except RuntimeError:
            return PrefixStore("pipedream/nowhere", base_store), [0]
    store = PrefixStore(f"pipedream/attempt/{name}", base_store)
    store.set(f"address/{rank}", machine_address())
    absent = [] if rank else list(range(1, processes))
    end_s = time.monotonic() + JOIN_TIMEOUT_S
    while absent and time.monotonic() < end_s:
        for key in map(question, absent):
            if base_store.check([key]):  # perhaps that of an earlier attempt, until there is a new one
                base_store.set(f"pipedream/answer/{base_store.get(key).decode()}", name)
        time.sleep(_ANSWER_PERIOD_S)
        absent = [other for other in absent if not store.check([f"address/{other}"])]
    return store, absent


def run_on_rank_0(make: Callable[[], str], device: str) -> str:
    """Joins the group if needed; see `make_on_rank_0`."""
    if not is_distributed():
        return make()
    rank, _ = join_group(device)
    return make_on_rank_0(make, rank)


def make_on_rank_0(make: Callable[[], str], rank: int) -> str:
    """Returns rank 0's result of `make`; if it fails, all ranks raise, the others PlanError."""
    text, failure = "", None
    if rank == 0:
        try:
            text = "+" + make()
        except Exception as error:
            failure = error
            text = f"-{type(error).__name__}: {error}"
    text = broadcast_text(text, world_group())
    if failure is not None:
        raise failure
    if text.startswith("-"):
        raise PlanError(f"rank 0 failed: {text[1:]}")
    return text[1:]


def name_code() -> str:
    """Returns the version of this library and a digest of its source files."""
    return f"pipedream {__version__} (source {hash_sources()})"


def check_same_software() -> None:
    """Raises PlanError if ranks differ in pipedream's code or the versions of torch or Python, or one does not call it.

    Every rank calls it.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    software = f"{name_code()}, torch {torch.__version__}, Python {python}"
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(_gather_in_time(software)):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) > 1:
        versions = "; ".join(f"{text} on ranks {', '.join(map(str, same_ranks))}" for text, same_ranks in ranks.items())
        raise PlanError(f"the ranks run different software: {versions}; install the same on all machines")


def _gather_in_time(text: str) -> list[str]:
    """Returns the texts of all ranks. Raises PlanError if some have not made the call within `CALL_TIMEOUT_S`."""
    if not dist.is_initialized():
        return [text]
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    number = store.add(f"pipedream/came/{rank}", 1)
    group = world_group()
    assert group is not None
    old_timeout = group._get_backend(torch.device("cpu")).options._timeout
    # Not only a limit on `wait`: the interpreter cannot end before gloo gives up the exchange.
    set_timeout(timedelta(seconds=CALL_TIMEOUT_S), group)
    try:
        return gather_texts(text, group)
    except (RuntimeError, PeerError) as error:
        others = [other for other in range(dist.get_world_size()) if other != rank]
        absent = [other for other in others if store.add(f"pipedream/came/{other}", 0) < number]  # adding 0 reads
        if not absent or " by peer" in str(error):  # a connection closed: a rank has failed, and says why itself
            raise
        ranks_text = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        raise PlanError(
            f"rank {rank} is in {name_call()}, and {ranks_text} made no such call within {CALL_TIMEOUT_S:g} s; every "
            "rank must call it, without a condition on the rank around it; if some take longer to get there, put a "
            "torch.distributed.barrier() before it"
        ) from error
    finally:
        set_timeout(old_timeout, group)


def process_device(name: str) -> torch.device:
    """Returns this process's device: 'cuda' is the GPU number LOCAL_RANK.

    Raises PlanError if this machine has no such device, or nothing shows which GPU is this process's.
    """
    if name.startswith("cuda"):
        # CUDA reads it at its start: with the default of 8 queues, computation would wait for a receive.
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if started and is_distributed() and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
            warnings.warn(
                "CUDA was initialized before the pipeline was created, so kernels may queue behind messages; set "
                "CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment",
                stacklevel=2,
            )
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name == "cuda":
        name = f"cuda:{_choose_gpu()}"
    try:
        device = torch.device(name)
    except RuntimeError:  # its text lists 22 kinds of devices
        raise PlanError(f"device {name!r} is not known; choose cpu or cuda") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            remedy = f"choose one of cuda:0 to cuda:{count - 1}, or start fewer processes" if count else "use cpu"
            raise PlanError(f"device {name!r} was requested, but {_spell_gpus(count)} found on this machine; {remedy}")
        torch.cuda.set_device(device)
    return device


def _choose_gpu() -> int:
    """Returns the number of this process's GPU on its machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if count == 1 and (detect_launcher() is not None or os.environ.get("CUDA_VISIBLE_DEVICES")):
        return 0  # srun, mpirun and scripts under torchrun may show each process its own GPU alone
    if local_processes > max(count, 1):
        raise PlanError(
            f"{local_processes} processes were started on this machine, each for a GPU of its own, but "
            f"{_spell_gpus(count)} found; start "
            f"{f'{count} (--workers or --nproc-per-node)' if count else 'them with --device cpu'}"
        )
    variable = next((name for name in LOCAL_RANKS if name in os.environ), None)
    if count == 1 and variable != "LOCAL_RANK":  # whoever sets LOCAL_RANK asks for a GPU by number
        return 0
    if variable is None and is_distributed():
        raise PlanError(
            f"device 'cuda' was requested, but this process's GPU is not known: none of {', '.join(LOCAL_RANKS)} is "
            f"set, and {_spell_gpus(count)} found on this machine; start the workers with torchrun, set LOCAL_RANK to "
            "each process's number on its machine, or name the GPU (cuda:1)"
        )
    return int(os.environ[variable]) if variable is not None else 0


def _spell_gpus(count: int) -> str:
    return "1 GPU was" if count == 1 else f"{count or 'no'} GPUs were"
