"""The training loop of one run: results as they come, evaluations, checkpoints and figures."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.core.progress import LogTimes, format_time_left, is_live
from pipedream.core.units import format_bytes, format_seconds
from pipedream.pipeline import Pipeline
from pipedream.recipe import Recipe
from pipedream.runtime.checkpoint.remote import AnyPath, write_text_at
from pipedream.runtime.comm.process_group import gather_texts, make_on_rank_0, world_group
from pipedream.runtime.results.results import Done
from pipedream.training.restarts import Restarts
from pipedream.training.snapshot_cost import SnapshotCost
from pipedream.training.snapshots import check_memory

_EVERY_S = 0.5


@dataclass(frozen=True)
class CheckpointPolicy:
    """When and where checkpoints are made.

    Attributes:
        every: minibatches between them, or 0 for none; by default whenever the pipeline is drained anyway, or
            snapshots as often as they may cost.
        planned_bytes: of two snapshots, on the machine that has most.
    """

    folder: AnyPath
    every: int | None
    keep: int
    planned_bytes: int = 0

    def is_due(self, number: int, drained: bool = False) -> bool:
        return drained if self.every is None else self.every > 0 and (number + 1) % self.every == 0


class TrainingLoop:
    """The training loop of one run.

    An evaluation after an epoch drains the pipeline first, which finishes minibatches of the next epoch if the method
    does not flush.

    Args:
        began_s: when the run began, by `time.perf_counter`.
        snapshots: those in memory.
        evaluate_every: epochs; 0 evaluates only at the end.

    Attributes:
        losses: (number, loss) of each minibatch.
        metrics: the last evaluation's.
        evaluations: metrics of each, with its place in the run.
        seconds_to_target: None if it is not reached.
        began_s: earlier by the seconds before the checkpoint that the run was resumed from.
        train_s: with evaluations, and those before that checkpoint.
        samples_per_s: rate of each epoch, without the minibatches that the drain before it finished.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        recipe: Recipe,
        console: Console,
        evaluate_every: int,
        checkpoints: CheckpointPolicy,
        began_s: float,
        snapshots: CheckpointPolicy | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.began_s = began_s
        self._checkpoints, self._snapshots = checkpoints, snapshots
        fill = 2 * max(pipeline.plan.in_flight)
        self._snapshot_cost = SnapshotCost(fill, lambda text: gather_texts(text, world_group()))
        self._snapshot_bytes = 0
        self._aside_s = 0.0  # in evaluations and checkpoints
        self.recipe = recipe
        self.losses: list[tuple[int, float]] = []
        self._saved_losses = 0  # those in losses.json
        self.metrics: dict[str, float] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.seconds_to_target: float | None = None
        self.train_s = 0.0
        self._train_began_s = began_s
        self.samples_per_s: list[float] = []
        self._evaluated_at = -1
        self._evaluate_every = evaluate_every
        self._restarts = Restarts(pipeline.rank)
        self._progress = Progress(console, pipeline.plan.workers, pipeline.rank)
        self._console = console

    def resume(self, losses: list[tuple[int, float]]) -> None:
        """Continues the figures of the checkpoint that the pipeline has loaded; those of version 0.1 have none.

        Args:
            losses: those that are on disk.
        """
        before = self.pipeline.extra
        self.losses, self._saved_losses = losses, len(losses)
        self.losses += [(number, loss) for number, loss in before.get("losses", ())]
        self.began_s -= before.get("seconds", 0.0)
        self.train_s = before.get("train_seconds", 0.0)
        self.evaluations = list(before.get("evaluations", ()))
        self.seconds_to_target = before.get("seconds_to_target")
        self.samples_per_s = list(before.get("samples_per_s", ()))

    def train(self, epochs: int, minibatches: int | None, minibatch_s: float) -> bool:
        """Trains to a total of epochs or minibatches; returns whether Ctrl-C ended it.

        Args:
            minibatch_s: predicted seconds of one.
        """
        start = self._train_began_s = time.perf_counter() - self.train_s
        interrupted = False
        self._restarts.begin(self.pipeline.drain())
        mark: tuple[float, int] | None = None  # seconds and samples when the epoch's rate is measured from
        samples = 0
        is_over = minibatches is not None and self.pipeline.drain() >= minibatches  # a finished run was resumed
        until = self.pipeline.position[0] if is_over else epochs
        left = self._progress.left = count_left(self.recipe.train, self.pipeline.position, until, minibatches)
        if left > 0:
            expected = f", predicted to take {format_seconds(left * minibatch_s)}" if minibatch_s else ""
            self._console.print(f"training {left} minibatches{expected}\n")
        with self._progress:
            try:
                for done in self.pipeline.train(self.recipe.train, until_epoch=until):
                    now = time.perf_counter()
                    is_snapshot_due = self._is_snapshot_due(done.number, now - self._aside_s)
                    self.losses.append((done.number, done.loss))
                    self._restarts.finish(done.number)
                    samples += done.samples
                    if mark is None and done.number >= self._evaluated_at:
                        mark = now, samples
                    self._progress.show(done, self.pipeline)
                    is_last = minibatches is not None and done.number + 1 >= minibatches
                    if (done.ends_epoch or is_last) and mark is not None and now > mark[0]:
                        self.samples_per_s.append((samples - mark[1]) / (now - mark[0]))
                    if done.ends_epoch:
                        self._end_epoch(done, now - start, last=done.epoch + 1 == epochs)
                        mark = None
                    is_saved = self._checkpoints.is_due(
                        done.number, done.ends_epoch and self._evaluated_at > done.number
                    )
                    if is_saved:
                        self._save()
                    self._aside_s += time.perf_counter() - now
                    if self._snapshots is not None and is_snapshot_due and not is_saved:
                        self._snapshot(self._snapshots)
                    if is_last:
                        break
            except KeyboardInterrupt:
                # A second signal must not interrupt the saving.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                interrupted = True
                self._console.print("interrupted: the pipeline is drained, writing the run folder")
        if self.pipeline.should_stop:
            self._console.print(f"stopped after minibatch {self.pipeline.drain()}: should_stop was set by a callback")
        self.train_s = time.perf_counter() - start
        if self.recipe.test is not None and self._evaluated_at != self.pipeline.drain():
            # The figures should be of the saved weights. After Ctrl-C there is no time: a launcher ends its workers
            # half a minute later.
            self.metrics = {} if interrupted else self.pipeline.evaluate(self.recipe.test)
        if self._checkpoints.every != 0:
            self._save()
        return interrupted

    def _is_snapshot_due(self, number: int, now_s: float) -> bool:
        if self._snapshots is None:
            return False
        if self._snapshots.every is not None:
            return self._snapshots.is_due(number)
        return self._snapshot_cost.finish_minibatch(now_s, self.pipeline.is_saving())

    def _snapshot(self, policy: CheckpointPolicy) -> None:
        begin_s = time.perf_counter() - self._aside_s
        self.pipeline.drain()
        assert isinstance(policy.folder, Path)
        if not self._snapshot_bytes:  # only now the optimizers have their state
            saved_bytes = self.pipeline.saved_bytes()
            self._snapshot_bytes = check_memory(policy.every, policy.folder, saved_bytes, self.pipeline.rank)
        copy_s = time.perf_counter() - self._aside_s
        losses = self._all_losses()[self._saved_losses :]
        wait = policy.every is None and self._snapshot_cost.is_first
        extra = self._extra() | {"losses": losses}
        self.pipeline.save(policy.folder, keep=policy.keep, wait=wait, extra=extra, snapshot=True)
        if policy.every is None:
            self._snapshot_cost.save(begin_s, copy_s, time.perf_counter() - self._aside_s)
        for done in self.pipeline.ready:
            self._restarts.keep(done.number)

    def _all_losses(self) -> list[tuple[int, float]]:
        """Returns losses with those that the drain has finished and this loop has yet to be given."""
        return [*self.losses, *((done.number, done.loss) for done in self.pipeline.ready)]

    def _extra(self) -> dict[str, Any]:
        now = time.perf_counter()
        return {
            "seconds": now - self.began_s,
            "train_seconds": now - self._train_began_s,
            "evaluations": self.evaluations,
            "seconds_to_target": self.seconds_to_target,
            "samples_per_s": self.samples_per_s,
        }

    def _save(self) -> None:
        self.pipeline.save(self._checkpoints.folder, keep=self._checkpoints.keep, wait=False, extra=self._extra())
        losses = self._all_losses()
        self._saved_losses = len(losses)
        if self.pipeline.rank == 0:
            path = self._checkpoints.folder.parent / "losses.json"
            try:
                write_text_at(path, json.dumps(losses))
            except (ArtifactError, OSError) as error:
                advice = f"checkpoints in {self._checkpoints.folder} are intact: resume from there"
                raise WorkerError(0, "saving the losses so far", str(error), advice) from None

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "drains": self.pipeline.drains,
            "epochs": self.pipeline.position[0],
            "minibatches": self.pipeline.drain(),
            "metrics": self.metrics,
            "evaluations": self.evaluations,
            "train_seconds": self.train_s,
            "seconds_to_target": self.seconds_to_target,
            "failures": self._restarts.figures(),
            "snapshots": self._snapshots
            and {
                "every": self._snapshots.every or self._snapshot_cost.every,
                "bytes": self._snapshot_bytes,
                "planned_bytes": self._snapshots.planned_bytes,
                "seconds": None if self._snapshots.every else self._snapshot_cost.spent_s,
            },
        }
        if "accuracy" in self.metrics:
            figures["accuracy"] = self.metrics["accuracy"]
        if self.recipe.target is not None:
            figures["target"] = {"metric": self.recipe.target[0], "value": self.recipe.target[1]}
        return figures

    def _end_epoch(self, done: Done, seconds: float, last: bool) -> None:
        every = self._evaluate_every
        due = last or (every > 0 and (done.epoch + 1) % every == 0)
        if self.recipe.test is None or not due:
            self._progress.epoch(done, {})
            return
        self.metrics = self.pipeline.evaluate(self.recipe.test)
        self._evaluated_at = self.pipeline.drain()
        self.evaluations.append(
            {"epoch": done.epoch, "minibatches": self._evaluated_at, "seconds": seconds, **self.metrics}
        )
        self._progress.epoch(done, self.metrics)
        if self.recipe.target is not None and self.seconds_to_target is None:
            name, value = self.recipe.target
            reached = self.metrics[name] <= value if name == "loss" else self.metrics[name] >= value
            self.seconds_to_target = seconds if reached else None


