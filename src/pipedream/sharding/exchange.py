"""An all-to-all that, on CPUs, posts its receives first.

gloo's own posts its sends first. The rank that comes last then says that it is ready to receive only after its own data
have left, on the same connection; the other direction waits for that, and the exchange takes twice as long.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


# An operator, so that a dispatch mode sees one call, and tensors without data are exchanged as well.
@torch.library.custom_op("pipedream::exchange", mutates_args=("incoming",))
def exchange(
    incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int], sent: list[int], group: str, kind: str
) -> None:
    """Sends parts of a flat tensor to each rank of a group.

    Args:
        received: elements of `incoming` from each rank.
        sent: elements of `outgoing` for each rank.
        group: its name.
        kind: kind of collective as which it is counted.
    """
    ranks = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
    if outgoing.device.type != "cpu":  # NCCL sends and receives at once, and its first batch waits for all ranks
        dist.all_to_all_single(incoming, outgoing, received, sent, group=ranks)
        return
    here, count = ranks.rank(), ranks.size()
    arriving, leaving = incoming.split(received), outgoing.split(sent)  # type: ignore[no-untyped-call]
    arriving[here].copy_(leaving[here])
    sources = [rank for rank in (*range(here), *range(here + 1, count)) if received[rank]]
    # Each begins with the next rank, so that not all send to one.
    targets = [rank for rank in (*range(here + 1, count), *range(here)) if sent[rank]]
    moves = [dist.P2POp(dist.irecv, arriving[rank], group=ranks, group_peer=rank) for rank in sources]
    moves += [dist.P2POp(dist.isend, leaving[rank], group=ranks, group_peer=rank) for rank in targets]
    for work in dist.batch_isend_irecv(moves) if moves else ():
        work.wait()


@exchange.register_fake
def _(
    incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int], sent: list[int], group: str, kind: str
) -> None:
    pass
