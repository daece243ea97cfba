"""The training loop of one run, with its evaluations, checkpoints and statistics."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipedream.apps.training.checkpoint_cost import CheckpointCost
from pipedream.apps.training.recipe import Recipe
from pipedream.apps.training.run_folder import write_losses
from pipedream.core.cold import count_warm_up
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.core.progress import LogTimes, format_time_left, is_live
from pipedream.core.units import format_seconds
from pipedream.pipeline import Pipeline
from pipedream.plan_request import AUTO
from pipedream.runtime.comm.process_group import gather_texts, world_group
from pipedream.runtime.results import Done
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


@dataclass
class TrainingLoop:
    """The training loop of one run.

    An evaluation after an epoch drains the pipeline first, which finishes minibatches of the next epoch if the method
    does not flush.

    Attributes:
        evaluate_every: epochs; 0 evaluates only at the end.
        watches: called with the run's minibatches after each.
        began_s: when the run began, by `time.perf_counter`, moved back by the seconds before the checkpoint that it was
            resumed from.
        losses: (number, loss) of each minibatch.
        metrics: the last evaluation's.
        evaluations: metrics of each, with its epoch, minibatches and seconds.
        seconds_to_target: None if it is not reached.
        train_s: seconds of training and evaluations, with those before that checkpoint.
        samples_per_s: rate of each epoch, without the minibatches that the drain before it finished.
    """

    pipeline: Pipeline
    recipe: Recipe
    console: Console
    evaluate_every: int
    checkpoints: CheckpointPolicy
    began_s: float
    watches: Sequence[Callable[[int], None]] = ()
    losses: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seconds_to_target: float | None = None
    train_s: float = 0.0
    samples_per_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cost: CheckpointCost | None = None
        if self.checkpoints.every == AUTO:
            fill_minibatches = 2 * max(self.pipeline.plan.in_flight)
            self._cost = CheckpointCost(fill_minibatches, lambda text: gather_texts(text, world_group()))
        self._paused_s = 0.0  # in evaluations
        self._saved_losses = 0  # those of earlier minibatches are in the run folder
        self._train_began_s = self.began_s
        self._evaluated_at = -1
        self._restarts, self._progress = Restarts(self.pipeline.rank), Progress(self.console)

    def resume(self, losses: list[tuple[int, float]], *, in_place: bool) -> None:
        """Continues the statistics of a loaded checkpoint and the losses before it, in their run folder or another."""
        saved = self.pipeline.extra
        self.losses, self._saved_losses = losses, self.pipeline.drain() if in_place else 0
        self.began_s -= saved.get("seconds", 0.0)
        self.train_s = saved.get("train_seconds", 0.0)
        self.evaluations = list(saved.get("evaluations", ()))
        self.seconds_to_target = saved.get("seconds_to_target")
        self.samples_per_s = list(saved.get("samples_per_s", ()))

    def train(self, epochs: int, minibatches: int | None, minibatch_s: float) -> KeyboardInterrupt | None:
        """Trains to a total of epochs or minibatches; returns what interrupted it, Ctrl-C or SIGTERM.

        Args:
            minibatch_s: predicted seconds of one.
        """
        begin_s = self._train_began_s = time.perf_counter() - self.train_s
        interrupt: KeyboardInterrupt | None = None
        self._restarts.begin(self.pipeline.drain())
        rate_begin: tuple[float, int] | None = None  # seconds and samples when the epoch's rate is measured from
        samples = 0
        is_over = minibatches is not None and self.pipeline.drain() >= minibatches  # a finished run was resumed
        until = self.pipeline.position[0] if is_over else epochs
        remaining = self._progress.remaining = count_left(self.recipe.train, self.pipeline.position, until, minibatches)
        warm_minibatches = self.pipeline.drain() + count_warm_up(remaining or None)
        if remaining > 0:
            expected = f", predicted to take {format_seconds(remaining * minibatch_s)}" if minibatch_s else ""
            self.console.print(f"training {remaining} minibatches{expected}\n")
        with self._progress.display:
            try:
                for done in self.pipeline.train(self.recipe.train, until_epoch=until):
                    now_s = time.perf_counter()
                    is_due = self._cost is not None and self._cost.finish_minibatch(
                        now_s - self._paused_s, self.pipeline.is_saving()
                    )
                    self.losses.append((done.number, done.loss))
                    self._restarts.finish(done.number)
                    for watch in self.watches:
                        watch(done.number + 1)
                    samples += done.samples
                    is_warm = done.number + 1 >= warm_minibatches and done.number >= self._evaluated_at
                    if rate_begin is None and is_warm:
                        rate_begin = now_s, samples
                    self._progress.show(done)
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
                    elif self.checkpoints.is_due(done.number, drained=is_drained):
                        self._save()
                    if is_last:
                        break
            except KeyboardInterrupt as error:
                # A second signal must not interrupt the saving.
                signal.signal(signal.SIGTERM if isinstance(error, SystemExit) else signal.SIGINT, signal.SIG_IGN)
                interrupt = error
                self.console.print("interrupted: the pipeline is drained, writing the run folder")
        if self.pipeline.should_stop:
            self.console.print(f"stopped after minibatch {self.pipeline.drain()}: should_stop was set by a callback")
        self.train_s = time.perf_counter() - begin_s
        if self.recipe.test is not None and self._evaluated_at != self.pipeline.drain():
            # The metrics should be those of the saved weights. After a signal there is no time for them: a launcher
            # ends its workers half a minute later.
            self.metrics = {} if interrupt else self.pipeline.evaluate(self.recipe.test)
        if self.checkpoints.every != 0:
            self._save()
        return interrupt

    def list_losses(self) -> list[tuple[int, float]]:
        """Returns all losses, including those of drained minibatches that the loop has yet to receive."""
        return [*self.losses, *((done.number, done.loss) for done in self.pipeline.ready)]

    def _save_and_measure(self) -> None:
        assert self._cost is not None
        begin_s = time.perf_counter() - self._paused_s
        self.pipeline.drain()
        copy_s = time.perf_counter() - self._paused_s
        self._save(wait=self._cost.is_first)
        self._cost.note_checkpoint(begin_s, copy_s, time.perf_counter() - self._paused_s)

    def _save(self, *, wait: bool = False) -> None:
        now_s = time.perf_counter()
        extra = {"seconds": now_s - self.began_s, "train_seconds": now_s - self._train_began_s}
        extra |= {name: getattr(self, name) for name in ("evaluations", "seconds_to_target", "samples_per_s")}
        minibatches = self.pipeline.drain()
        if self.pipeline.rank == 0:  # before the checkpoint, which may be complete when this process is killed
            try:
                write_losses(self.checkpoints.folder.above(), self.list_losses(), self._saved_losses, minibatches)
            except (ArtifactError, OSError) as error:
                advice = f"checkpoints in {self.checkpoints.folder} are intact: resume from there"
                raise WorkerError(0, "saving the losses so far", str(error), advice) from None
            self._saved_losses = minibatches
        self.pipeline.save(self.checkpoints.folder, keep=self.checkpoints.keep, wait=wait, extra=extra)

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
        every = self.evaluate_every
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
    """Shows minibatches per second and loss: redrawn if the console can (`is_live`), else in lines.

    Attributes:
        remaining: minibatches of the run when it began; 0 if unknown.
        display: context in which it is shown.
    """

    remaining = 0

    def __init__(self, console: Console) -> None:
        self._console, self._times = console, LogTimes()
        is_redrawn = is_live(console) and not console.quiet
        self._live = Live(console=console, auto_refresh=False, transient=True) if is_redrawn else None
        self.display = self._live or nullcontext()
        self._shown_s = self._epoch_began_s = 0.0
        self._first = self._epoch_first = -1

    def show(self, done: Done) -> None:
        """Shows a minibatch now and then: twice a second where it is redrawn."""
        now_s = time.perf_counter()
        if self._first < 0:
            self._epoch_began_s, self._epoch_first, self._first = now_s, done.number, done.number
        if self._live is None:
            is_due = not done.ends_epoch and self._times.is_due()
        else:
            is_due = now_s - self._shown_s >= _REFRESH_S
        if not is_due:
            return
        self._shown_s, seconds, steps = now_s, self._times.elapsed_s, done.number + 1 - self._first
        time_left = format_time_left(steps, self.remaining, seconds).removeprefix(", ")
        line = _format_line(done, steps / seconds, time_left)
        if self._live is None:
            self._console.print(line)
        else:
            self._live.update(Text(line), refresh=True)

    def end_epoch(self, done: Done, result: dict[str, float]) -> None:
        now_s = time.perf_counter()
        rate = (done.number - self._epoch_first) / (now_s - self._epoch_began_s) if now_s > self._epoch_began_s else 0.0
        self._epoch_began_s, self._epoch_first = now_s, done.number
        scores = "  ".join(f"test {name} {value:.4f}" for name, value in result.items())
        self._console.print(_format_line(done, rate, scores))


def _format_line(done: Done, rate: float, suffix: str) -> str:
    return (
        f"epoch {done.epoch + 1:>3}  minibatch {done.number + 1:>6}  {rate:>7.1f} minibatches/s  "
        f"loss {done.loss:.4f}  {suffix}"
    )
