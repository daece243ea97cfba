"""Speed-up over data parallelism on two workers, as the link becomes slower.

The link's rate is chosen by rho = seconds of an all-reduce of all gradients / seconds of compute of a microbatch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from models import MODELS
from scaffold import format_table, take_turns
from worker_processes import Workers, worker_processes

import pipedream as pd
from pipedream import Cluster, Plan, Profile
from pipedream.apps.compare.compare import predict_samples_per_s
from pipedream.apps.compare.variants import ONE_WORKER, RecipeComparison, Variant
from pipedream.apps.compare.variants_page import comparison_svg
from pipedream.core.units import format_bytes, format_link
from pipedream.plan_request import PlanRequest
from pipedream.slow_links import Network, slow_network
from pipedream.workflows.plan import plan_and_compare

_Points = Sequence[tuple[float, dict[str, dict[str, Any]]]]

M = 8
"""Microbatches of a minibatch, for the methods that split it."""

RHOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LATENCY_S = 1e-4
_LONG_S = 10.0
"""Fewer updates of DDP are timed than of its variant if they would take longer."""

WORKER = str(Path(__file__).with_name("worker.py"))


@dataclass(frozen=True)
class _Variant:
    """A row of a table.

    Attributes:
        samples: microbatches that enter an update.
        runs: 'pipeline', 'torch', 'ddp' or 'fsdp' (worker.py).
        schedule, how: for `pipedream.plan`, whose simulation is the prediction.
        steps: that are timed.
    """

    name: str
    samples: int
    runs: str
    schedule: str
    how: dict[str, Any]
    steps: int

    @property
    def is_straight(self) -> bool:
        return self.schedule not in ("interleaved_1f1b", "zbv")

    @property
    def is_exact(self) -> bool:
        return not {"sums", "messages"} & self.how.keys()

    @property
    def planned(self) -> int:
        """Microbatches of the minibatch that it is planned for."""
        return self.samples if self.samples > 2 else 1

    def plan(self, profiles: dict[int, Profile], cluster: Cluster) -> Plan:
        """Returns the plan that is run, by the profile of its microbatches."""
        how = self.how | ({"microbatches": self.planned} if self.planned > 1 else {})
        return pd.plan(profiles[self.planned], cluster, schedule=self.schedule, **how)


_STRAIGHT: dict[str, Any] = {"shape": "straight"}
_COPIES: dict[str, Any] = {"shape": "data-parallel"}
_FULL = _STRAIGHT | {"in_flight": "full"}
_HALVES, _BYTES, _HALF_BYTES = {"messages": "bfloat16"}, {"messages": "int8"}, {"messages": "int4"}
_CHUNKS: dict[str, Any] = {"chunks": 2}

VARIANTS = (
    _Variant("torch DDP", 2, "ddp", "pipedream", _COPIES, 3),
    _Variant("torch DDP, accumulating", 2 * M, "ddp", "1f1b", _COPIES, 2),
    _Variant("torch DDP, fp16", 2, "ddp", "pipedream", _COPIES | {"sums": "float16"}, 3),
    _Variant("torch DDP, fp16, accumulating", 2 * M, "ddp", "1f1b", _COPIES | {"sums": "float16"}, 2),
    _Variant("torch local SGD, every 8", 2, "ddp", "pipedream", _COPIES | {"sums": "every:8"}, 8),
    _Variant("torch local SGD, every 32", 2, "ddp", "pipedream", _COPIES | {"sums": "every:32"}, 32),
    _Variant("PowerSGD 4", 2, "pipeline", "pipedream", _COPIES | {"sums": "powersgd:4"}, 4),
    _Variant("PowerSGD 4, accumulating", 2 * M, "pipeline", "1f1b", _COPIES | {"sums": "powersgd:4"}, 2),
    _Variant("DiLoCo, every 30", 2, "pipeline", "pipedream", _COPIES | {"sums": "diloco:30"}, 30),
    _Variant("sparse sums, every 30", 2, "pipeline", "pipedream", _COPIES | {"sums": "sparse:30,0.02"}, 30),
    _Variant("torch FSDP", 2, "fsdp", "pipedream", _COPIES, 3),
    _Variant("torch FSDP, bfloat16", 2, "fsdp", "pipedream", _COPIES | {"sums": "bfloat16"}, 3),
    _Variant("data parallel", 2, "pipeline", "pipedream", _COPIES, 3),
    _Variant("data parallel, accumulating", 2 * M, "pipeline", "1f1b", _COPIES, 2),
    _Variant("PipeDream, noam", 1, "pipeline", "pipedream", _STRAIGHT, 16),
    _Variant("PipeDream, full", 1, "pipeline", "pipedream", _FULL, 16),
    _Variant("PipeDream, full, bfloat16", 1, "pipeline", "pipedream", _FULL | _HALVES, 16),
    _Variant("PipeDream, full, int8", 1, "pipeline", "pipedream", _FULL | _BYTES, 16),
    _Variant("PipeDream, full, int4", 1, "pipeline", "pipedream", _FULL | _HALF_BYTES, 16),
    _Variant("2BW, full", M, "pipeline", "pipedream_2bw", _FULL, 4),
    _Variant("2BW, full, bfloat16", M, "pipeline", "pipedream_2bw", _FULL | _HALVES, 4),
    _Variant("2BW, full, int8", M, "pipeline", "pipedream_2bw", _FULL | _BYTES, 4),
    _Variant("2BW, full, int4", M, "pipeline", "pipedream_2bw", _FULL | _HALF_BYTES, 4),
    _Variant("1F1B", M, "pipeline", "1f1b", _STRAIGHT, 4),
    _Variant("1F1B, full", M, "pipeline", "1f1b", _FULL, 4),
    _Variant("1F1B, full, bfloat16", M, "pipeline", "1f1b", _FULL | _HALVES, 4),
    _Variant("1F1B, full, int8", M, "pipeline", "1f1b", _FULL | _BYTES, 4),
    _Variant("1F1B, full, int4", M, "pipeline", "1f1b", _FULL | _HALF_BYTES, 4),
    _Variant("torch 1F1B", M, "torch", "1f1b", _STRAIGHT, 2),
    _Variant("GPipe", M, "pipeline", "gpipe", _STRAIGHT, 2),
    _Variant("torch GPipe", M, "torch", "gpipe", _STRAIGHT, 2),
    _Variant("interleaved 1F1B", M, "pipeline", "interleaved_1f1b", _CHUNKS, 2),
    _Variant("torch interleaved 1F1B", M, "torch", "interleaved_1f1b", _CHUNKS, 2),
    _Variant("zero bubble (ZB-V)", M, "pipeline", "zbv", {}, 2),
    _Variant("torch zero bubble (ZB-V)", M, "torch", "zbv", {}, 2),
)
RIVALRY = (
    *("torch DDP", "torch DDP, accumulating", "torch DDP, fp16", "torch DDP, fp16, accumulating"),
    *("torch local SGD, every 8", "PowerSGD 4", "PowerSGD 4, accumulating", "DiLoCo, every 30"),
    *(
        f"{name}, full{less}"
        for name in ("PipeDream", "2BW", "1F1B")
        for less in ("", ", bfloat16", ", int8", ", int4")
    ),
)
"""The variants of the sleeping curve."""

LINKS = tuple(bits_per_s / 8 for bits_per_s in (10e6, 25e6, 100e6, 400e6, 1e9, 4e9, 10e9))
"""Its rates, in bytes/s."""

BY_NAME = {variant.name: variant for variant in VARIANTS}
BESIDE = {variant.name: variant.name.removeprefix("torch ") for variant in VARIANTS if variant.runs == "torch"}
"""torch's schedules -> this library's."""


@dataclass(frozen=True)
class _Size:
    """How much is measured.

    Attributes:
        rounds: in each of which all variants take turns.
        patience_s: for which a run that other processes disturbed is repeated.
        choices: see `CHOICES`.
        least_s: that a row is timed for; then one worker is timed before and after each, for that long, too. 0: each
            row has its own number of steps, and one worker is a row like others.
    """

    models: tuple[str, ...]
    rhos: tuple[float, ...]
    variants: tuple[str, ...]
    rounds: int
    patience_s: float
    choices: Mapping[str, int] = field(default_factory=dict)
    least_s: float = 0.0


_SHORT = ("torch DDP", "data parallel", "PipeDream, full", "2BW, full", "1F1B, full", "torch 1F1B")
_SIZES = {
    "test": _Size(("gpt",), (1.0,), ("torch DDP", "PipeDream, full", "torch 1F1B"), 1, 0.0),
    "short": _Size(("vgg",), (0.5, 4.0), _SHORT, 1, 5.0),
    "full": _Size(tuple(MODELS), RHOS, tuple(variant.name for variant in VARIANTS), 3, 1.0),
}

CHOICES = {"planner, 1 microbatch": 1, f"planner, {M} microbatches": M, f"planner, {M}, approximate": M}
"""Rows of the planner's own choice -> microbatches of the minibatch that it plans for."""


