"""Callbacks of a training loop, as in Lightning, and what they and ReduceLROnPlateau get of evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedream.core.artifact import copy_json
from pipedream.core.errors import PipelineError

if TYPE_CHECKING:
    from pipedream.runtime.results import Done

_PLATEAU = "the scheduler ReduceLROnPlateau"


class Callback:
    """Base of callbacks: override the events that matter.

    Every rank calls them in the same order, at the same minibatch and with the same numbers, so a callback may call
    what every rank must call, such as ``pipeline.save_pretrained``. ``pipeline.should_stop = True`` ends training after
    the minibatches in flight; if it depends on these numbers alone, all ranks end at the same minibatch. `pipeline` is
    the `Pipeline`.
    """

    def on_minibatch(self, pipeline: Any, done: Done) -> None:
        """After a minibatch's gradients are in the weights, before the loop receives it."""

    def on_evaluation(self, pipeline: Any, metrics: Mapping[str, float]) -> None:
        """After an evaluation named 'test', with 'loss' and the metrics; see `FollowedEvaluations`."""

    def on_checkpoint(self, pipeline: Any, folder: Path) -> None:
        """After a checkpoint is complete; training waits for it if a callback has this method.

        For a URL, `folder` is not a `Path`, but its ``str`` is the URL.
        """

    def on_worker_lost(self, pipeline: Any, ranks: Sequence[int]) -> None:
        """Before training continues without lost workers (``train --elastic``, not under torchrun).

        `ranks`: the lost ones, each numbered among the workers that the earlier ones left.
        """

    @property
    def follows_checkpoints(self) -> bool:
        """Whether it overrides `on_checkpoint`."""
        return type(self).on_checkpoint is not Callback.on_checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON-serializable state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""


class EarlyStopping(Callback):
    """Stops when an evaluation's loss or metric has not improved for some evaluations, or is not finite.

    Args:
        monitor: 'loss' or a metric's name.
        min_delta: smallest change that counts as an improvement.
        patience: evaluations without improvement after which to stop.
        mode: 'min' or 'max', what an improvement is.

    Attributes:
        best_score: None before the first evaluation.
        wait_count: evaluations since the best one.

    Raises:
        PipelineError: another mode.
    """

    def __init__(self, monitor: str = "loss", *, min_delta: float = 0.0, patience: int = 3, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise PipelineError(f"early stopping with mode={mode!r} was asked for; give 'min' or 'max'")
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.mode = mode
        self.best_score: float | None = None
        self.wait_count = 0

    def on_evaluation(self, pipeline: Any, metrics: Mapping[str, float]) -> None:
        value = metrics[self.monitor]
        sign = 1.0 if self.mode == "max" else -1.0
        if self.best_score is None or sign * (value - self.best_score) > self.min_delta:
            self.best_score, self.wait_count = value, 0
        else:
            self.wait_count += 1
        if self.wait_count >= max(self.patience, 1) or not isfinite(value):
            pipeline.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "wait_count": self.wait_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_score, self.wait_count = state["best_score"], state["wait_count"]


class FollowedEvaluations:
    """Reports the evaluations named 'test' or, while there are none, those named 'test_ema', of the averaged weights.

    One of the average waits until training continues or something is asked of the pipeline: 'test' may come after it.

    Attributes:
        needed_by: what needs evaluations.
    """

    def __init__(self, pipeline: Any, callbacks: Sequence[Callback], local: Any, monitor: str) -> None:
        self._pipeline, self._callbacks, self._local, self._monitor = pipeline, callbacks, local, monitor
        follows = any(stage_state.optimizer.schedule.follows_evaluations for _, stage_state in local.stage_states)
        self.needed_by = [_PLATEAU] if follows else []
        self.needed_by += ["early stopping"] if monitored(callbacks) else []
        self._waiting: Mapping[str, float] | None = None
        self._names: set[str] = set()

    def add(self, name: str, means: Mapping[str, float]) -> None:
        self._names.add(name)
        if name == "test" or (name == "test_ema" and "test" not in self._names):
            self.report(waits=name == "test")
            self._waiting = means
            self.report(waits=name == "test_ema")

    def report(self, waits: bool = False) -> None:
        """Reports the evaluation that waits, unless it still does."""
        if self._waiting is not None and not waits:
            means, self._waiting = self._waiting, None
            self.step_schedulers(means[self._monitor])
            for callback in self._callbacks:
                callback.on_evaluation(self._pipeline, means)

    def step_schedulers(self, value: float) -> None:
        """Steps the schedulers that follow evaluations, also after one that callbacks do not see."""
        self.needed_by = [need for need in self.needed_by if need != _PLATEAU]
        for _, stage_state in self._local.stage_states:
            stage_state.optimizer.schedule.step_after_evaluation(value)

    def end(self, minibatches: int) -> None:
        """Reports the evaluation that waits; warns if there never was one that something needs."""
        self.report()
        unseen = self.needed_by and not self._names & {"test", "test_ema"}
        if unseen and minibatches and self._local.rank == 0:
            warnings.warn(
                f"{self.needed_by[0]} follows evaluations named 'test', but this run made "
                f"{sorted(self._names) or 'none'}; call evaluate(..., name='test') after epochs",
                stacklevel=3,
            )


def monitored(callbacks: Iterable[Callback]) -> list[str]:
    """Returns the metrics that early stopping monitors."""
    return [callback.monitor for callback in callbacks if isinstance(callback, EarlyStopping)]


def states_of(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Returns the states of callbacks that have one, by class, for a checkpoint.

    Raises:
        ArtifactError: JSON cannot hold a state.
    """
    states = {name: state for name, callback in _name_callbacks(callbacks).items() if (state := callback.state_dict())}
    return {name: copy_json(state, f"the state_dict() of the callback {name}") for name, state in states.items()}


def load_states(callbacks: Iterable[Callback], states: Mapping[str, Any]) -> None:
    """Restores the states of `states_of`; a callback without a saved state keeps its own."""
    for name, callback in _name_callbacks(callbacks).items():
        if name in states:
            callback.load_state_dict(states[name])


def _name_callbacks(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Returns callbacks by class name, numbered within each class."""
    by_name: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__qualname__
        by_name[f"{kind}/{sum(name.startswith(f'{kind}/') for name in by_name)}"] = callback
    return by_name
