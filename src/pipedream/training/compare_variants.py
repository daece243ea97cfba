"""The variants of a comparison over one link: what is planned and run for each, and its figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from pipedream.core.cold import WARM_UP
from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.messages import ENCODINGS
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_seconds
from pipedream.core.variants import (
    ACCUMULATED,
    ACCUMULATING,
    DDP,
    HALF,
    HALF_ACCUMULATING,
    LOCAL_SGD,
    ONE_WORKER,
    SHARED,
    TORCH,
    Variant,
    format_link,
)
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.schedules import properties_of
from pipedream.training.compare_runs import RunFailed, Runs, Scales, count_for_sums
from pipedream.training.run_folder import measure_steady
from pipedream.workflows.plan import make_plan
from pipedream.workflows.simulate import simulate

OF_TORCH = "torch"
"""The name of all that torch offers among the methods that are compared."""

_BUCKET_COPY_S_PER_BYTE = 0.4e-9
"""Of the weights: torch 2.13, an x86 server."""

_NAMES = {
    "data-parallel": "data parallel",
    "1f1b": "1F1B",
    "pipedream": "PipeDream",
    "pipedream_2bw": "2BW",
    "auto": "planner's choice",
}


@dataclass(frozen=True)
class _Spec:
    """What to measure: a variant's request for a plan, and its kind of training.

    Attributes:
        kind: of a `WorkerJob`, for torch's; '' is ``pipedream train``.
        parts: microbatches of a minibatch, for torch's.
        accumulated: minibatches that each worker accumulates for an update.
    """

    name: str
    request: PlanRequest
    kind: str = ""
    parts: int = 1
    accumulated: int = 1


@dataclass
class LinkVariants:
    """Measures the variants over one link.

    Attributes:
        scales: of the emulation of several workers; None if they compute.
        target: the recipe's, known once something has been trained.
        seconds: predicted for each variant after its warm-up; by default the runs' epochs and minibatches count.
    """

    runs: Runs
    profile: Profile
    cluster: Cluster
    microbatches: int | None
    schedules: Sequence[str]
    progress: Callable[[str], None]
    scales: Scales | None = None
    target: tuple[str, float] | None = None
    seconds: float | None = None
    _minibatches: int = 0
    _variants_by_run: dict[tuple[Any, ...], Variant] = field(default_factory=dict)

    def measure_all(self, one_worker: Variant | None) -> Iterator[Variant]:
        """Yields the variants as they are measured.

        Args:
            one_worker: its measurement over another link, if there is one.
        """
        if one_worker is None:
            request = PlanRequest(Cluster.flat(1), shape="data-parallel")
            plan = make_plan(self.profile, request)
            one_worker = self._measure_torch(Variant(ONE_WORKER, 1), _Spec(ONE_WORKER, request, "plain"), plan)
        yield one_worker
        for spec in self._list_specs() if self.cluster.workers > 1 else ():
            yield self._measure(spec, one_worker)

    def _list_specs(self) -> Iterator[_Spec]:
        """Yields the variants of several workers."""
        mesh = self.runs.options.mesh
        replicated = PlanRequest(self.cluster, shape="data-parallel")
        for text in self.schedules:
            name, _, exchange = text.partition("+")
            if text == OF_TORCH:
                yield from self._list_torch(replicated)
                continue
            title = ", ".join(filter(None, (_NAMES.get(name, name), exchange)))
            option = "messages" if exchange.split(",")[0] in ENCODINGS else "sums"
            exchange_options: dict[str, Any] = {option: exchange} if exchange else {}
            if name == "data-parallel":
                compressed = replace(replicated, mesh=mesh, **exchange_options)
                yield _Spec(title, compressed)
                if exchange:
                    yield _Spec(f"{title}, accumulating {ACCUMULATED}", compressed, accumulated=ACCUMULATED)
                continue
            if name == AUTO:
                yield _Spec(title, PlanRequest(self.cluster, schedule=AUTO, allow_asynchronous=True, mesh=mesh))
                continue
            microbatches = self.microbatches if properties_of(name).splits_minibatch else None
            pipeline = PlanRequest(
                self.cluster,
                schedule=name,
                microbatches=microbatches,
                shape="pipeline",
                all_workers=True,
                mesh=mesh,
                **exchange_options,
            )
            if name != "pipedream":
                yield _Spec(title, pipeline)
                continue
            for depth in ("full",) if exchange else ("noam", "full"):
                yield _Spec(f"{title}, {depth}", replace(pipeline, in_flight=depth))

    def _list_torch(self, replicated: PlanRequest) -> Iterator[_Spec]:
        """Yields torch's own variants."""
        straight = PlanRequest(self.cluster, schedule="1f1b", shape="straight", microbatches=self.microbatches)
        try:
            parts = make_plan(self.profile, straight).microbatches
        except (PlanError, ScheduleError):
            parts = self.microbatches or self.cluster.workers
        yield _Spec(DDP, replicated, "ddp")
        yield _Spec(SHARED, replace(replicated, schedule="1f1b", microbatches=parts), "ddp", parts)
        yield _Spec(ACCUMULATING, replicated, "ddp", accumulated=ACCUMULATED)
        yield _Spec(HALF, replace(replicated, sums="float16"), "ddp")
        yield _Spec(HALF_ACCUMULATING, replace(replicated, sums="float16"), "ddp", accumulated=ACCUMULATED)
        yield _Spec(LOCAL_SGD, replace(replicated, sums=f"every:{ACCUMULATED}"), "ddp")
        yield _Spec(TORCH[-1], replace(straight, microbatches=parts), "1f1b", parts)

    def _measure(self, spec: _Spec, one_worker: Variant) -> Variant:
        variant = Variant(spec.name, self.cluster.workers, approximation=spec.request.choices.approximations)
        if self.scales is not None and spec.kind == "1f1b":
            return replace(variant, why="it needs the model's layers, which emulated workers do not have")
        try:
            plan = make_plan(self.profile, spec.request)
            plan = accumulate_minibatches(plan, spec.accumulated) if spec.accumulated > 1 else plan
            plan = add_bucket_copies(plan) if spec.kind == "ddp" and self.scales is None else plan
        except (PlanError, ScheduleError) as error:
            return replace(variant, why=str(error))
        if spec.kind and self.scales is None:
            return self._measure_torch(variant, spec, plan)
        is_auto = spec.request.schedule == AUTO
        plan_text = f"{plan.config} {plan.schedule}" if is_auto else f"{plan.config}, {plan.depth_mode}"
        plan_text = "" if spec.kind else plan_text
        if is_auto and plan.ranks == 1:
            return replace(one_worker, name=spec.name, plan=plan_text)
        key = _identify_run(plan)
        if key not in self._variants_by_run:
            measured = self._measure_method(spec.name, plan)
            self._variants_by_run[key] = replace(measured, approximation=variant.approximation)
            if not measured.why:
                self._report(self._variants_by_run[key])
        return replace(self._variants_by_run[key], name=spec.name, plan=plan_text)

    def _measure_torch(self, variant: Variant, spec: _Spec, plan: Plan) -> Variant:
        bounds = [(stage.first, stage.last) for stage in plan.stages]
        name = self._append_link(variant.name)
        self._choose_length(plan)
        self.progress(f"{name} ...{self._predict_duration(plan)}")
        try:
            file, sent_bytes = self.runs.run_worker(
                spec.kind,
                variant.workers,
                name,
                parts=spec.parts,
                accumulated=spec.accumulated,
                sums=spec.request.sums,
                bounds=bounds,
            )
        except RunFailed as failed:
            return replace(variant, why=failed.reason)
        figures = json.loads(file.read_text(encoding="utf-8"))
        if "why" in figures:
            return replace(variant, why=figures["why"])
        self._minibatches = figures["minibatches"]
        self.target = None if figures["target"] is None else tuple(figures["target"])
        measured = replace(
            variant,
            samples_per_s=figures["samples_per_s"],
            predicted_per_s=predict_samples_per_s(plan),
            samples_per_update=figures["samples_per_update"],
            bytes_per_sample=self._divide_by_samples(sent_bytes, figures["minibatches"]),
            peak_bytes=figures["peak_bytes"],
            seconds_to_target=figures["seconds_to_target"],
            metrics=figures["metrics"],
        )
        measured = replace(measured, bubble=self._estimate_idle_share(measured, is_replicated=spec.kind == "ddp"))
        self._report(measured)
        return measured

    def _measure_method(self, name: str, plan: Plan) -> Variant:
        label, accumulated = self._append_link(name), plan.batch // self.profile.batch
        self._choose_length(plan)
        self.progress(f"{label} ...{self._predict_duration(plan)}")
        try:
            if self.scales is None:
                summary, sent = self.runs.train(plan, label, accumulated)
            else:
                minibatches = self.runs.options.minibatches or _count_steady_minibatches(plan)
                minibatches = max(minibatches, count_for_sums(plan))
                summary, sent = self.runs.emulate(plan, label, self.scales, minibatches)
        except RunFailed as failed:
            if accumulated > 1:
                return Variant(name, plan.ranks, why=failed.reason)
            raise failed.make_error(name) from None
        if target := summary.get("target"):
            self.target = (target["metric"], target["value"])
        splits = plan.microbatches > 1 or properties_of(plan.schedule or "pipedream").splits_minibatch
        return Variant(
            name,
            plan.ranks,
            samples_per_s=summary["throughput"]["measured_per_s"],
            # An emulation predicts for stages that wait, without what the runtime costs those that compute.
            predicted_per_s=summary["throughput"]["predicted_per_s"] if self.scales else predict_samples_per_s(plan),
            samples_per_update=plan.batch * (1 if splits else max(plan.replicas)),
            bytes_per_sample=self._divide_by_samples(sent, summary["minibatches"] * plan.batch // self.profile.batch),
            bubble=summary["bubble"]["measured"],
            peak_bytes=max((stage["peak_bytes"] or 0 for stage in summary["stages"]), default=0) or None,
            seconds_to_target=summary["seconds_to_target"],
            metrics=summary["metrics"],
        )

    def _choose_length(self, plan: Plan) -> None:
        """Gives the next run `seconds` after its warm-up."""
        if self.seconds is not None:
            count = count_batches(plan, self.profile.batch, self.seconds)
            self.runs.options = replace(self.runs.options, epochs=count, minibatches=count)

    def _predict_duration(self, plan: Plan) -> str:
        """Returns words for how long a run should take; '' until a first run has shown its number of minibatches."""
        count = self.runs.options.minibatches or self._minibatches
        rate = predict_samples_per_s(plan) if count and self.scales is None else 0.0
        seconds = format_seconds(count * self.profile.batch / rate) if rate else ""
        return f" {count} minibatches, about {seconds}" if count and rate else ""

    def _append_link(self, name: str) -> str:
        """Returns a variant's name with its link."""
        if self.runs.network is None or name == ONE_WORKER:
            return name
        return f"{name} over {format_link(self.cluster.bandwidth_bytes_per_s)}"

    def _report(self, variant: Variant) -> None:
        self.progress(f"{self._append_link(variant.name)}: {variant.samples_per_s:.4g} samples/s")

    def _divide_by_samples(self, sent_bytes: int | None, minibatches: int) -> float | None:
        return None if sent_bytes is None else sent_bytes / max(1, minibatches * self.profile.batch)

    def _estimate_idle_share(self, variant: Variant, *, is_replicated: bool) -> float | None:
        """Returns the share of the workers' time that is neither profiled compute nor updates."""
        profile, samples_per_s, samples = self.profile, variant.samples_per_s, variant.samples_per_update
        if not samples_per_s or not samples:
            return None
        updates = variant.workers if is_replicated else 1
        work_s = (profile.forward_s + profile.backward_s + profile.loss_s) * samples / profile.batch
        work_s += updates * profile.update_s
        return min(1.0, max(0.0, 1 - work_s * samples_per_s / (samples * variant.workers)))


def predict_samples_per_s(plan: Plan) -> float:
    """Returns the simulated throughput, of the steady part of a run if it has one."""
    return measure_steady(simulate(plan, minibatches=_count_steady_minibatches(plan))).samples_per_s


def accumulate_minibatches(plan: Plan, accumulated: int) -> Plan:
    """Returns a data-parallel plan in which each worker accumulates this many minibatches for an update."""
    count = plan.workers * accumulated
    stages = []
    for stage in plan.stages:
        forward_s, backward_s = (
            fixed_s + count * (whole_s - fixed_s)
            for whole_s, fixed_s in (
                (stage.forward_s, stage.forward_fixed_s),
                (stage.backward_s, stage.backward_fixed_s),
            )
        )
        sizes = {
            name: count * getattr(stage, name)
            for name in ("output_bytes", "activation_bytes", "working_bytes", "relief_bytes")
        }
        stages.append(replace(stage, forward_s=forward_s, backward_s=backward_s, **sizes))
    return replace(plan, schedule="1f1b", batch=count * plan.batch, microbatches=count, stages=tuple(stages))


def add_bucket_copies(plan: Plan) -> Plan:
    """Returns a plan whose updates include DDP's copies of gradients into its buckets and back."""
    stages = (replace(s, update_s=s.update_s + _BUCKET_COPY_S_PER_BYTE * s.trained_bytes) for s in plan.stages)
    return replace(plan, stages=tuple(stages))


def _identify_run(plan: Plan) -> tuple[Any, ...]:
    """Returns a key that is the same for plans that run the same."""
    stages = tuple((stage.first, stage.last, stage.replicas) for stage in plan.stages)
    return stages, plan.schedule, plan.batch, plan.microbatches, plan.in_flight, plan.worker_order, plan.choices


def count_batches(plan: Plan, batch: int, seconds: float) -> int:
    """Returns how many batches of `batch` samples a run takes whose steady part, after a warm-up, lasts this long.

    It has at least two updates, and whole periods of rare sums.
    """
    batches, period = plan.batch // batch, plan.choices.sums.period
    accumulated = max(1, batches // plan.workers)  # minibatches of a worker for an update
    update_batches = batches * (1 if plan.microbatches > 1 else max(plan.replicas))
    updates = max(2, ceil(seconds * predict_samples_per_s(plan) / batch / update_batches))
    updates = ceil(updates / period) * period
    warm_up = ceil(min(WARM_UP, updates * accumulated) / accumulated / period) * period
    return update_batches * (updates + warm_up + (period > 1))  # periods begin after a first update


def _count_steady_minibatches(plan: Plan) -> int:
    """Returns how many minibatches to run, so that most of them are between filling and draining."""
    return max(12, 4 * plan.placement.cycle * max(plan.in_flight))
