"""The code of the largest values of chunks: what arrives, what stays, and how many bytes it takes."""

from math import inf, nan

import agreements
import pytest
import torch
from hypothesis import example, given, strategies as st

from pipedream.extensions.reducers.averages.codes import ShareCode


def draw_values(count: int, zeros: float) -> torch.Tensor:
    """Returns values, a share of them 0; in float64, so that none is as large as another, or as a mean."""
    return torch.randn(count, dtype=torch.float64).where(torch.rand(count) >= zeros, 0.0)


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=3),
    st.floats(1 / 4096, 1.0),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.integers(0, 99),
)
@example([9000], 0.02, 0.0, 0)
def test_the_largest_arrive_and_all_else_stays(counts: list[int], share: float, zeros: float, seed: int) -> None:
    torch.manual_seed(seed)
    whole, code = [draw_values(count, zeros) for count in counts], ShareCode(counts, share)
    sent = code.encode(whole)
    assert (sent.dtype, len(sent)) == (torch.uint8, code.size_bytes)
    arrived, left = [torch.zeros_like(each) for each in whole], [each.clone() for each in whole]
    code.add(sent, arrived, 1.0)
    code.add(sent, left, -1.0)
    for values, here, there in zip(whole, arrived, left, strict=True):
        expected = torch.cat([agreements.keep_largest(chunk, share) for chunk in values.split(4096)])
        torch.testing.assert_close(here, expected, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(here + there, values)


def test_bytes_are_those_of_two_scales_and_14_bits_a_value() -> None:
    assert ShareCode([4096, 100], 0.02).size_bytes == 8 + 8 + 7 * (82 + 2) // 4
    assert ShareCode([2 * 4096 + 1], 1 / 4096).size_bytes == 3 * 8 + 7


@pytest.mark.parametrize("fault", [nan, inf, -inf])
def test_a_fault_arrives_in_its_chunk(fault: float) -> None:
    values = draw_values(2 * 4096, 0.0)
    values[7], code = fault, ShareCode([2 * 4096], 0.02)
    arrived = torch.zeros_like(values)
    code.add(code.encode([values]), [arrived], 1.0)
    assert int(arrived[:4096].isfinite().sum()) == 4096 - 82
    assert arrived[4096:].isfinite().all()
