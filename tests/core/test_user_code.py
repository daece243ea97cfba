"""What is said of an error in the user's own code."""

import pytest

from pipedream.core.user_code import elide_middle, with_place

LOADERS = """Caught OSError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
           ~~~~~~~~~~~~~^^^^^^^
  File "/home/user/data.py", line 12, in __getitem__
    raise OSError("the disk is gone")
OSError: the disk is gone
"""


def test_a_loaders_process() -> None:
    expected = "OSError: the disk is gone (in DataLoader worker process 1, at data.py:12 in __getitem__)"
    assert with_place(OSError(LOADERS)) == expected
    longer = with_place(OSError(LOADERS.replace("gone", "gone" * 10_000)))
    assert len(longer) < 1200
    assert longer.endswith(" in __getitem__)")


@pytest.mark.parametrize("length", [0, 1000, 1001, 5000])
def test_long_texts_keep_both_ends(length: int) -> None:
    text = "".join(chr(97 + i % 26) for i in range(length))
    short = elide_middle(text)
    if length <= 1000:
        assert short == text
    else:
        assert short == f"{text[:500]} ... ({length - 1000} characters left out) ... {text[-500:]}"
    assert with_place(ValueError(text)).startswith("ValueError: ")
