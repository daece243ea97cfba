"""Files in which a worker writes why it failed, and what it was doing in case it is killed, for its launcher.

They are in the folder of the agent's error file (TORCHELASTIC_ERROR_FILE).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOST_CONNECTION = "lost the connection to another worker, which left no message"
"""Message of a worker that does not know more; the launcher may."""

RUN_ID_PREFIX = "pipedream-"
"""Begins the run ids of our own launcher."""

_PLACE = "place.txt"


def write_error(message: str, *, verdict: bool = False) -> bool:
    """Writes a message for the elastic agent; returns whether there is one.

    Args:
        verdict: about another rank, or one that could not report itself; it counts for the run.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    body = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
    with suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": body, "verdict": verdict}), encoding="utf-8")
        return True
    return False


def has_error() -> bool:
    """Returns whether this worker has written a message."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return bool(path) and Path(path).exists()


def write_place(where: str) -> None:
    """Writes what this worker is doing."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            # Atomically: a worker may be killed while it writes.
            written = Path(path).with_name(f"{_PLACE}.new")
            written.write_text(where, encoding="utf-8")
            written.replace(Path(path).with_name(_PLACE))


def read_error(error_file: str) -> str | None:
    """Returns a worker's message."""
    return next((message for message, _ in _read_errors(Path(error_file))), None)


def read_verdict(folder: Path) -> str | None:
    """Returns the verdict on a run."""
    files = sorted(folder.rglob("error.json"))
    return next((message for file in files for message, verdict in _read_errors(file) if verdict), None)


def read_place(folder: Path, rank: int) -> str | None:
    """Returns what a worker was last doing, once it had built its pipeline."""
    with suppress(OSError):
        for file in folder.rglob(_PLACE):
            if file.parent.name == str(rank):
                return file.read_text(encoding="utf-8") or None
    return None


def _read_errors(file: Path) -> Iterator[tuple[str, bool]]:
    """Yields (message, is a verdict)."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        contents = json.loads(file.read_text(encoding="utf-8"))
        yield str(contents["message"]["message"]), bool(contents.get("verdict"))
