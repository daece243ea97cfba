"""PowerSGD: what its factors approximate, what they keep, and that nothing is hidden or lost."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from pipedream.extensions.reducers.powersgd import PowerSGD, greatest_rank
from pipedream.extensions.reducers.powersgd.low_rank import LowRankSum
from pipedream.runtime.comm.channel import LocalGroup, run_together
from pipedream.runtime.update.replica import Replica

Shape = tuple[int, int]
SHAPES = st.tuples(st.integers(5, 24), st.integers(5, 24)).filter(lambda shape: greatest_rank(shape) > 0)


def make(replicas: int, shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float64) -> list[LowRankSum]:
    group = LocalGroup(replicas)
    handles = {"weight": torch.zeros(*shape, dtype=dtype)}
    return [LowRankSum(handles, ["weight"], rank, group.member(i)) for i in range(replicas)]


def sum_up(replicas: Sequence[LowRankSum], gradients: Sequence[Tensor | None], divisor: float = 1.0) -> list[Any]:
    """Sums over all replicas; returns what each has afterwards."""
    sums = [[gradient] for gradient in gradients]
    run_together(replica.sum_up(row, divisor) for replica, row in zip(replicas, sums, strict=True))
    assert all((row[0] is None) == (sums[0][0] is None) for row in sums)
    assert all(row[0] is None or torch.equal(row[0], sums[0][0]) or not row[0].isfinite().all() for row in sums)
    return [row[0] for row in sums]


def finish(replicas: Sequence[LowRankSum], is_made: bool = True) -> None:
    for replica in replicas:
        replica.finish(is_made=is_made)


@given(SHAPES, st.integers(1, 3), st.integers(1, 3), st.floats(0.5, 8.0), st.integers(0, 99))
def test_sum_and_errors_add_up_to_what_came_in(shape: Shape, rank: int, count: int, divisor: float, seed: int) -> None:
    rank = min(rank, greatest_rank(shape))
    generator = torch.Generator().manual_seed(seed)
    replicas = make(count, shape, rank)
    before = torch.zeros(*shape, dtype=torch.float64)
    for _ in range(3):
        gradients = [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]
        came = sum(gradients) / divisor + before
        approximation = sum_up(replicas, gradients, divisor)[0] / divisor
        assert torch.linalg.matrix_rank(approximation) <= rank
        finish(replicas)
        errors = sum(replica.errors["weight"] for replica in replicas)
        torch.testing.assert_close(approximation + errors, came)
        # The projection on the factor's columns: what is left is orthogonal to what was sent.
        assert abs(float((errors * approximation).sum())) <= 1e-9 * float(came.norm() ** 2)
        before = errors


def test_a_gradient_of_zeros_does_not_end_the_factors() -> None:
    replicas = make(2, (8, 12), 2)
    for _ in range(2):
        assert not any(result.any() for result in sum_up(replicas, [torch.zeros(8, 12).double()] * 2))
        finish(replicas)
    assert all(replica.factors["weight"].isfinite().all() for replica in replicas)
    gradient = torch.outer(torch.arange(8.0), torch.arange(12.0)).double()
    torch.testing.assert_close(sum_up(replicas, [gradient.clone(), gradient.clone()])[0], 2 * gradient)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("replica", [0, 1])
def test_what_is_not_finite_is_not_hidden_and_leaves_nothing_behind(number: float, replica: int) -> None:
    replicas, clean = make(2, (8, 12), 2), make(2, (8, 12), 2)
    first, second, third = torch.randn(3, 2, 8, 12).double()
    for group in (replicas, clean):
        sum_up(group, list(first.clone()))
        finish(group)
    second[replica, 3, 4] = number
    assert not any(result.isfinite().any() for result in sum_up(replicas, list(second)))
    finish(replicas, is_made=False)
    for result, expected in zip(sum_up(replicas, list(third.clone())), sum_up(clean, list(third)), strict=True):
        assert torch.equal(result, expected)


def test_few_numbers_are_sent_and_small_tensors_are_left_out() -> None:
    handles = {
        "large": torch.zeros(20, 5, 6),  # a matrix of 20 x 30
        "small": torch.zeros(4, 4),
        "row": torch.zeros(1, 500),
        "column": torch.zeros(500, 1),
        "vector": torch.zeros(500),
        "empty": torch.zeros(0, 8),
        "whole": torch.zeros(40, 40, dtype=torch.int64),
        "tied": torch.zeros(40, 40),
    }
    group = Mock(wraps=LocalGroup(1).member(0))
    compressed = PowerSGD(3).list_compressed(Replica(handles, {}, group, 1, ["tied"]))  # type: ignore[arg-type]
    low_rank = LowRankSum(handles, compressed, 3, group)
    assert low_rank.names_by_index == {0: "large"}
    before: list[Tensor | None] = [torch.randn(handle.shape) for handle in handles.values()]
    sums = list(before)
    list(low_rank.sum_up(sums, 1.0))
    assert sum(tensor.numel() for (tensor,), _ in group.all_reduce.call_args_list) == 3 * (20 + 30)
    assert [after is not tensor for after, tensor in zip(sums, before, strict=True)] == [True] + [False] * 7
    assert sums[0].shape == (20, 5, 6)
    low_rank.finish(is_made=True)
    error = low_rank.errors["large"].clone()
    sums[0] = None  # no replica has used it
    list(low_rank.sum_up(sums, 1.0))
    low_rank.finish(is_made=True)
    assert sums[0] is None
    assert torch.equal(low_rank.errors["large"], error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_and_other_strides(dtype: torch.dtype) -> None:
    replicas = make(2, (12, 16), 2, dtype)
    gradient = torch.outer(torch.arange(1.0, 17.0), torch.arange(1.0, 13.0)).T.to(dtype) / 16
    assert not gradient.is_contiguous()
    for result in sum_up(replicas, [gradient, gradient]):
        assert result.dtype == dtype
        torch.testing.assert_close(result, 2 * gradient)
    assert replicas[0].errors["weight"].dtype == replicas[0].factors["weight"].dtype == torch.float32


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_the_greatest_rank(rows: int, columns: int, rank: int) -> None:
    compresses = PowerSGD(rank).compresses((rows, columns))
    assert compresses == (rank <= greatest_rank((rows, columns))) == (2 * rank * (rows + columns) < rows * columns)
