"""What is said of an error in the user's own code."""

from pipedream.core.user_code import with_place

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
    assert with_place(MemoryError()).startswith("MemoryError; out of memory: use smaller batches")
    assert with_place(OSError(24, "Too many open files")).endswith("; raise the limit of open files (ulimit -n 65536)")
    longer = with_place(OSError(LOADERS.replace("gone", "gone" * 10_000)))
    assert len(longer) < 1200
    assert longer.endswith(" in __getitem__)")
