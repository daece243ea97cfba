"""Sums over replicas: buckets fill in any order, start in one, and lose nothing."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import pipedream as pd
from pipedream.core.plan.stage import TiedWeights
from pipedream.runtime.comm.channel import Group, LocalGroup, Pending, run_alone
from pipedream.runtime.stage.emulated import make_emulated_model
from pipedream.runtime.update.all_reduce import GradientAllReduce, all_reduce_many, fill_buckets
from pipedream.runtime.update.optimizer import Gradients, Optimizer
from pipedream.runtime.update.tied_weights import TiedGradientSum

TYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
HANDLES = st.lists(st.tuples(st.integers(1, 9), TYPES), min_size=0, max_size=9)


@pytest.mark.parametrize("byte_scale", [0.01, 30.0])
def test_emulated_weights_with_scaled_bytes_have_as_many_buckets(byte_scale: float) -> None:
    def layout(scale: float) -> list[list[int]]:
        size = round(23_000_000 * scale)
        stage = pd.Stage(0, 1, 2, forward_s=0.0, backward_s=0.0, parameter_bytes=size, names=("layer",))
        return fill_buckets(list(make_emulated_model([stage], 1, byte_scale=scale).parameters()))

    assert layout(byte_scale) == layout(1.0)
    assert len(layout(1.0)) == 6


class Noted(Group):
    """A group of one that notes the sizes of what was started."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        self.started.append(tensor.numel())
        return LocalGroup(1).member(0).all_reduce(tensor)


