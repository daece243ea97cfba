"""The training loop of one run: results as they come, evaluations, checkpoints, and what it learned."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipedream.core.artifact import write_text
from pipedream.pipeline import Done, Pipeline
from pipedream.recipe import Recipe
from pipedream.training.progress import Progress

__all__ = ["Loop", "Saving"]


@dataclass(frozen=True)
class Saving:
    """When checkpoints are made: every so many minibatches; None: where the pipeline is drained anyway; 0: never."""

    folder: Path
    every: int | None
    keep: int

    def due(self, number: int, drained: bool) -> bool:
        """Tells whether one is due after minibatch `number`."""
        return drained if self.every is None else self.every > 0 and (number + 1) % self.every == 0


class Loop:
    """The training loop of one run, and what it learned."""

    def __init__(
        self, pipeline: Pipeline, recipe: Recipe, console: Console, evaluate_every: int, saving: Saving
    ) -> None:
        self.pipeline = pipeline
        self._saving = saving
        self.recipe = recipe
        self.losses: list[tuple[int, float]] = []
        self.result: dict[str, float] = {}
        self.results: list[dict[str, Any]] = []
        self.seconds_to_target: float | None = None
        self.train_s = 0.0
        self.samples_per_s: list[float] = []
        self._evaluated_at = -1
        self._evaluate_every = evaluate_every
        self._progress = Progress(console, pipeline.plan.workers)
        self._console = console

    def train(self, epochs: int, minibatches: int | None) -> bool:
        """Trains; tells whether Ctrl-C ended it."""
        start = time.perf_counter()
        interrupted = False
        mark: tuple[float, int] | None = None
        samples = 0
        is_over = minibatches is not None and self.pipeline.drain() >= minibatches  # where an ended run is resumed
        left = 0 if is_over else max(epochs - self.pipeline.position[0], 0)
        with self._progress:
            try:
                for done in self.pipeline.train(self.recipe.train, epochs=left):
                    now = time.perf_counter()
                    self.losses.append((done.number, done.loss))
                    samples += done.samples
                    mark = mark or (now, samples)
                    self._progress.show(done, self.pipeline)
                    if done.ends_epoch:
                        if now > mark[0]:
                            self.samples_per_s.append((samples - mark[1]) / (now - mark[0]))
                        self._end_epoch(done, now - start, last=done.epoch + 1 == epochs)
                        mark = None
                    if self._saving.due(done.number, done.ends_epoch and self._evaluated_at > done.number):
                        self._save()
                    if minibatches is not None and done.number + 1 >= minibatches:
                        if mark is not None and now > mark[0]:
                            self.samples_per_s.append((samples - mark[1]) / (now - mark[0]))
                        break
            except KeyboardInterrupt:
                # What was admitted has been finished. A second signal shall not spoil the saving.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                interrupted = True
                self._console.print("interrupted: the pipeline is drained, writing the run folder")
        self.train_s = time.perf_counter() - start
        if self.recipe.test is not None and self._evaluated_at != self.pipeline.drain():
            # The figures belong to the weights that are saved. After Ctrl-C there is no time for an evaluation:
            # a launcher ends its workers half a minute later.
            self.result = {} if interrupted else self.pipeline.evaluate(self.recipe.test)
        if self._saving.every != 0:
            self._save()
        return interrupted

    def _save(self) -> None:
        """Saves in the background; what is known of the losses is kept beside it."""
        self.pipeline.save(self._saving.folder, keep=self._saving.keep, wait=False)
        if self.pipeline.rank == 0:
            # The drain has finished minibatches that this loop has not heard of yet: they are in the checkpoint.
            known = [*self.losses, *((done.number, done.loss) for done in self.pipeline.ready)]
            write_text(self._saving.folder.parent / "losses.json", json.dumps(known))

    def figures(self) -> dict[str, Any]:
        """Returns what the summary says of the training itself."""
        found: dict[str, Any] = {
            "drains": self.pipeline.drains,
            "epochs": self.pipeline.position[0],
            "minibatches": self.pipeline.drain(),
            "metrics": self.result,
            "evaluations": self.results,
            "train_seconds": self.train_s,
            "seconds_to_target": self.seconds_to_target,
        }
        if "accuracy" in self.result:
            found["accuracy"] = self.result["accuracy"]
        if self.recipe.target is not None:
            found["target"] = {"metric": self.recipe.target[0], "value": self.recipe.target[1]}
        return found

    def _end_epoch(self, done: Done, seconds: float, last: bool) -> None:
        every = self._evaluate_every
        due = last or (every > 0 and (done.epoch + 1) % every == 0)
        if self.recipe.test is None or not due:
            self._progress.epoch(done, {})
            return
        self.result = self.pipeline.evaluate(self.recipe.test)
        self._evaluated_at = self.pipeline.drain()
        self.results.append({"epoch": done.epoch, "minibatches": self._evaluated_at, "seconds": seconds, **self.result})
        self._progress.epoch(done, self.result)
        if self.recipe.target is not None and self.seconds_to_target is None:
            name, value = self.recipe.target
            reached = self.result[name] <= value if name == "loss" else self.result[name] >= value
            self.seconds_to_target = seconds if reached else None
