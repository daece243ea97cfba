"""Checks of speed and memory in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import loops
import torch
from findings import Finding, need_card
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.errors import ProfileError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.hardware.devices import GPU_LINKS, Device, device_named
from pipedream.core.schedule.timeline import WORK
from pipedream.planner import manual_plan
from pipedream.profiler.device import name_device
from pipedream.profiler.sizes import Allocations
from pipedream.services.results import recorder
from pipedream.services.roofline import measure_device

STAGES, MICROBATCHES = 4, 8


def facts(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """What the card does without this library; the bounds are shares of what the library's table says of the card."""
    table_entry = _look_up_device(device)
    is_card = device.type == "cuda"
    a, b = (torch.randn(scale.side, scale.side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = loops.seconds_of(lambda: a @ b, device, scale.repeats)
    flops_per_s = None if table_entry is None else table_entry.flops_per_s["bfloat16"] * table_entry.flop_share
    yield _bound_by_table("bf16_product_flops_per_s", 2 * scale.side**3 / product_s, flops_per_s)
    source = torch.ones(scale.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = loops.seconds_of(lambda: target.copy_(source), device, scale.repeats)
    bytes_per_s = None if table_entry is None else table_entry.bytes_per_s
    yield _bound_by_table("copy_bytes_per_s", 2 * source.nbytes / copy_s, bytes_per_s, "read and written")
    few = torch.zeros(1, device=device)
    began = time.perf_counter()
    for _ in range(20 * scale.repeats):
        few.add_(1.0)
    launch_s = (time.perf_counter() - began) / (20 * scale.repeats)
    yield Finding("launch_s", launch_s, note="of the host")
    loops.wait_for(device)
    mark = recorder.GpuTimer(device).mark if is_card else time.perf_counter
    mark()
    began = time.perf_counter()
    marks = [mark() for _ in range(20 * scale.repeats)]
    yield Finding("mark_s", (time.perf_counter() - began) / len(marks), "<=", launch_s, "of the host; a launch's")
    measured = measure_device(device, seconds=0.01 * scale.repeats)
    if table_entry is not None:
        # A model's shapes are not the best: the table's share of the peak is less than that of a large product.
        for name, rate, least in (
            ("bf16", measured.flops_per_s["bfloat16"] / table_entry.flops_per_s["bfloat16"], table_entry.flop_share),
            ("bytes", measured.bytes_per_s / table_entry.bytes_per_s, table_entry.byte_share),
        ):
            yield Finding(f"measured_share_of_peak_{name}", rate, ">=", least - 0.05, f"in the table {least:g}")
    need_card(device)
    pinned = torch.empty(scale.copied_bytes, dtype=torch.uint8, pin_memory=True)
    copy_s = loops.seconds_of(lambda: target.copy_(pinned, non_blocking=True), device, max(1, scale.repeats // 4))
    pcie_bytes_per_s = None if table_entry is None else GPU_LINKS[table_entry.name].pcie_bytes_per_s
    yield _bound_by_table("pinned_to_card_bytes_per_s", pinned.nbytes / copy_s, pcie_bytes_per_s, share=0.7)


def _look_up_device(device: torch.device) -> Device | None:
    """Returns the entry of the library's table, if it has this device."""
    try:
        return device_named(name_device(device))
    except ProfileError:
        return None


def _bound_by_table(name: str, rate: float, expected: float | None, note: str = "", share: float = 0.8) -> Finding:
    """Returns a finding that a rate is at least a share of what is expected, or without a bound if that is unknown."""
    return Finding(name, rate, note=note) if expected is None else Finding(name, rate, ">=", share * expected, note)


def host(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """The host's seconds beyond those of the plain loop, as its share, with layers of no work."""
    minibatches = max(4, scale.repeats)
    model = loops.dense(8)
    batches = loops.batches_of(8, 4 * MICROBATCHES, minibatches)
    plan = loops.plan_of(model, batches[0][0], STAGES)
    for method in ("1f1b", "pipedream"):
        parts = MICROBATCHES if method == "1f1b" else 1
        plain_s = min(loops.plain_loop(model, batches, device, microbatches=parts).seconds for _ in range(3))
        piped_s = min(loops.time_streams(model, plan, batches, device, schedule=method, microbatches=parts))
        host_s = (piped_s - plain_s) / (minibatches * parts * STAGES)
        note = f"{host_s * 1e6:.0f} us of each microbatch and stage"
        yield Finding(f"{method}_host_by_plain", (piped_s - plain_s) / plain_s, "<=", 2.0, note)


class Blocks(nn.Sequential):
    """Equal large layers, two for each stage."""

    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(2 * STAGES)))


def _mean_square(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    return output.float().square().mean(1).sum(), len(output)


def throughput(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Samples per second of four workers on one device, which computes all the time, by those of the plain loop."""
    width = 8 * scale.width
    torch.manual_seed(0)
    model = Blocks(width)
    plan = loops.plan_of(model, torch.randn(1, width), STAGES)
    model.to(device)
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    for wanted_s, bound in zip(scale.microbatch_s, (0.97, 0.99), strict=False):
        stage = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))).to(device)

        def microbatch_s(rows: int, stage: nn.Module = stage) -> float:
            x = torch.randn(rows, width, device=device, requires_grad=True)
            return loops.seconds_of(lambda: stage(x).sum().backward(), device, 3)

        rows = 256 if device.type == "cuda" else 4
        while microbatch_s(rows) < wanted_s:
            rows *= 2
        rows = max(4, int(rows * wanted_s / microbatch_s(rows)))
        minibatches = max(6, int(1.5 / (wanted_s * STAGES * MICROBATCHES)) if device.type == "cuda" else 2)
        x = torch.randn(rows * MICROBATCHES, width, device=device)
        batches = [x] * minibatches
        plain, piped = [], []
        with loops.make_pipeline(
            model, plan, device, schedule="1f1b", microbatches=MICROBATCHES,
            loss=_mean_square, optimizer=optimizer, check=False,
        ) as pipeline:  # fmt: skip
            loops.time_stream(pipeline, batches[:2], device)  # libraries are loaded
            for _ in range(3):
                plain.append(_time_plain(model, batches, device, torch.optim.SGD(model.parameters(), lr=1e-3)))
                piped.append(loops.time_stream(pipeline, batches, device))
        name = f"rate_by_plain_at_{wanted_s * 1e3:g}_ms"
        yield Finding(name, median(plain) / median(piped), ">=", bound, f"{rows} samples a microbatch")


def _time_plain(
    model: nn.Module,
    batches: list[torch.Tensor],
    device: torch.device,
    stepper: torch.optim.Optimizer,
    autocast: torch.dtype | None = None,
) -> float:
    loops.wait_for(device)
    began = time.perf_counter()
    for x in batches:
        for part in x.chunk(MICROBATCHES):
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                loss, _ = _mean_square(model(part), None)
            loss.backward()
        torch._foreach_div_([p.grad for p in model.parameters()], float(len(x)))
        stepper.step()
        stepper.zero_grad()
    loops.wait_for(device)
    return time.perf_counter() - began


def store(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Weights and optimizer in the memory of the machine: RoundPipe with one worker, beside the plain loop."""
    width, rows = 16 * scale.width, 4 * scale.width
    x = torch.randn(rows * MICROBATCHES, width).pin_memory() if device.type == "cuda" else torch.randn(16, width)
    torch.manual_seed(0)
    model = Blocks(width)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    seconds, peak_bytes = {}, {}
    for method in ("roundpipe", "roundpipe[delay=1]"):
        plan = loops.plan_of(model, torch.randn(1, width), 2 * STAGES, "roundpipe", workers=1)
        with loops.make_pipeline(
            model, plan, device, schedule=method, microbatches=MICROBATCHES, loss=_mean_square, optimizer=optimizer,
            autocast=torch.bfloat16, check=False,
        ) as pipeline:  # fmt: skip
            loops.time_stream(pipeline, [x] * 2, device)
            seconds[method] = loops.time_stream(pipeline, [x] * 8, device) / 8
            peak_bytes[method] = _measure_peak(device)
    model.to(device)
    stepper = optimizer(model.parameters())
    for _ in range(2):
        seconds["plain"] = _time_plain(model, [x.to(device)] * 8, device, stepper, torch.bfloat16) / 8
    peak_bytes["plain"] = _measure_peak(device)
    for method in ("roundpipe", "roundpipe[delay=1]"):
        note = ", ".join(f"{name} {s * 1e3:.0f} ms, {peak_bytes[name] >> 20} MiB" for name, s in seconds.items())
        yield Finding(f"{method}_rate_by_plain", seconds["plain"] / seconds[method], note=note)
    need_card(device)
    yield Finding("roundpipe_peak_by_plain", peak_bytes["roundpipe"] / peak_bytes["plain"], "<=", 0.5)


def _measure_peak(device: torch.device) -> int:
    """Returns the most bytes allocated since the last call, and gives back what is free."""
    if device.type != "cuda":
        return 0
    most_bytes = torch.cuda.max_memory_allocated(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return most_bytes


def memory(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """What a long run leaves, and what the plan said."""
    model = loops.dense(scale.width, dropout=0.1)
    count = scale.many_minibatches
    few = loops.batches_of(scale.width, scale.samples, 4)
    plan = loops.plan_of(model, few[0][0], STAGES)
    for method, parts in (("1f1b", MICROBATCHES), ("pipedream", 1)):
        live_bytes: list[int] = []
        with loops.make_pipeline(
            loops.dense(scale.width, dropout=0.1), plan, device, schedule=method, microbatches=parts, check=False
        ) as pipeline:
            for minibatches in (count // 4, count - count // 4):
                loops.time_stream(pipeline, [few[k % len(few)] for k in range(minibatches)], device)
                live_bytes.append(loops.allocated_bytes(device))
        yield Finding(f"{method}_growth_bytes", live_bytes[1] - live_bytes[0], "==", 0, f"{count} minibatches")
    if device.type == "cuda":
        most_bytes = torch.cuda.max_memory_allocated(device)
        spare_bytes = torch.cuda.memory_reserved(device) - most_bytes
        yield Finding("reserved_less_allocated_bytes", spare_bytes, "<=", 64 << 20, f"at most {most_bytes} allocated")
    yield from _plan_peak(device, scale)


def _plan_peak(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """The peak of one stage with all of the model, as one process cannot tell several stages apart."""
    samples = 8 * scale.samples
    model = loops.dense(scale.width)
    batches = loops.batches_of(scale.width, samples, 4)
    targets = batches[0][1].to(device)
    profile = pd.profile(
        model,
        batches[0][0],
        loss=lambda output: F.cross_entropy(output, targets),
        optimizer=partial(torch.optim.SGD, **loops.SGD),
        device=str(device),
        warmup=1,
        runs=2,
    )
    plan = manual_plan(profile, Cluster.flat(1), ())
    with Allocations(device) as watch:
        loops.train(model, plan, batches, device, schedule="pipedream", loss=F.cross_entropy, check=False)
    live = max(section.peak_bytes for section in watch.sections)
    note = f"planned {plan.stages[0].peak_bytes}, measured {live}"
    yield Finding("peak_by_plan", abs(live / plan.stages[0].peak_bytes - 1), "<=", 0.10, note)


def clock(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Measured spans against torch's profiler, and profiles against the time of the whole model."""
    for name, model, x in (
        ("large", loops.dense(8 * scale.width), torch.randn(64 * scale.samples, 8 * scale.width)),
        ("200_small", loops.dense(scale.width, layers=100), torch.randn(scale.samples, scale.width)),
    ):
        model, x = model.to(device), x.to(device)
        profile = pd.profile(model, x, device=str(device), warmup=2, runs=max(3, scale.repeats // 10))
        stage = manual_plan(profile, Cluster.flat(1), ()).stages[0]

        def whole(model: nn.Module = model, x: torch.Tensor = x) -> None:
            output = model(x)
            torch.autograd.grad(output, list(model.parameters()), torch.ones_like(output))

        whole_s = min(loops.seconds_of(whole, device, max(2, scale.repeats // 10)) for _ in range(3))
        kernels_s = stage.forward_s + stage.backward_s
        share = abs(max(kernels_s, stage.launch_s) / whole_s - 1)
        note = f"kernels {kernels_s:.6f} s, launches {stage.launch_s:.6f} s, measured {whole_s:.6f} s"
        yield Finding(f"{name}_profile_by_whole_model", share, "<=", 0.10, note)
    need_card(device)
    yield _measure_drift(scale)
    yield _record_spans(device, scale)


def _record_spans(device: torch.device, scale: loops.Scale) -> Finding:
    """The spans of a stream, which begins and ends with an idle card, against the kernels that ran meanwhile."""
    x = torch.randn(64 * scale.samples, 8 * scale.width, device=device)
    model = Blocks(8 * scale.width)
    with loops.make_pipeline(
        model,
        loops.plan_of(model, x[:1].cpu(), STAGES),
        device,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        loss=_mean_square,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        check=False,
    ) as pipeline:
        loops.time_stream(pipeline, [x] * 2, device)  # libraries are loaded
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watch:
            loops.time_stream(pipeline, [x] * 10, device)
        spans = [span for span in pipeline.timeline().spans if span.kind in WORK]
    # Of each rank the later ones: the first two minibatches came before the profiler.
    first = {kind: 3 if kind == "U" else 2 * MICROBATCHES for kind in WORK}  # updates count from 1
    spans_s = sum(span.end_s - span.start_s for span in spans if span.index >= first[span.kind])
    kernels_s = sum(row.self_device_time_total for row in watch.key_averages()) * 1e-6
    note = f"spans {spans_s:.6f} s, kernels {kernels_s:.6f} s"
    return Finding("spans_by_kernels", abs(spans_s / kernels_s - 1), "<=", 0.02, note)


def _measure_drift(scale: loops.Scale) -> Finding:
    """Marks whose origin moves on as often as within a day, against the two events at the ends."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with mock.patch.object(recorder, "_ORIGIN_S", 1e-4):
        timer = recorder.GpuTimer(torch.device("cuda", torch.cuda.current_device()))
        timer.mark()
        first.record()
        moments = [timer.mark()]
        for _ in range(100 * scale.repeats):  # a day has 8,640 origins
            torch.cuda._sleep(200_000)
            moments.append(timer.mark())
        last.record()
        timer.settle(wait=True)
    last.synchronize()
    seconds = first.elapsed_time(last) * 1e-3
    off = abs(moments[-1].seconds - moments[0].seconds - seconds)
    return Finding("drift_of_a_days_origins_s", off, "<=", 1e-3, f"in {seconds:.3f} s")
