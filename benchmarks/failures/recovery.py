"""Seconds from the kill of a worker to the next finished minibatch: its launcher starts the run again. See README.md.

This file is also the recipe that is trained.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import pipedream as pd
from pipedream.callbacks import Callback

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import Environment, collect_rounds, format_quartiles, format_table, make_parser

MINIBATCHES, EVERY, KILLED_AFTER = 400, 20, 90


class _Batches:
    def __len__(self) -> int:
        return MINIBATCHES

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(MINIBATCHES):
            draw = torch.Generator().manual_seed(number)
            time.sleep(0.02)
            yield torch.rand(16, 64, generator=draw), torch.randint(10, (16,), generator=draw)


class _Clock(Callback):
    def on_minibatch(self, pipeline: Any, done: Any) -> None:
        """Notes when a minibatch has ended, before and after the restart."""
        if pipeline.rank == 0:
            with Path(os.environ["FINISHED"]).open("a") as file:
                file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {time.time()}\n")


def recipe(seed: int = 0) -> pd.Recipe:
    torch.manual_seed(seed)
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    loss, callbacks = nn.functional.cross_entropy, [_Clock()]
    return pd.Recipe(nn.Sequential(*layers), loss, optimizer, _Batches(), epochs=1, callbacks=callbacks)


def measure(source: Path, workers: int, *more: str) -> float:
    """Trains, kills the last worker, and returns the seconds until the restarted run has finished a minibatch."""
    with TemporaryDirectory() as folder:
        finished, run = Path(folder, "finished"), str(Path(folder, "run"))
        options = ["--workers", str(workers), "--max-restarts", "1", "--checkpoint-every", str(EVERY), "--out", run]
        command = [sys.executable, "-m", "pipedream", "train", __file__, *options, *more]
        variables = {"PYTHONPATH": str(source), "FINISHED": str(finished)}
        with subprocess.Popen(command, env=os.environ | variables, stdout=-3, stderr=-3) as launcher:
            _wait_until(lambda: len(_read(finished)) >= KILLED_AFTER, launcher)
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            killed_s = time.time()
            os.kill(int(children[-1]), signal.SIGKILL)
            _wait_until(lambda: any(attempt == "1" for attempt, _ in _read(finished)), launcher)
            launcher.send_signal(signal.SIGTERM)
        return min(float(moment_s) for attempt, moment_s in _read(finished) if attempt == "1") - killed_s


def _read(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def _wait_until(is_reached: Any, launcher: subprocess.Popen[bytes]) -> None:
    while not is_reached():
        if launcher.poll() is not None:
            raise RuntimeError(f"the run has ended with exit status {launcher.returncode}")
        time.sleep(0.01)


def main() -> int:
    parser = make_parser(__doc__)
    here = Path(__file__).parents[2] / "src"
    parser.add_argument(
        "--sources", type=Path, nargs="+", default=[here], help="src folders of the versions to compare"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--plan", help="a plan's file; by default each run measures and plans first")
    options = parser.parse_args()
    environment, more = Environment(), ["--plan", options.plan] if options.plan else []
    seconds = collect_rounds(
        lambda source: measure(Path(source), options.workers, *more), map(str, options.sources), options.trials
    )
    rows = [(name, format_quartiles(each, "{:.2f} s".format), f"{max(each):.2f} s") for name, each in seconds.items()]
    print(f"{environment.describe(f'{options.trials} trials, {options.workers} workers')}\n")
    print(format_table("version | median (quartiles) | worst", "lr", rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
