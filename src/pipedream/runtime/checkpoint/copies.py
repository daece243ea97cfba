"""Copies each rank's file into the next machine's memory, so that losing a machine loses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipedream.runtime.comm.process_group import peers_may_end

_CHUNK_BYTES = 16 << 20  # at once


@peers_may_end()
def exchange_copies(
    folder: Path, files: Mapping[int, tuple[str, int]], neighbours: Mapping[int, int], group: dist.ProcessGroup
) -> OSError | None:
    """Sends this rank's file to its neighbour and writes the received ones; every rank calls it.

    Returns the error of a copy that could not be written, or None.

    Args:
        files: rank -> (name, bytes) of its file.
    """
    rank, failure = dist.get_rank(group), None
    incoming = {sender: file for sender, file in files.items() if neighbours[sender] == rank}
    outgoing = {neighbours[rank]: files[rank]} if rank in files else {}
    for start in range(0, max((size for _, size in [*incoming.values(), *outgoing.values()]), default=0), _CHUNK_BYTES):
        transfers: list[Any] = []
        received = []
        for sender, (name, size) in incoming.items():
            if size > start:
                part = torch.empty(min(size - start, _CHUNK_BYTES), dtype=torch.uint8)
                transfers.append(dist.irecv(part, group=group, group_src=sender))
                received.append((folder / name, part))
        for neighbour, (name, size) in outgoing.items():
            if size > start:
                part = torch.empty(min(size - start, _CHUNK_BYTES), dtype=torch.uint8)
                with open(folder / name, "rb") as source:
                    source.seek(start)
                    source.readinto(part.numpy().data)
                transfers.append(dist.isend(part, group=group, group_dst=neighbour))
        for transfer in transfers:
            transfer.wait()
        for path, part in received:
            try:
                with open(path, "ab") as file:
                    file.write(part.numpy().data)
            except OSError as error:  # continue: the sender does not know of it
                failure = error
    return failure
