"""Copies of what each rank writes, in the memory of the next machine: a machine that is lost takes nothing with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipedream.runtime.comm.process_group import peers_may_end

_SENT_BYTES = 16 << 20  # at once


@peers_may_end()
def exchange_copies(
    folder: Path, files: Mapping[int, tuple[str, int]], neighbours: Mapping[int, int], group: dist.ProcessGroup
) -> OSError | None:
    """Sends this rank's file to its neighbour, and writes those that arrive; every rank calls it.

    Returns why a copy could not be written, if so.

    Args:
        files: name and bytes, of each rank that has one.
    """
    rank, failure = dist.get_rank(group), None
    arriving = {sender: file for sender, file in files.items() if neighbours[sender] == rank}
    sending = {neighbours[rank]: files[rank]} if rank in files else {}
    for sent in range(0, max((size for _, size in [*arriving.values(), *sending.values()]), default=0), _SENT_BYTES):
        works: list[Any] = []
        received = []
        for sender, (name, size) in arriving.items():
            if size > sent:
                part = torch.empty(min(size - sent, _SENT_BYTES), dtype=torch.uint8)
                works.append(dist.irecv(part, group=group, group_src=sender))
                received.append((folder / name, part))
        for neighbour, (name, size) in sending.items():
            if size > sent:
                part = torch.empty(min(size - sent, _SENT_BYTES), dtype=torch.uint8)
                with open(folder / name, "rb") as source:
                    source.seek(sent)
                    source.readinto(part.numpy().data)
                works.append(dist.isend(part, group=group, group_dst=neighbour))
        for work in works:
            work.wait()
        for path, part in received:
            try:
                with open(path, "ab") as file:
                    file.write(part.numpy().data)
            except OSError as error:  # the sender sends on
                failure = error
    return failure
