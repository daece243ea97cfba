"""The training loop of one run, with its evaluations, checkpoints and statistics."""

import json
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipedream.apps.training.checkpoint_cost import CheckpointCost
from pipedream.core.cold import count_warm_up
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.core.progress import LogTimes, format_time_left, is_live
from pipedream.core.units import format_bytes, format_seconds
from pipedream.pipeline import Pipeline
from pipedream.plan_request import AUTO
from pipedream.recipe import Recipe
from pipedream.runtime.comm.process_group import gather_texts, make_on_rank_0, world_group
from pipedream.runtime.results.results import Done
from pipedream.services.checkpoint.stores.store import CheckpointStore
from pipedream.services.failure.restarts import Restarts

_REFRESH_S = 0.5


@dataclass(frozen=True)
class CheckpointPolicy:
    """When and where checkpoints are made.

    Attributes:
        every: minibatches between checkpoints; 0 for none. None saves whenever the pipeline drains anyway, 'auto' as
            often as the cost allows (`CheckpointCost`).
    """

    folder: CheckpointStore
    every: int | str | None
    keep: int

    def is_due(self, number: int, *, drained: bool) -> bool:
        if not isinstance(self.every, int):
            return drained and self.every is None
        return self.every > 0 and (number + 1) % self.every == 0


