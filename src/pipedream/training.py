"""The main job: profile, plan, predict, train, measure, report; a recipe in, a run folder out."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from . import api
from .core.cluster import Cluster
from .core.errors import PlanError, RecipeError
from .core.plan import Plan
from .core.profile import Profile
from .pipeline import Done, Pipeline
from .progress import Progress
from .recipe import Recipe, make_recipe
from .runfolder import last_segment, software_versions, summarise, write_run
from .runtime import talk
from .runtime.files import load_weights
from .runtime.judge import STUCK_AFTER_S
from .runtime.launch import set_threads
from .runtime.losses import Loss, is_torch_loss

__all__ = ["profile_recipe", "run", "train_recipe"]


def run(recipe: Callable[..., Recipe], **options: Any) -> dict[str, Any]:
    """Trains a recipe from its own file: ``if __name__ == "__main__": pipedream.run(recipe)``.

    In a plain process all workers run in this one (two, unless `workers` says otherwise); under torchrun
    this process is one of them. Takes the options of `train_recipe`. Returns the run's summary.
    """
    return train_recipe(lambda seed: make_recipe(recipe, seed=seed), **options)


def train_recipe(
    make: Callable[[int], Recipe],
    *,
    workers: int | None = None,
    schedule: str = "pipedream",
    plan: Plan | None = None,
    straight: bool = True,
    in_flight: str | tuple[int, ...] = "noam",
    microbatches: int | None = None,
    epochs: int | None = None,
    minibatches: int | None = None,
    evaluate_every: int = 1,
    seed: int = 0,
    device: str = "cpu",
    cluster: Cluster | None = None,
    weights: str | None = None,
    out: str | os.PathLike[str] | None = None,
    logs: tuple[str, ...] = (),
    quiet: bool = False,
    stuck_after_s: float = STUCK_AFTER_S,
) -> dict[str, Any]:
    """Profiles, plans, trains and reports a recipe.

    Args:
        make: from a seed to the recipe.
        workers: of the run; under torchrun the number of processes.
        schedule: a method's name.
        plan: made before; None profiles the model here and plans.
        straight: plan a straight pipeline of one stage a worker; False plans data parallelism.
        in_flight: depth: 'noam', 'full' or counts.
        microbatches: parts of a minibatch, for methods that split it.
        epochs, minibatches: how long; the recipe's epochs, all their minibatches, unless said.
        evaluate_every: epochs between evaluations (each drains the pipeline); 0 evaluates at the end only.
        seed: of the recipe and of everything random inside the layers.
        device: 'cpu' or 'cuda'.
        cluster: workers and links; None takes this machine.
        weights: file of a state dict to start from.
        out: run folder; None makes one under ``runs/``.
        logs: loggers to write into it: 'csv', 'tensorboard'.
        quiet: print nothing.
        stuck_after_s: as of `Pipeline`.

    Raises:
        PipelineError: see the errors of each part; KeyboardInterrupt: Ctrl-C, after what was admitted has been
            finished and the run folder written.
    """
    began = time.perf_counter()
    place = talk.device_of(device)
    rank, processes = talk.join(place)
    set_threads(processes)
    console = Console(quiet=quiet or rank != 0, highlight=False, soft_wrap=True)
    count = _workers(workers, plan, processes)
    recipe = make(seed)
    if recipe.target is not None and recipe.target[0] not in {"loss", *recipe.metrics}:
        raise RecipeError(
            f"the recipe's target is on {recipe.target[0]!r}, its metrics are {sorted(recipe.metrics)}; name one "
            "of them, or 'loss'"
        )
    folder = Path(talk.from_rank_0(lambda: str(out or _new_folder(recipe.name)), rank))
    profile = None
    if plan is None:
        profile = profile_recipe(recipe, device=str(place), seed=seed)
        plan = _planned(profile, cluster or Cluster.here(count), schedule, microbatches, in_flight, straight)
        console.print(f"\n{profile}")
    elif in_flight != "noam":
        plan = plan.with_depth(in_flight)
    loggers = _loggers(logs, folder) if rank == 0 else []
    with Pipeline(
        recipe.model,
        plan,
        schedule=schedule,
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        microbatches=microbatches,
        metrics=recipe.metrics,
        inputs=recipe.inputs,
        targets=recipe.targets,
        weight=recipe.weight,
        scheduler=recipe.scheduler,
        clip_grad_norm=recipe.clip_grad_norm,
        clip=recipe.clip,
        ema=recipe.ema,
        autocast=recipe.autocast,
        seed=seed,
        device=str(place),
        sample=None if _names_layers(plan) else _sample(recipe),
        loggers=loggers,
        stuck_after_s=stuck_after_s,
    ) as pipeline:
        console.print(f"\n{plan}\n\n{pipeline.proof}\n")
        if weights is not None:
            pipeline.load_state_dict(load_weights(weights))
        work = _Run(pipeline, recipe, console, evaluate_every)
        interrupted = work.train(epochs or recipe.epochs, minibatches)
        measured = pipeline.timeline()
        sent = pipeline.sent_bytes()
        state = pipeline.state_dict()
        average = pipeline.state_dict(ema=True) if recipe.ema is not None else None
        rates = pipeline.learning_rates()
        steady = last_segment(measured, pipeline.drains)
        predicted = api.simulate_program(
            pipeline.program, max(steady.microbatches, 4 * pipeline.program.cycle * max(plan.in_flight))
        )
    summary = summarise(
        plan=plan,
        predicted=predicted,
        measured=steady,
        sent_bytes=sent,
        learning_rates=rates,
        samples_per_s=work.samples_per_s,
    )
    summary |= work.figures() | {
        "seconds": time.perf_counter() - began,
        "interrupted": interrupted,
        "configuration": {
            "workers": plan.workers,
            "processes": processes,
            "schedule": pipeline.program.schedule,
            "microbatches": pipeline.program.microbatches,
            "in_flight": list(plan.in_flight),
            "depth": plan.depth,
            "epochs": epochs or recipe.epochs,
            "minibatches": minibatches,
            "evaluate_every": evaluate_every,
            "seed": seed,
            "device": str(place),
            "weights": weights,
            "clip_grad_norm": recipe.clip_grad_norm,
            "clip": recipe.clip,
            "ema": recipe.ema,
            "autocast": None if recipe.autocast is None else str(recipe.autocast),
        },
        "recipe": recipe.name,
        "seed": seed,
        "versions": software_versions(),
    }
    if rank == 0:
        for logger in loggers:
            logger.close()
        write_run(folder, summary, plan, profile, predicted, measured, steady, work.losses, state, average)
        _say(console, summary, folder)
    if interrupted:
        raise KeyboardInterrupt
    return summary


def profile_recipe(recipe: Recipe, *, device: str = "cpu", seed: int = 0, runs: int = 10) -> Profile:
    """Profiles a recipe's model on its first training batch, with its loss and its optimizer."""
    batch = recipe.first_batch()
    loss = Loss(recipe.loss, recipe.weight)
    targets = recipe.targets(batch) if recipe.targets is not None else batch
    if recipe.targets is None and is_torch_loss(recipe.loss):
        targets = batch[1]
    return api.profile(
        recipe.model,
        _model_input(recipe, batch),
        loss=lambda output: loss(output, targets, 1, 1.0)[0],
        optimizer=recipe.optimizer,
        device=device,
        autocast=recipe.autocast,
        seed=seed,
        runs=runs,
    )