def count_left(loader: Any, position: tuple[int, int], epochs: int, minibatches: int | None) -> int:
    """Returns the minibatches that are left to train, 0 if that is not known."""
    try:
        size = len(loader)
    except (TypeError, NotImplementedError):
        return 0
    done = position[0] * size + position[1]
    return max(0, (epochs * size if minibatches is None else min(epochs * size, minibatches)) - done)


class Progress:
    """Shows minibatches per second, loss, and each stage's busy share and peak memory.

    Every rank makes one; rank 0 shows it, if its console can draw it (`is_live`). Elsewhere it prints lines, also
    within an epoch that takes long.

    Attributes:
        left: minibatches of the run when it began; 0 if unknown.
    """

    left = 0

    def __init__(self, console: Console, workers: int, rank: int) -> None:
        self._console = console
        self._workers = workers
        shows = is_live(console) and not console.quiet
        self._log = None if shows or console.quiet or rank else LogTimes()
        self._is_shown = bool(make_on_rank_0(lambda: "shown" if shows else "", rank))
        self._live = Live(console=console, auto_refresh=False, transient=True) if shows else None
        self._shown_s = 0.0
        self._shown_number = 0
        self._rate = 0.0
        self._epoch_s = 0.0
        self._epoch_number = -1
        self._first = 0

    def show(self, done: Done, pipeline: Pipeline) -> None:
        """Draws the table twice a second. Every rank calls it, to send its busy share if the table is shown."""
        now = time.perf_counter()
        if self._epoch_number < 0:
            self._epoch_s, self._epoch_number = now, done.number
            self._first = done.number
        if self._log is not None and not done.ends_epoch and self._log.is_due():
            seconds, steps = self._log.elapsed_s, done.number + 1 - self._first
            self._print_line(done, steps / seconds, format_time_left(steps, self.left, seconds).removeprefix(", "))
        if not self._is_shown:
            return
        if now - self._shown_s < _EVERY_S:
            return
        if self._shown_s:
            self._rate = (done.number - self._shown_number) / (now - self._shown_s)
        self._shown_s, self._shown_number = now, done.number
        status = pipeline.status()
        if self._live is None:
            return
        table = Table(box=None, pad_edge=False)
        for name in ("rank", "busy", "process peak"):
            table.add_column(name, justify="right")
        for rank in range(self._workers):
            row = status.get(rank)
            share = row["busy_share"] if row else 0.0
            table.add_row(str(rank), f"{share:.0%}", format_bytes(row["peak_bytes"]) if row else "-")
        table.title = (
            f"epoch {done.epoch + 1}  minibatch {done.number + 1}  {self._rate:.1f} minibatches/s  "
            f"loss {done.loss:.4f}  rate {done.rate:.3g}"
        )
        table.title_justify = "left"
        self._live.update(table, refresh=True)

    def epoch(self, done: Done, result: dict[str, float]) -> None:
        now = time.perf_counter()
        rate = (done.number - self._epoch_number) / (now - self._epoch_s) if now > self._epoch_s else 0.0
        self._epoch_s, self._epoch_number = now, done.number
        self._print_line(done, rate, "  ".join(f"test {name} {value:.4f}" for name, value in result.items()))

    def _print_line(self, done: Done, rate: float, rest: str) -> None:
        self._console.print(
            f"epoch {done.epoch + 1:>3}  minibatch {done.number + 1:>6}  {rate:>7.1f} minibatches/s  "
            f"loss {done.loss:.4f}  {rest}"
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
