"""In one process: this library against the plain loop, in slices of a few minibatches that take turns.

Prints one JSON object: for each slice (plain, by hand, ours), each (seconds, seconds of CPU) per minibatch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from stages import ComputingLayer, loss, optimizer
from torch import Tensor, nn

import pipedream as pd


def main(request: dict[str, Any]) -> None:
    """Runs what was asked: keys `model` ('tiny': two layers, or (rows, width, products) of one), `stages`,
    `schedule`, `slices`, `slice` (minibatches)."""
    torch.set_num_threads(1)
    make_model = partial(_make_model, request["model"])
    rows, width = (8, 8) if request["model"] == "tiny" else request["model"][:2]
    batch = torch.randn(rows, width), torch.zeros(rows, width)
    plan = pd.Plan.uniform(request["stages"])
    plain, by_hand = _make_plain_loop(make_model(), batch), _make_stages_by_hand(make_model(), batch)
    how: dict[str, Any] = {"microbatches": 1, "loss": loss, "optimizer": optimizer, "sample": batch[0]}
    with pd.Pipeline(make_model(), plan, schedule=request["schedule"], **how) as pipeline:
        count, slices = request["slice"], []
        # One stream, which rests while the others run.
        ours = pipeline.train([batch] * (request["slices"] + 2) * count)
        streams = plain, by_hand, ours
        for number in range(request["slices"] + 1):
            times = {}
            # Each slice begins with another one: what disturbs the machine disturbs all.
            for stream in streams[number % 3 :] + streams[: number % 3]:
                start, cpu_start = time.perf_counter(), time.thread_time()
                for _ in islice(stream, count):
                    pass
                times[stream] = (time.perf_counter() - start) / count, (time.thread_time() - cpu_start) / count
            slices.append([times[stream] for stream in streams])
        ours.close()
    print(json.dumps(slices[1:]), flush=True)  # the first slice warms up


def _make_model(which: Any) -> nn.Sequential:
    torch.manual_seed(0)
    if which == "tiny":
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    _, width, products = which
    return nn.Sequential(ComputingLayer(width, products))


def _make_plain_loop(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Iterator[float]:
    update = optimizer(model.parameters())
    inputs, targets = batch
    while True:
        update.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        update.step()
        yield value.item()


def _make_stages_by_hand(model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> Iterator[float]:
    """Each layer with a graph and an optimizer of its own, as separate stages have them."""
    layers = list(model)
    updates = [optimizer(layer.parameters()) for layer in layers]
    inputs, targets = batch
    while True:
        tensors, x = [], inputs
        for update, layer in zip(updates, layers, strict=True):
            update.zero_grad()
            x = x.detach().requires_grad_(layer is not layers[0])
            tensors.append(x)
            x = layer(x)
            tensors.append(x)
        value = loss(x, targets)
        value.backward()
        updates[-1].step()
        for number in reversed(range(len(layers) - 1)):
            tensors[2 * number + 1].backward(tensors[2 * number + 2].grad)
            updates[number].step()
        yield value.item()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