def measure(
    size: str,
    log: Callable[[str], None],
    *,
    models: Sequence[str] = (),
    rhos: Sequence[float] = (),
    links: Sequence[float] = (),
    only: Sequence[str] = (),
    rounds: int | None = None,
    sleep: bool = False,
    with_choices: bool = True,
    least_s: float = 0.0,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Returns a row for each model, rho and variant.

    Args:
        size: 'test', 'short' or 'full'.
        models, rhos, only, rounds: others than those of the size.
        links: rates in bytes/s, in place of rhos.
        sleep: the models sleep instead of computing (`sleeping`).
        with_choices: what the planner would choose is run, too.
        least_s: of rows that are timed for so long, beside one worker.
        keep: gets the rows so far after each point.
    """
    few = replace(_SIZES[size], choices=CHOICES if with_choices else {}, least_s=least_s)
    few = few if rounds is None else replace(few, rounds=rounds)
    names = only or few.variants
    rows: list[dict[str, Any]] = []
    for model in models or few.models:
        command = WORKER, model, str(M), *(("sleep",) if sleep else ())
        with (
            slow_network((2,), (None,)) as network,
            worker_processes(network, 2, *command, computes=not sleep) as workers,
        ):
            profiles = profile_all(workers, names, few.patience_s)
            weights_s = sum(layer.parameter_bytes for layer in profiles[1].layers) / compute_s(profiles[1])
            points: list[tuple[dict[str, dict[str, Any]], dict[str, Plan]]] = []
            for rho in [weights_s / rate for rate in links] or rhos or few.rhos:
                points.append(_measure_point(network, workers, model, profiles, rho, names, few, log))
                keep([*rows, *_predict_points(points, profiles, fastest=sleep)])
            rows += _predict_points(points, profiles, fastest=sleep)
    return rows


def profile_all(workers: Workers, names: Sequence[str], patience_s: float) -> dict[int, Profile]:
    """Returns the profiles that variants and the planner's choices are planned by: microbatches -> profile."""
    request = {"do": "profile", "patience_s": patience_s}
    return {
        count: Profile.from_json(workers.ask(request | {"microbatches": count})["profile"])
        for count in sorted({1, M, *(BY_NAME[name].planned for name in names)})
    }


def _measure_point(
    network: Network,
    workers: Workers,
    model: str,
    profiles: dict[int, Profile],
    rho: float,
    names: Sequence[str],
    size: _Size,
    log: Callable[[str], None],
) -> tuple[dict[str, dict[str, Any]], dict[str, Plan]]:
    """Measures all variants at one rate of the link; returns their rows and plans."""
    profile = profiles[1]
    microbatch_s = compute_s(profile)
    bytes_per_s = sum(layer.parameter_bytes for layer in profile.layers) / (rho * microbatch_s)
    cluster = Cluster.flat(2, bytes_per_s, latency_s=LATENCY_S)
    network.limit(bytes_per_s)
    request = {"do": "messages", "bytes_per_s": bytes_per_s, "patience_s": size.patience_s}
    message_s_per_byte = workers.ask(request)["message_s_per_byte"]
    profiles = {
        count: replace(variant, runtime=replace(variant.runtime, message_s_per_byte=message_s_per_byte))
        for count, variant in profiles.items()
    }
    plans = {variant.name: variant.plan(profiles, cluster) for variant in VARIANTS if variant.name in names}
    verdicts = {}
    for name, count in size.choices.items():
        allowed = {"allow_asynchronous": True, "allow_approximate": name.endswith("approximate")}
        answer = plan_and_compare(profiles[count], PlanRequest(cluster, schedule="auto", **allowed))
        plans[name], verdicts[name] = answer.plan, answer.verdict
    as_is = dict.fromkeys(profiles, 1.0)  # cores as fast as when they were profiled
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in ("solo", *plans)}
    copies = {name: "solo" for name in size.choices if plans[name].ranks == 1}
    copies |= {
        name: same for name in size.choices for same in names if _runs_alike(plans[name], plans[same], BY_NAME[same])
    }
    turns = list(take_turns([name for name in measured if name not in copies], size.rounds))
    if size.least_s:
        turns = [turn for name in turns if name != "solo" for turn in ("solo", name)] + ["solo"]
    for name in turns:
        point_row = measured[name]
        if point_row and "why" in point_row[-1]:
            continue
        request = make_request(BY_NAME.get(name), plans.get(name)) | {"patience_s": size.patience_s}
        if request["do"] == "ddp" and not request["sums"].startswith("every"):
            update_s = 2 * request["microbatches"] * profile.batch / predict(name, plans[name], profiles, as_is)
            request["steps"] = min(request["steps"], max(1, int(_LONG_S / update_s)))
        if size.least_s:
            rate = predict(name, plans[name], profiles, as_is) if name in plans else profile.batch / microbatch_s
            samples = plans[name].replicas[0] * plans[name].batch if name in plans else profile.batch
            request["steps"] = _prolong(request["steps"], samples / rate, size.least_s)
        answer = workers.ask(request) | {"alone": len(measured["solo"])}
        point_row.append(answer)
        words = answer.get("why") or f"{answer['samples_per_s']:.1f} samples/s, others {answer['others']:.0%}"
        log(f"{model} at rho {rho:g}, round {len(point_row)}: {name}: {words}")
    for name, same in copies.items():
        measured[name] = measured[same]
    common = {"model": model, "rho": rho, "bytes_per_s": bytes_per_s}
    alone = statistics.median(run["samples_per_s"] for run in measured["solo"])
    rows = {"solo": common | {"variant": "solo", "samples_per_s": alone, "compute_s": microbatch_s}}
    rows["solo"]["parameter_bytes"] = bytes_per_s * rho * microbatch_s
    rows["solo"]["others"] = statistics.median(run["others"] for run in measured["solo"])
    for name, plan in plans.items():
        rates = sorted(run["samples_per_s"] for run in measured[name] if "why" not in run)
        row: dict[str, Any] = common | {"variant": name, "config": plan.config, "method": plan.schedule}
        row |= {"cuts": [stage.first for stage in plan.stages], "in_flight": list(plan.in_flight)}
        row |= {"message_bytes": plan.stages[0].output_bytes // plan.microbatches}
        chosen_samples = CHOICES.get(name, 0) * max(plan.replicas)
        row |= {"microbatches_per_update": BY_NAME[name].samples if name in BY_NAME else chosen_samples}
        if rates:
            row |= {"samples_per_s": statistics.median(rates), "least": rates[0], "most": rates[-1]}
            for what in ("bytes_per_sample", "others"):
                row[what] = statistics.median(run[what] for run in measured[name])
            if size.least_s:
                row |= _compare_alone(measured[name], measured["solo"])
        else:
            row["why"] = measured[name][-1]["why"]
        row |= {"same_as": copies[name]} if name in copies else {}
        row |= {"verdict": verdicts[name]} if name in verdicts else {}
        rows[name] = row
    rows["solo"]["message_s_per_byte"] = message_s_per_byte
    return rows, plans


def _prolong(steps: int, step_s: float, least_s: float) -> int:
    """Returns a multiple of `steps` that takes `least_s` or more: weights are averaged once in so many steps."""
    return steps * max(1, math.ceil(least_s / (steps * step_s)))


def _compare_alone(runs: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the rate of one worker beside the runs of a row, and by how much it changed during any of them."""
    pairs = [[alone[at]["samples_per_s"] for at in (run["alone"] - 1, run["alone"])] for run in runs]
    return {
        "alone_per_s": statistics.median(map(statistics.mean, pairs)),
        "alone_changed": max(max(pair) / min(pair) - 1 for pair in pairs),
    }


def _predict_points(
    points: Sequence[tuple[dict[str, dict[str, Any]], dict[str, Plan]]], profiles: dict[int, Profile], *, fastest: bool
) -> list[dict[str, Any]]:
    """Returns the rows with the predicted rates, for cores as fast as they were alone in the middle of all rounds.

    Args:
        fastest: the fastest round of a row counts, not the median: other processes only slow what sleeps.
    """
    speeds = find_speeds(profiles, statistics.median(rows["solo"]["samples_per_s"] for rows, _ in points))
    for rows, plans in points:
        rows["solo"] |= {"speed": speeds[1], "passes_s": compute_s(profiles[1]) / speeds[1]}
        rows["solo"]["step_s"] = profiles[1].update_s / speeds[1]
        for name, plan in plans.items():
            rows[name]["predicted_per_s"] = predict(name, plan, profiles, speeds)
            if (variant := BY_NAME.get(name)) is not None:
                rows[name] |= _take_apart(variant, plan, speeds[variant.planned])
            if fastest and "most" in rows[name]:
                rows[name]["samples_per_s"] = rows[name]["most"]
    return [row for rows, _ in points for row in rows.values()]


def _take_apart(variant: _Variant, plan: Plan, speed: float) -> dict[str, float]:
    """Returns the seconds of an update's passes, of the worker with the most, and of its optimizer."""
    minibatch_s = max((stage.forward_s + stage.backward_s) / stage.replicas for stage in plan.stages)
    step_s = max(stage.update_s for stage in plan.stages)
    return {"passes_s": minibatch_s * variant.samples / variant.planned / speed, "step_s": step_s / speed}


def find_speeds(profiles: dict[int, Profile], samples_per_s: float) -> dict[int, float]:
    """Returns how much faster than in each profile a core was when it trained so many samples, by microbatches.

    The profiles were measured in turn, and others may have used the cores during any of them.
    """
    return {
        count: (compute_s(profile) + count * profile.update_s) * samples_per_s / profile.batch
        for count, profile in profiles.items()
    }


def compute_s(profile: Profile) -> float:
    return profile.forward_s + profile.backward_s + profile.loss_s


def make_request(variant: _Variant | None, plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {"do": "solo", "steps": 4}
    text = plan.to_json()
    if variant is None:  # the planner's choice
        steps = 4 if len(plan.stages) == 1 else 16 if plan.microbatches == 1 else 2
        return {"do": "pipeline", "plan": text, "steps": steps}
    details: dict[str, dict[str, Any]] = {
        "ddp": {"microbatches": max(1, variant.samples // 2), "sums": variant.how.get("sums", "full")},
        "fsdp": {"halved": "sums" in variant.how},
        "torch": {"schedule": variant.schedule, "plan": text},
        "pipeline": {"plan": text},
    }
    return {"do": variant.runs, "steps": variant.steps} | details[variant.runs]


def _runs_alike(plan: Plan, other: Plan, variant: _Variant) -> bool:
    """Whether a row runs what the planner chose; DDP runs our data parallelism."""

    def ran(plan: Plan) -> tuple[Any, ...]:
        cuts = tuple((stage.first, stage.last, stage.replicas) for stage in plan.stages)
        if len(plan.stages) == 1:  # all methods are one
            return cuts, plan.batch, plan.microbatches > 1, plan.choices.sums
        return cuts, plan.batch, plan.schedule, plan.microbatches, plan.in_flight, plan.choices.messages

    return variant.runs in ("pipeline", "ddp") and ran(plan) == ran(other)


def predict(name: str, plan: Plan, profiles: dict[int, Profile], speeds: dict[int, float]) -> float:
    """Returns the samples per second that are predicted for a row."""
    variant = BY_NAME.get(name)
    if variant is not None and variant.runs in ("ddp", "fsdp"):
        return _predict_ddp(profiles[1], plan, variant, speeds[1])
    return _predict_rate(plan, speeds[CHOICES[name] if variant is None else variant.planned])


def _predict_ddp(profile: Profile, plan: Plan, variant: _Variant, speed: float) -> float:
    """Predicts torch's DDP and FSDP as compute, then communication.

    DDP's buckets of 25 MiB hold all gradients of these models. FSDP gathers the weights twice and scatters the
    gradients once, each half of an all-reduce; in bfloat16 it keeps what it gathered for the backward.
    """
    samples = max(1, variant.samples // 2)
    update_s = samples * compute_s(profile) + profile.update_s
    sums = 1.5 if variant.runs == "fsdp" and "sums" not in variant.how else 1.0
    return 2 * samples * profile.batch / (update_s / speed + sums * plan.costs.sync_s[0])


def _predict_rate(plan: Plan, speed: float) -> float:
    """Simulates a plan on workers that are so many times as fast as when they were profiled."""
    stages = tuple(
        replace(stage, **{name: getattr(stage, name) / speed for name in ("forward_s", "backward_s", "update_s")})
        for stage in plan.stages
    )
    return predict_samples_per_s(replace(plan, stages=stages))


_DRAWN = (
    "torch DDP", "torch DDP, accumulating", "torch DDP, fp16, accumulating", "PowerSGD 4, accumulating", "torch 1F1B",
    "PipeDream, full", "2BW, full", "1F1B, full", "1F1B, full, int8",
)  # fmt: skip


_RIVALS = (
    "torch DDP", "torch DDP, fp16, accumulating", "PowerSGD 4, accumulating", "2BW, full", "2BW, full, int8",
    "2BW, full, int4", "1F1B, full", "1F1B, full, int8", "1F1B, full, int4",
)  # fmt: skip


def pictures(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Returns a picture of each model: file name -> SVG; with the rivals that send less, where these were measured."""
    has_rivals = any(row["variant"] == "planner, 8, approximate" for row in rows)
    svg_by_name = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        variants, ran = list[Variant](), {row["variant"] for row in rows if row["model"] == model}
        for _, point in _group_points(rows, model):
            link = point["solo"]["bytes_per_s"]
            variants.append(Variant(ONE_WORKER, link, samples_per_s=point["solo"]["samples_per_s"]))
            for name in (name for name in (_RIVALS if has_rivals else _DRAWN) if name in ran):
                row = point.get(name, {})
                title = name.removeprefix("torch ") if "DDP" in name else name
                if title.endswith("accumulating") and row:
                    title += f" {row['microbatches_per_update'] // 2}"  # as in `pipedream compare`
                variants.append(Variant(title, link, samples_per_s=row.get("samples_per_s")))
        svg_by_name[f"{model}.svg"] = comparison_svg(RecipeComparison(MODELS[model].title, 2, tuple(variants)))
    return svg_by_name


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns the tables of README.md."""
    models = tuple(dict.fromkeys(row["model"] for row in rows))
    parts = [_summarise(rows)]
    for model in models:
        points = list(_group_points(rows, model))
        solo = points[0][1]["solo"]
        parts.append(
            f"### {MODELS[model].title}\n\n"
            f"{MODELS[model].samples} samples a microbatch: {solo['compute_s'] * 1e3:.0f} ms of compute on one core; "
            f"{solo['parameter_bytes'] / 1e6:.1f} MB of gradients; {_find_message_bytes(points) / 1e6:.2f} MB cross "
            "the cut of 1F1B each way."
        )
        parts.append(_format_rates(points))
        parts.append(_format_speedups(points))
        if any(name in point for _, point in points for name in BESIDE):
            parts.append(_format_beside(points))
    parts += [_format_choices(rows), _format_bytes(rows)]
    return "\n\n".join(part for part in parts if part)


def _group_points(rows: list[dict[str, Any]], model: str) -> Iterator[tuple[float, dict[str, dict[str, Any]]]]:
    """Yields rho and variant -> row."""
    for rho in sorted({row["rho"] for row in rows if row["model"] == model}):
        yield rho, {row["variant"]: row for row in rows if row["model"] == model and row["rho"] == rho}


def _find_message_bytes(points: _Points) -> int:
    names = "1F1B", "2BW, full", "PipeDream, full"
    return int(next(point[name]["message_bytes"] for _, point in points for name in names if name in point))


def _format_rates(points: _Points) -> str:
    """Samples per second of all variants, and how many of the predicted ones these are."""
    rows = []
    for name in BY_NAME:
        if any(name in point for _, point in points):
            samples = next(point[name] for _, point in points if name in point)["microbatches_per_update"]
            count = f"{samples} microbatch{'es' * (samples > 1)}"
            rows.append([name, count, *(_rate(point.get(name)) for _, point in points)])
    rows.append(["one worker", "1 microbatch", *(f"{point['solo']['samples_per_s']:.4g}" for _, point in points)])
    table = format_table("|".join(["variant", "an update takes", *_list_links(points)]), "lr", rows)
    return f"Samples per second of both workers (of the predicted ones; range over the rounds):\n\n{table}"


def _rate(row: dict[str, Any] | None) -> str:
    if row is None or "why" in row:
        return "-"
    share = row["samples_per_s"] / row["predicted_per_s"]
    return f"{row['samples_per_s']:.4g} ({share:.0%}; {row['least']:.4g} to {row['most']:.4g})"


_OVER = (
    ("PipeDream, full", "torch DDP"),
    ("PipeDream, full", "data parallel"),
    ("PipeDream, full", "torch DDP, accumulating"),
    ("2BW, full", "torch DDP, accumulating"),
    ("2BW, full", "data parallel, accumulating"),
    ("1F1B, full", "torch DDP, accumulating"),
    ("1F1B, full", "data parallel, accumulating"),
    ("1F1B", "torch 1F1B"),
    ("1F1B, full", "torch 1F1B"),
)


def _format_speedups(points: _Points) -> str:
    pairs = {f"{ours} / {theirs}": (ours, theirs) for ours, theirs in _OVER}
    table = _format_ratios("", pairs, points, ("samples_per_s", "predicted_per_s"))
    return f"Times as many samples per second, measured (predicted):\n\n{table}"


def _format_ratios(
    title: str, pairs: dict[str, tuple[str, str]], points: _Points, keys: Sequence[str] = ("samples_per_s",)
) -> str:
    """Returns the ratios of pairs of variants at each rho; those that were never measured are left out."""
    rows = []
    for name, pair in pairs.items():
        ratios = [[_divide(point, *pair, key) for key in keys] for _, point in points]
        if any(row[0] for row in ratios):
            written = (" (".join(map(_format_floor, row)) + ")" * (len(keys) - 1) for row in ratios)
            rows.append([name, *(cell if row[0] else "-" for cell, row in zip(written, ratios, strict=True))])
    return format_table("|".join([title, *(f"rho {rho:.3g}" for rho, _ in points)]), "lr", rows)


def _divide(point: dict[str, dict[str, Any]], ours: str, theirs: str = "solo", key: str = "samples_per_s") -> float:
    """Returns a figure of a variant over another's; 0 if one of both was not measured."""
    if any("samples_per_s" not in point.get(name, {}) for name in (ours, theirs)):
        return 0.0
    return float(point[ours][key] / point[theirs][key])


def _list_links(points: _Points) -> list[str]:
    return [f"rho {rho:.3g}, {format_link(point['solo']['bytes_per_s'])}" for rho, point in points]


def _format_floor(ratio: float) -> str:
    """Two digits, never rounded up."""
    return f"{math.floor(ratio * 100 + 1e-9) / 100:.2f}"


def _format_beside(points: _Points) -> str:
    """This library beside torch.distributed.pipelining, method by method."""
    pairs = {ours: (ours, theirs) for theirs, ours in BESIDE.items()}
    table = _format_ratios("method", pairs, points)
    return f"This library's samples per second over those of torch.distributed.pipelining, same stages:\n\n{table}"


_CHOSEN = {"1": "one worker", "2": "data parallelism"}


def _format_choices(rows: list[dict[str, Any]]) -> str:
    """What the planner chose, beside the best that was measured with minibatches of the same size."""
    rows_shown = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for rho, point in _group_points(rows, model):
            for name, count in CHOICES.items():
                if "samples_per_s" not in point.get(name, {}):
                    continue
                row = point[name]
                allowed = (v for v in VARIANTS if v.is_straight and (v.is_exact or name.endswith("approximate")))
                rivals = (point.get(variant.name, {}) for variant in allowed)
                sizes = (count, 2 * count)  # of an update, in microbatches; double with a replica on each worker
                ran = [r for r in rivals if "samples_per_s" in r and r["microbatches_per_update"] in sizes]
                best = max(ran, key=lambda rival: rival["samples_per_s"], default=row)
                chosen = _CHOSEN.get(row["config"]) or f"{row['method']} on {row['config']}"
                rate = row["samples_per_s"]
                share = _format_floor(rate / max(rate, best["samples_per_s"]))
                cells = MODELS[model].title, f"{rho:.3g}", count, chosen, f"{rate:.4g}", share, best["variant"]
                rows_shown.append(cells)
    titles = "model | rho | minibatch | chosen | samples/s | of the best measured | best"
    return "### The planner's choice\n\n" + format_table(titles, "lrrlrrl", rows_shown)


def _format_bytes(rows: list[dict[str, Any]]) -> str:
    """Bytes on the wire for a sample, at one rho."""
    names = ("torch DDP", "torch DDP, accumulating", "PipeDream, full", "2BW, full", "1F1B")
    rows_shown = []
    for model in dict.fromkeys(row["model"] for row in rows):
        _, point = min(_group_points(rows, model), key=lambda pair: abs(math.log(pair[0])))
        sizes = [point.get(name, {}).get("bytes_per_sample") for name in names]
        cells = ["-" if size is None else format_bytes(size) for size in sizes]
        fewer = "-" if sizes[0] is None or sizes[2] is None else f"{math.floor(1000 * (1 - sizes[2] / sizes[0])) / 10}%"
        rows_shown.append([MODELS[model].title, *cells, fewer])
    table = format_table("|".join(["model", *names, "PipeDream, fewer than DDP"]), "lr", rows_shown)
    head = "Bytes that both workers send for a sample, with the headers of packets (rho 1 or next):"
    return f"### Bytes\n\n{head}\n\n{table}"


FEWEST = 6  # rows among which a prediction chooses

PAPER = (("VGG-16", "vgg", 5.28), ("GNMT", "encoder_decoder", 2.92), ("AWD language model", "lstm", 4.25))
"""Model of the paper, ours, times as fast as data parallelism to the target (SOSP 2019, table 1)."""


def _summarise(rows: list[dict[str, Any]]) -> str:
    ran = [row for row in rows if "samples_per_s" in row and row["variant"] != "solo"]
    lines = []
    kinds = {
        "PipeDream, 2BW and 1F1B": ("PipeDream", "2BW", "1F1B"),
        "torch DDP": "torch DDP",
        "this library's data parallelism": "data parallel",
    }
    for title, beginnings in kinds.items():
        mine = [row for row in ran if row["variant"].startswith(beginnings)]
        shares = sorted(row["samples_per_s"] / row["predicted_per_s"] for row in mine)
        if shares:
            lines.append(
                f"- measured / predicted of {title}: median {statistics.median(shares):.2f}, "
                f"{_format_floor(shares[0])} to {shares[-1]:.2f}, "
                f"{sum(share >= 0.9 for share in shares)} of {len(shares)} at least 0.90"
            )
    lines += describe_choices(ran)
    for theirs, ours in BESIDE.items():
        ratios = [
            ratio
            for model in dict.fromkeys(row["model"] for row in rows)
            for _, point in _group_points(rows, model)
            if (ratio := _divide(point, ours, theirs))
        ]
        if ratios:
            middle, low, high = (_format_floor(pick(ratios)) for pick in (statistics.median, min, max))
            lines.append(f"- {ours} / {theirs}: median {middle}, {low} to {high}")
    for title, model, target in PAPER:
        points = [
            (rho, ratio)
            for rho, point in _group_points(rows, model)
            if (ratio := _divide(point, "PipeDream, full", "torch DDP"))
        ]
        if len(points) > 1:
            lines.append(
                f"- the paper's {target} of {title}: {_describe_reached(points, target)} ({MODELS[model].title})"
            )
    others = [row["others"] for row in ran]
    lines += [f"- share of the cores that other processes took: median {statistics.median(others):.1%}, at most "
              f"{max(others):.1%}"] if others else []  # fmt: skip
    return "\n".join(lines)


def describe_choices(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Says how well one would choose among the rows of a model over a link by their predictions."""
    cases: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if "predicted_per_s" in row and not row["variant"].startswith("planner"):
            cases.setdefault((row["model"], row["bytes_per_s"]), []).append(row)
    shares = [
        max(rivals, key=lambda row: row["predicted_per_s"])["samples_per_s"] / max(r["samples_per_s"] for r in rivals)
        for rivals in cases.values()
        if len(rivals) >= FEWEST
    ]
    count = sum(share >= 0.95 for share in shares)
    if not shares:
        return []
    return [
        f"- among {FEWEST} or more rows of a model over a link, the one with the best prediction has 0.95 of the best "
        f"measured rate or more in {count} of {len(shares)} cases, at least {_format_floor(min(shares))}"
    ]


def _describe_reached(points: Sequence[tuple[float, float]], target: float) -> str:
    """Says at which rho a speed-up is reached, between two measured ones."""
    for (low, less), (high, more) in pairwise(points):
        if less < target <= more:
            share = math.log(target / less) / math.log(more / less)
            return f"at rho {low * (high / low) ** share:.2g}"
    if points[-1][1] < target:
        return f"not up to rho {points[-1][0]:g}, where it is {_format_floor(points[-1][1])}"
    return f"already at rho {points[0][0]:g}"
