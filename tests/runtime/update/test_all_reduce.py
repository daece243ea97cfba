"""Sums over replicas: buckets fill in any order, start in one, and lose nothing."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.emulate.emulated import make_emulated_model
from pipedream.core.plan.stage import TiedWeights
from pipedream.extensions.tied_weights.gradient_sums import TiedGradientSum
from pipedream.runtime.comm.channel import LocalGroup, run_alone
from pipedream.runtime.update import all_reduce

Sizes = list[tuple[int, torch.dtype]]
TYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
HANDLES = st.lists(st.tuples(st.integers(1, 9), TYPES), min_size=0, max_size=9)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_emulated_weights_with_scaled_bytes_have_as_many_buckets(scale: float) -> None:
    size = round(23_000_000 * scale)
    stage = pd.Stage(0, 1, 2, forward_s=0.0, backward_s=0.0, parameter_bytes=size, names=("layer",))
    assert len(all_reduce.fill_buckets(list(make_emulated_model([stage], 1, byte_scale=scale).parameters()))) == 6


@given(HANDLES, st.integers(1, 40), st.integers(1, 80))
def test_buckets_hold_each_handle_once_from_the_end_on(sizes: Sizes, first_bytes: int, bucket_bytes: int) -> None:
    handles = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    buckets = all_reduce.fill_buckets(handles, first_bytes, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(handles)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({handles[i].dtype for i in bucket}) == 1
        # Without its last handle it was not yet full.
        assert sum(handles[i].nbytes for i in bucket[:-1]) < max(first_bytes, bucket_bytes)
    ready = [bucket[-1] for bucket in buckets]
    assert ready == sorted(ready, reverse=True), "the bucket whose last gradient comes first goes first"


@given(st.data(), HANDLES, st.integers(2, 4), st.integers(1, 60))
def test_sums_are_of_the_members_in_order(data: st.DataObject, sizes: Sizes, members: int, bucket_bytes: int) -> None:
    handles = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    group, sizes_of_buckets = LocalGroup(members), {"first_bytes": bucket_bytes, "bucket_bytes": bucket_bytes}
    reductions = [all_reduce.GradientAllReduce(handles, group.member(i), **sizes_of_buckets) for i in range(members)]
    for update in range(2):
        contributions: list[list[torch.Tensor | None]] = []
        for member, reduction in enumerate(reductions):
            mine = [torch.randn(h.shape).to(h.dtype) if data.draw(st.booleans()) else None for h in handles]
            contributions.append([None if gradient is None else gradient.clone() for gradient in mine])
            for index in data.draw(st.permutations(range(len(handles))))[: data.draw(st.integers(0, len(handles)))]:
                reduction.put(index, mine[index])
            reduction.close(mine, member + 0.5, update + member, float(member == 1))
            assert reduction.started == len(all_reduce.fill_buckets(handles, bucket_bytes, bucket_bytes))
        for reduction in reductions:
            sums, loss_weight, count, stop_request = run_alone(reduction.take())
            assert (loss_weight, stop_request) == (sum(m + 0.5 for m in range(members)), 1.0)
            assert count == sum(update + m for m in range(members))
            for i, handle in enumerate(handles):
                there = [row[i] for row in contributions]
                if all(gradient is None for gradient in there):
                    assert sums[i] is None
                    continue
                total = torch.zeros_like(handle) if there[0] is None else there[0]
                for gradient in there[1:]:
                    total = total + (torch.zeros_like(handle) if gradient is None else gradient)
                assert torch.equal(sums[i], total)


@given(st.permutations(range(6)))
def test_a_bucket_waits_for_its_turn(order: list[int]) -> None:
    group = Mock(wraps=LocalGroup(1).member(0))
    handles = [torch.zeros(i + 1, dtype=torch.float64) for i in range(6)]
    reduction = all_reduce.GradientAllReduce(handles, group, first_bytes=1, bucket_bytes=1)  # each handle is a bucket
    done: set[int] = set()
    for index in order:
        reduction.put(index, torch.ones(index + 1, dtype=torch.float64))
        done.add(index)
        turn = next((i for i in range(6) if 5 - i not in done), 6)
        assert [tensor.numel() for (tensor,), _ in group.all_reduce.call_args_list] == [6, 5, 4, 3, 2, 1][:turn]
    with pytest.raises(pd.PipelineError, match="in two backwards"):
        reduction.put(order[0], torch.ones(order[0] + 1, dtype=torch.float64))


def test_the_host_reads_no_number_from_the_device() -> None:
    """On the meta device the host cannot read a number, and sums of CPU tensors take another way."""
    handles = [torch.empty(4, 2, device="meta"), torch.empty(3, device="meta")]
    reduction = all_reduce.GradientAllReduce(handles, LocalGroup(1).member(0))
    reduction.close([torch.empty_like(handles[0]), None], 3.0, 2, 1.0)
    sums, *counts = run_alone(reduction.take())
    assert (sums[0].is_meta, sums[1], *counts) == (True, None, 3.0, 2, 1.0)
    tied = TiedGradientSum(TiedWeights(("a",), (0, 1), 8), {0: {"a": handles[0]}}, (1, 1), LocalGroup(1).member(0))
    local_sums = {0: [torch.empty_like(handles[0])]}
    run_alone(tied.all_reduce(local_sums))
    assert local_sums[0][0].is_meta


def test_the_first_bucket_is_smaller_and_those_on_gpus_are_larger() -> None:
    assert all_reduce.fill_buckets([torch.zeros(1)] * 9, 8, 16) == [[8, 7], [6, 5, 4, 3], [2, 1, 0]]
    for device, sizes in (("cpu", [1, *[4] * 14, 3]), ("meta", [1, 25, 25, 9])):
        handles = [torch.empty(1 << 20, dtype=torch.uint8, device=device)] * 60
        assert [len(bucket) for bucket in all_reduce.fill_buckets(handles)] == sizes