@given(HANDLES, st.integers(1, 40), st.integers(1, 80))
def test_buckets_hold_each_handle_once_from_the_end_on(
    sizes: list[tuple[int, torch.dtype]], first_bytes: int, bucket_bytes: int
) -> None:
    handles = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    buckets = fill_buckets(handles, first_bytes, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(handles)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({handles[i].dtype for i in bucket}) == 1
        # Without its last handle it was not yet full.
        assert sum(handles[i].nbytes for i in bucket[:-1]) < max(first_bytes, bucket_bytes)
    ready = [bucket[-1] for bucket in buckets]
    assert ready == sorted(ready, reverse=True), "the bucket whose last gradient comes first goes first"


@given(st.data(), HANDLES, st.integers(2, 4), st.integers(1, 60))
def test_sums_are_those_of_the_members_in_their_order(
    data: st.DataObject, sizes: list[tuple[int, torch.dtype]], members: int, bucket_bytes: int
) -> None:
    handles = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    group, sizes_of_buckets = LocalGroup(members), {"first_bytes": bucket_bytes, "bucket_bytes": bucket_bytes}
    reductions = [GradientAllReduce(handles, group.member(i), **sizes_of_buckets) for i in range(members)]
    for update in range(2):
        contributions: list[list[torch.Tensor | None]] = []
        for member, reduction in enumerate(reductions):
            mine = [torch.randn(h.shape).to(h.dtype) if data.draw(st.booleans()) else None for h in handles]
            contributions.append([None if gradient is None else gradient.clone() for gradient in mine])
            early = data.draw(st.permutations(range(len(handles))))[: data.draw(st.integers(0, len(handles)))]
            for index in early:
                reduction.put(index, mine[index])
            reduction.close(mine, member + 0.5, update + member, float(member == 1))
            assert reduction.started == len(fill_buckets(handles, bucket_bytes, bucket_bytes))
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
    group = Noted()
    handles = [torch.zeros(i + 1, dtype=torch.float64) for i in range(6)]
    reduction = GradientAllReduce(handles, group, first_bytes=1, bucket_bytes=1)  # each handle is a bucket
    done: set[int] = set()
    for index in order:
        reduction.put(index, torch.ones(index + 1, dtype=torch.float64))
        done.add(index)
        turn = next((i for i in range(6) if 5 - i not in done), 6)
        assert group.started == [6, 5, 4, 3, 2, 1][:turn]
    with pytest.raises(pd.PipelineError, match="in two backwards"):
        reduction.put(order[0], torch.ones(order[0] + 1, dtype=torch.float64))


def test_a_parameter_without_any_gradient_is_left_alone() -> None:
    group, stage_states = LocalGroup(2), []
    for replica in range(2):
        handles = {"used": nn.Parameter(torch.ones(2)), "unused": nn.Parameter(torch.ones(2))}
        factory = lambda named: torch.optim.SGD(named, lr=0.1, weight_decay=0.5)  # noqa: E731
        optimizer = Optimizer(handles, factory, replicas=2, replica_group=group.member(replica))
        optimizer.switch_to(pd.schedules.UpdateRule((2,), mean_of_rounds=True), 0, 0, input_updates=0)
        gradients = Gradients(2)
        gradients.add([torch.ones(2) if replica else None, None], 1.0)
        optimizer.start_remaining_sums(gradients)
        stage_states.append((handles, optimizer, gradients))
    for handles, optimizer, gradients in stage_states:
        optimizer.step(run_alone(optimizer.prepare(gradients))[0])
        assert torch.equal(handles["unused"], torch.ones(2)), "no weight decay, as in one process"
        torch.testing.assert_close(handles["used"].detach(), torch.full((2,), 1 - 0.1 * (0.5 + 0.5)))


def test_all_types_are_added_up() -> None:
    mine, group = [torch.ones(2, 3), torch.tensor(4), torch.ones(2).double()], LocalGroup(2)
    adding = [all_reduce_many(group.member(i), [tensor * (i + 1) for tensor in mine]) for i in range(2)]
    sums = []
    while adding:
        generator = adding.pop(0)
        try:
            next(generator)
            adding.append(generator)
        except StopIteration as end:
            sums.append(end.value)
    for totals in sums:
        assert [tensor.shape for tensor in totals] == [tensor.shape for tensor in mine]
        assert all(torch.equal(total, tensor * 3) for total, tensor in zip(totals, mine, strict=True))


PLANS = [
    *(("pipedream", *plan) for plan in (((2, 1), (0, 0)), ((2, 1), (1, 0)), ((3, 2), (1, 1)), ((4,), (0,)))),
    *(("pipedream_2bw", replicas, (0, 0)) for replicas in ((2, 1), (1, 2), (2, 2))),
    *(("gpipe", replicas, (0, 0)) for replicas in ((2, 1), (1, 3))),
    *(("1f1b", replicas, (0, 0)) for replicas in ((2, 1), (2, 3))),
]


@pytest.mark.parametrize(("name", "replicas", "update_delay"), PLANS)
def test_the_last_backward_before_an_update_is_in_the_program(
    name: str, replicas: tuple[int, ...], update_delay: tuple[int, ...]
) -> None:
    plan = replace(pd.Plan.uniform(len(replicas), replicas=replicas), update_delay=update_delay)
    program = pd.lower(pd.schedules.build(name, plan))
    rule, op = program.updates, partial(pd.schedules.Op, pd.schedules.Kind.BACKWARD)
    for rank in range(program.placement.workers):
        completed_by = program.update_completed_by(rank)
        total = 7 * program.cycle
        for stage, replica in program.placement.stage_replicas(rank):
            step = program.placement.replicas[stage]
            last_backwards = {k for k in range(replica, total, step) if completed_by(op(stage, k, replica))}
            # These orders do the backwards of a stage in their order.
            assert last_backwards == {
                k for k in range(replica, total, step) if rule.update_of(stage, k + step) > rule.update_of(stage, k)
            }


def test_the_host_reads_no_number_from_the_device() -> None:
    # On the meta device the host cannot read a number, and sums of CPU tensors take another way.
    handles = [nn.Parameter(torch.empty(4, 2, device="meta")), nn.Parameter(torch.empty(3, device="meta"))]
    reduction = GradientAllReduce(handles, LocalGroup(1).member(0))
    reduction.close([torch.empty(4, 2, device="meta"), None], 3.0, 2, 1.0)
    sums, loss_weight, count, stop_request = run_alone(reduction.take())
    assert (loss_weight, count, stop_request) == (3.0, 2, 1.0)
    assert sums[0].is_meta
    assert sums[1] is None


def test_tied_weights_on_a_device_are_counted_on_the_host() -> None:
    shared = TiedWeights(("a",), (0, 1), 8)
    handle = torch.empty(2, device="meta")
    total = TiedGradientSum(shared, {0: {"a": handle}}, (1, 1), LocalGroup(1).member(0))
    sums = {0: [torch.empty(2, device="meta")]}
    run_alone(total.all_reduce(sums))
    assert sums[0][0].is_meta


def test_the_first_bucket_is_smaller_and_those_on_gpus_are_larger() -> None:
    assert fill_buckets([torch.zeros(1)] * 9, 8, 16) == [[8, 7], [6, 5, 4, 3], [2, 1, 0]]
    for device, sizes in (("cpu", [1, *[4] * 14, 3]), ("meta", [1, 25, 25, 9])):
        handles = [torch.empty(1 << 20, dtype=torch.uint8, device=device)] * 60
        assert [len(bucket) for bucket in fill_buckets(handles)] == sizes
