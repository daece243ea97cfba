"""What this project takes for granted of NCCL, as far as one card shows it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from findings import Finding, need_card
from loops import Scale
from rank_checks import Job, start_ranks, wait_for_all

GROUPS = (1, 4, 16)
SENT = 1 << 20  # elements of a message


def nccl(device: torch.device, scale: Scale) -> Iterator[Finding]:
    """A world of one rank that sends to itself, and two ranks on one card."""
    need_card(device)
    with _check_alone(device):
        group = dist.new_group([0], backend="nccl", device_id=device)
        sent, received = torch.ones(SENT, device=device), torch.zeros(SENT, device=device)
        for work in _send_to_itself(group, sent, received):
            work.wait()
        torch.cuda.synchronize()

        torch.cuda._sleep(_count_cycles(0.1, device))
        works = _send_to_itself(group, sent, received)
        began = time.perf_counter()
        for work in works:
            work.wait()
        yield Finding("wait_s", time.perf_counter() - began, "<=", 200e-6, "of the host; the card has 100 ms to do")
        early = sum(work.is_completed() for work in works)
        torch.cuda.synchronize()
        late = sum(work.is_completed() for work in works)
        yield Finding("completed_too_early", early, "==", 0)
        yield Finding("completed_at_last", late, "==", len(works))

        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for turn in range(100):
            torch.cuda._sleep(_count_cycles(1e-3, device))
            sent = torch.full((SENT,), float(turn), device=device)
            works = _send_to_itself(group, sent, received)
            del sent  # the allocator may give its block to the next tensor
            torch.full((SENT,), -1.0, device=device)
            for work in works:
                work.wait()
            wrong += (received != turn).sum()
        yield Finding("wrong_elements", int(wrong), "==", 0, "the sender's block was freed and written 100 times")
        yield from _check_groups(device)
    yield from _check_two_ranks(device)


@contextmanager
def _check_alone(device: torch.device) -> Iterator[None]:
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, 1, True)  # port 0: any that is free
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _send_to_itself(group: dist.ProcessGroup, sent: torch.Tensor, received: torch.Tensor) -> list[dist.Work]:
    ends = [dist.P2POp(dist.isend, sent, 0, group), dist.P2POp(dist.irecv, received, 0, group)]
    return dist.batch_isend_irecv(ends)


def _count_cycles(seconds: float, device: torch.device) -> int:
    """Returns the argument of torch.cuda._sleep, measured once."""
    if device not in _CYCLES_PER_S:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize()
        _CYCLES_PER_S[device] = 20_000_000 / (begin.elapsed_time(end) * 1e-3)
    return int(seconds * _CYCLES_PER_S[device])


_CYCLES_PER_S: dict[torch.device, float] = {}


def _check_groups(device: torch.device) -> Iterator[Finding]:
    few = torch.ones(8, device=device), torch.zeros(8, device=device)
    for count in GROUPS:
        torch.cuda.synchronize()
        free_bytes, began = torch.cuda.mem_get_info(device)[0], time.perf_counter()
        groups = [dist.new_group([0], backend="nccl", device_id=device) for _ in range(count)]
        for group in groups:
            for work in _send_to_itself(group, *few):
                work.wait()
        torch.cuda.synchronize()
        yield Finding(f"{count}_groups_s", time.perf_counter() - began)
        yield Finding(f"{count}_groups_bytes", free_bytes - torch.cuda.mem_get_info(device)[0])
        for group in groups:
            dist.destroy_process_group(group)


def _check_two_ranks(device: torch.device) -> Iterator[Finding]:
    """What NCCL says to two ranks on one card is noted; no answer is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = wait_for_all(start_ranks(__file__, Job(folder, str(device), {}, []), 2), 20)
        printed = (Path(folder) / "0.said").read_text(encoding="utf-8")
    duplicate = [line for line in printed.splitlines() if "Duplicate GPU" in line]
    note = (duplicate or printed.strip().splitlines()[-1:] or [""])[0]
    yield Finding("two_ranks_on_one_card_s", seconds, note=note[:300])


def share_card(device: torch.device) -> None:
    """Is one of two ranks that add one number up over NCCL, which may refuse two ranks on one card."""
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    print(f"the sum is {tensor.item():g}")
    os._exit(0)  # leaving the group may wait for the other rank


if __name__ == "__main__":
    share_card(torch.device(json.loads(sys.argv[1])["device"]))
