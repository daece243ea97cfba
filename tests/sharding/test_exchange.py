"""The all-to-all whose receives are posted first gives what torch's own gives."""

from __future__ import annotations

from random import Random

import processes
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from pipedream.sharding.functions import exchange


def _exchange_rows() -> int:
    rank, count = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    sizes = [[Random(turn * 100 + at).choice((0, 0, 1, 5, 1000)) for at in range(count**2)] for turn in range(20)]
    for turn, row in enumerate(sizes):
        sent, received = row[rank * count :][:count], row[rank::count]
        dtype = (torch.float64, torch.bfloat16, torch.int64, torch.bool)[turn % 4]
        outgoing = torch.randint(0, 2, (sum(sent),)).to(dtype)
        incoming, expected = (outgoing.new_zeros(sum(received)) for _ in range(2))
        exchange(incoming, outgoing, received, sent, group, "all-to-all")
        dist.all_to_all_single(expected, outgoing, received, sent)
        assert torch.equal(incoming, expected)
        with FakeTensorMode():
            exchange(torch.empty(sum(received)), torch.empty(sum(sent)), received, sent, group, "all-to-all")
    return len(sizes)


@pytest.mark.processes
def test_ranks_get_what_torchs_own_would_give_them() -> None:
    assert processes.kept(2).results(_exchange_rows) == [20] * 2


@pytest.mark.processes
@pytest.mark.slow
def test_four_ranks_too() -> None:
    assert processes.kept(4).results(_exchange_rows) == [20] * 4