class _Run:
    """The training loop of one run, and what it learned."""

    def __init__(self, pipeline: Pipeline, recipe: Recipe, console: Console, evaluate_every: int) -> None:
        self.pipeline = pipeline
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
        with self._progress:
            try:
                for done in self.pipeline.train(self.recipe.train, epochs=epochs):
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
        return interrupted

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


def _workers(workers: int | None, plan: Plan | None, processes: int) -> int:
    count = workers or (plan.workers if plan is not None else processes if processes > 1 else 2)
    if processes > 1 and count != processes:
        raise PlanError(f"{count} workers were asked for, {processes} processes were started; make the numbers equal")
    if plan is not None and plan.workers != count:
        raise PlanError(
            f"the plan {plan.config} is for {plan.workers} workers, {count} were asked for; plan again for {count}"
        )
    return count


def _planned(
    profile: Profile,
    cluster: Cluster,
    schedule: str,
    microbatches: int | None,
    in_flight: str | tuple[int, ...],
    straight: bool,
) -> Plan:
    if cluster.workers == 1:
        straight = True
    return api.plan(
        profile, cluster, schedule=schedule, microbatches=microbatches, in_flight=in_flight, straight=straight
    )


def _names_layers(plan: Plan) -> bool:
    return sum(len(stage.names) for stage in plan.stages) == plan.stages[-1].last


def _sample(recipe: Recipe) -> Any:
    return _model_input(recipe, recipe.first_batch())


def _model_input(recipe: Recipe, batch: Any) -> Any:
    if recipe.sample is not None:
        return recipe.sample
    if recipe.inputs is not None:
        return recipe.inputs(batch)
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def _loggers(names: tuple[str, ...], folder: Path) -> list[Any]:
    from .runtime.loggers import CSVLogger, TensorBoardLogger  # here: tensorboard is optional

    found: list[Any] = []
    for name in names:
        if name == "csv":
            found.append(CSVLogger(folder / "train.csv"))
        elif name == "tensorboard":
            found.append(TensorBoardLogger(folder / "tensorboard"))
        else:
            raise RecipeError(f"logger {name!r} is not known; choose csv or tensorboard")
    return found


def _new_folder(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _say(console: Console, summary: dict[str, Any], folder: Path) -> None:
    results = ", ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())
    rate = summary["throughput"]
    console.print(
        f"\ntest: {results or 'not evaluated'}"
        f"\nthroughput: {rate['measured_per_s']:.4g} samples/s measured, {rate['predicted_per_s']:.4g} predicted"
        f"\nbubble: {summary['bubble']['measured']:.1%} measured, {summary['bubble']['predicted']:.1%} predicted"
        f"\nseconds: {summary['seconds']:.1f}"
        + (
            f", to the target {summary['seconds_to_target']:.1f}"
            if summary["seconds_to_target"] is not None
            else ", target not reached"
            if summary.get("target")
            else ""
        )
        + f"\nrun folder: {folder} (open report.html in a browser, trace.json in Perfetto)"
    )
    sys.stdout.flush()