class TrainingLoop:
    """The training loop of one run.

    An evaluation after an epoch drains the pipeline first, which finishes minibatches of the next epoch if the method
    does not flush.

    Args:
        began_s: when the run began, by `time.perf_counter`.
        evaluate_every: epochs; 0 evaluates only at the end.

    Attributes:
        losses: (number, loss) of each minibatch.
        metrics: the last evaluation's.
        evaluations: metrics of each, with its epoch, minibatches and seconds.
        seconds_to_target: None if it is not reached.
        began_s: moved back by the seconds before the checkpoint that the run was resumed from.
        train_s: seconds of training and evaluations, with those before that checkpoint.
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
    ) -> None:
        self.pipeline = pipeline
        self.began_s = began_s
        self._checkpoints = checkpoints
        self._cost: CheckpointCost | None = None
        if checkpoints.every == AUTO:
            fill_minibatches = 2 * max(pipeline.plan.in_flight)
            self._cost = CheckpointCost(fill_minibatches, lambda text: gather_texts(text, world_group()))
        self._paused_s = 0.0  # in evaluations
        self.recipe = recipe
        self.losses: list[tuple[int, float]] = []
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
        """Continues the statistics of the loaded checkpoint, with the losses before it."""
        saved = self.pipeline.extra
        self.losses = losses
        self.began_s -= saved.get("seconds", 0.0)
        self.train_s = saved.get("train_seconds", 0.0)
        self.evaluations = list(saved.get("evaluations", ()))
        self.seconds_to_target = saved.get("seconds_to_target")
        self.samples_per_s = list(saved.get("samples_per_s", ()))

    def train(self, epochs: int, minibatches: int | None, minibatch_s: float) -> bool:
        """Trains to a total of epochs or minibatches; returns whether Ctrl-C ended it.

        Args:
            minibatch_s: predicted seconds of one.
        """
        begin_s = self._train_began_s = time.perf_counter() - self.train_s
        interrupted = False
        self._restarts.begin(self.pipeline.drain())
        rate_begin: tuple[float, int] | None = None  # seconds and samples when the epoch's rate is measured from
        samples = 0
        is_over = minibatches is not None and self.pipeline.drain() >= minibatches  # a finished run was resumed
        until = self.pipeline.position[0] if is_over else epochs
        remaining = self._progress.remaining = count_left(self.recipe.train, self.pipeline.position, until, minibatches)
        warm_minibatches = self.pipeline.drain() + count_warm_up(remaining or None)
        if remaining > 0:
            expected = f", predicted to take {format_seconds(remaining * minibatch_s)}" if minibatch_s else ""
            self._console.print(f"training {remaining} minibatches{expected}\n")
        with self._progress.display:
            try:
                for done in self.pipeline.train(self.recipe.train, until_epoch=until):
                    now_s = time.perf_counter()
                    is_due = self._cost is not None and self._cost.finish_minibatch(
                        now_s - self._paused_s, self.pipeline.is_saving()
                    )
                    self.losses.append((done.number, done.loss))
                    self._restarts.finish(done.number)
                    samples += done.samples
                    is_warm = done.number + 1 >= warm_minibatches and done.number >= self._evaluated_at
                    if rate_begin is None and is_warm:
                        rate_begin = now_s, samples
                    self._progress.show(done, self.pipeline)
                    is_last = minibatches is not None and done.number + 1 >= minibatches
                    if (done.ends_epoch or is_last) and rate_begin is not None and now_s > rate_begin[0]:
                        self.samples_per_s.append((samples - rate_begin[1]) / (now_s - rate_begin[0]))
                    if done.ends_epoch:
                        self._end_epoch(done, now_s - begin_s, is_last=done.epoch + 1 == epochs)
                        rate_begin = None
                    self._paused_s += time.perf_counter() - now_s
                    is_drained = done.ends_epoch and self._evaluated_at > done.number
                    if is_due:
                        self._save_and_measure()
                    elif self._checkpoints.is_due(done.number, drained=is_drained):
                        self._save()
                    if is_last:
                        break
            except KeyboardInterrupt:
                # A second signal must not interrupt the saving.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                interrupted = True
                self._console.print("interrupted: the pipeline is drained, writing the run folder")
        if self.pipeline.should_stop:
            self._console.print(f"stopped after minibatch {self.pipeline.drain()}: should_stop was set by a callback")
        self.train_s = time.perf_counter() - begin_s
        if self.recipe.test is not None and self._evaluated_at != self.pipeline.drain():
            # The metrics should be those of the saved weights. After Ctrl-C there is no time for them: a launcher ends
            # its workers half a minute later.
            self.metrics = {} if interrupted else self.pipeline.evaluate(self.recipe.test)
        if self._checkpoints.every != 0:
            self._save()
        return interrupted

    def list_losses(self) -> list[tuple[int, float]]:
        """Returns all losses, including those of drained minibatches that the loop has yet to receive."""
        return [*self.losses, *((done.number, done.loss) for done in self.pipeline.ready)]

    def _make_extra(self) -> dict[str, Any]:
        now_s = time.perf_counter()
        return {
            "seconds": now_s - self.began_s,
            "train_seconds": now_s - self._train_began_s,
            "evaluations": self.evaluations,
            "seconds_to_target": self.seconds_to_target,
            "samples_per_s": self.samples_per_s,
        }

    def _save_and_measure(self) -> None:
        assert self._cost is not None
        begin_s = time.perf_counter() - self._paused_s
        self.pipeline.drain()
        copy_s = time.perf_counter() - self._paused_s
        self._save(wait=self._cost.is_first)
        self._cost.note_checkpoint(begin_s, copy_s, time.perf_counter() - self._paused_s)

    def _save(self, *, wait: bool = False) -> None:
        folder, keep = self._checkpoints.folder, self._checkpoints.keep
        self.pipeline.save(folder, keep=keep, wait=wait, extra=self._make_extra())
        if self.pipeline.rank == 0:
            losses = self.list_losses()
            try:
                self._checkpoints.folder.above().write_text("losses.json", json.dumps(losses))
            except (ArtifactError, OSError) as error:
                advice = f"checkpoints in {self._checkpoints.folder} are intact: resume from there"
                raise WorkerError(0, "saving the losses so far", str(error), advice) from None

    def list_figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "drains": self.pipeline.drains,
            "epochs": self.pipeline.position[0],
            "minibatches": self.pipeline.drain(),
            "metrics": self.metrics,
            "evaluations": self.evaluations,
            "train_seconds": self.train_s,
            "seconds_to_target": self.seconds_to_target,
            "failures": self._restarts.list_figures(),
            "checkpoints": self._cost and {"every": self._cost.every, "seconds": self._cost.spent_s},
        }
        if "accuracy" in self.metrics:
            figures["accuracy"] = self.metrics["accuracy"]
        if self.recipe.target is not None:
            figures["target"] = {"metric": self.recipe.target[0], "value": self.recipe.target[1]}
        return figures

    def _end_epoch(self, done: Done, seconds: float, is_last: bool) -> None:
        every = self._evaluate_every
        is_due = is_last or (every > 0 and (done.epoch + 1) % every == 0)
        if self.recipe.test is None or not is_due:
            self._progress.end_epoch(done, {})
            return
        self.metrics = self.pipeline.evaluate(self.recipe.test)
        self._evaluated_at = self.pipeline.drain()
        self.evaluations.append(
            {"epoch": done.epoch, "minibatches": self._evaluated_at, "seconds": seconds, **self.metrics}
        )
        self._progress.end_epoch(done, self.metrics)
        if self.recipe.target is not None and self.seconds_to_target is None:
            name, value = self.recipe.target
            is_reached = self.metrics[name] <= value if name == "loss" else self.metrics[name] >= value
            self.seconds_to_target = seconds if is_reached else None


def count_left(loader: Any, position: tuple[int, int], epochs: int, minibatches: int | None) -> int:
    """Returns the minibatches left to train, 0 if unknown."""
    try:
        size = len(loader)
    except (TypeError, NotImplementedError):
        return 0
    done = position[0] * size + position[1]
    return max(0, (epochs * size if minibatches is None else min(epochs * size, minibatches)) - done)


class Progress:
    """Shows minibatches per second, loss, and each stage's busy share and peak memory.

    Every rank makes one; rank 0 draws a table if its console can (`is_live`), else it prints lines, also within long
    epochs.

    Attributes:
        remaining: minibatches of the run when it began; 0 if unknown.
        display: context in which the table is shown.
    """

    remaining = 0

    def __init__(self, console: Console, workers: int, rank: int) -> None:
        self._console = console
        self._workers = workers
        shows = is_live(console) and not console.quiet
        self._log = None if shows or console.quiet or rank else LogTimes()
        self._is_shown = bool(make_on_rank_0(lambda: "shown" if shows else "", rank))
        self._live = Live(console=console, auto_refresh=False, transient=True) if shows else None
        self.display = self._live or nullcontext()
        self._shown_s = 0.0
        self._shown_number = 0
        self._minibatches_per_s = 0.0
        self._epoch_began_s = 0.0
        self._epoch_first = -1
        self._first_number = 0

    def show(self, done: Done, pipeline: Pipeline) -> None:
        """Draws the table twice a second. Every rank calls it, to send its busy share if the table is shown."""
        now_s = time.perf_counter()
        if self._epoch_first < 0:
            self._epoch_began_s, self._epoch_first = now_s, done.number
            self._first_number = done.number
        if self._log is not None and not done.ends_epoch and self._log.is_due():
            seconds, steps = self._log.elapsed_s, done.number + 1 - self._first_number
            self._print_line(done, steps / seconds, format_time_left(steps, self.remaining, seconds).removeprefix(", "))
        if not self._is_shown:
            return
        if now_s - self._shown_s < _REFRESH_S:
            return
        if self._shown_s:
            self._minibatches_per_s = (done.number - self._shown_number) / (now_s - self._shown_s)
        self._shown_s, self._shown_number = now_s, done.number
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
            f"epoch {done.epoch + 1}  minibatch {done.number + 1}  {self._minibatches_per_s:.1f} minibatches/s  "
            f"loss {done.loss:.4f}  rate {done.rate:.3g}"
        )
        table.title_justify = "left"
        self._live.update(table, refresh=True)

    def end_epoch(self, done: Done, result: dict[str, float]) -> None:
        now_s = time.perf_counter()
        rate = (done.number - self._epoch_first) / (now_s - self._epoch_began_s) if now_s > self._epoch_began_s else 0.0
        self._epoch_began_s, self._epoch_first = now_s, done.number
        self._print_line(done, rate, "  ".join(f"test {name} {value:.4f}" for name, value in result.items()))

    def _print_line(self, done: Done, rate: float, suffix: str) -> None:
        self._console.print(
            f"epoch {done.epoch + 1:>3}  minibatch {done.number + 1:>6}  {rate:>7.1f} minibatches/s  "
            f"loss {done.loss:.4f}  {suffix}"
        )
