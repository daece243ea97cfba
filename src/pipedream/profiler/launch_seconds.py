"""The host's seconds of each layer on a GPU: launching its kernels, which may take longer than running them."""

from __future__ import annotations

from statistics import median

import torch

from pipedream.profiler.passes import Passes, Sample
from pipedream.profiler.stopwatch import Watch


def launch_seconds(passes: Passes, watch: Watch, sample: Sample, device: torch.device, runs: int) -> list[float]:
    """Returns the medians of the laps of `passes`, which take theirs with `watch`, a `HostStopwatch`.

    A stage starts autograd once, not for each layer, so that is taken off the backwards.
    """
    rows = []
    for _ in range(1 + runs):
        passes.timed_run(sample)
        rows.append(watch.laps_s())
    few = torch.ones(1, device=device, requires_grad=True)
    with torch.enable_grad():
        for _ in range(1 + runs):
            value = few.view(1)
            watch.start()
            torch.autograd.grad(value, few, few.detach())
            watch.stop()
    autograd_s = median(watch.laps_s()[1:])
    medians = [median(column) for column in zip(*rows[1:], strict=True)]
    return [max(seconds - autograd_s * (number % 2), 0.0) for number, seconds in enumerate(medians)]
