"""What each of Tofu's methods finds for a model, as rnn_partition.py and wide_resnet.py print it. This is no recipe."""

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipedream
from pipedream.extensions.meshes.layouts import METHODS, Exchanges, Partition

FLOAT_BYTES = 4


def options(**sizes: int) -> argparse.Namespace:
    """Reads ranks, methods and a model's sizes from the command line; the sizes given here are the default."""
    parser = argparse.ArgumentParser()
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    return parser.parse_args()


def show(model: nn.Module, sample: Tensor, choices: argparse.Namespace) -> None:
    """Prints a row for each method, and how the first one cuts the weights.

    The model gives classes; SGD with momentum trains it.
    """
    labels = torch.zeros(len(sample), dtype=torch.long, device=sample.device)
    loss, momentum = partial(F.cross_entropy, target=labels), partial(torch.optim.SGD, momentum=0.9)
    began = time.perf_counter()
    step = pipedream.operators(model, sample, loss=loss, optimizer=momentum)
    traced_s, elements = time.perf_counter() - began, sum(map(prod, step.tensors.values()))
    print(f"{len(step.steps)} operators, {FLOAT_BYTES * elements:,} bytes of tensors, traced in {traced_s:.1f} s\n")
    print("| ranks | method | elements moved | bytes sent | bytes of tensors on a rank | search |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    first: list[Partition] = []
    for ranks in choices.ranks:
        for method in choices.methods:
            began = time.perf_counter()
            try:
                partition = pipedream.partition(step, ranks, method, batch="x0")
            except pipedream.errors.PlanError:
                print(f"| {ranks} | {method} | too large to search | | | |")
                continue
            search_s, sent = time.perf_counter() - began, Exchanges(step, partition)
            stored = max(sum(prod(map(len, boxes[rank])) for boxes in sent.stored.values()) for rank in sent.ranks)
            moved, sent_bytes = partition.elements, FLOAT_BYTES * sent.elements
            cells = f"{moved:,} | {sent_bytes:,} | {FLOAT_BYTES * stored:,} | {search_s:.1f} s"
            print(f"| {ranks} | {method} | {cells} |", flush=True)
            first += [partition] if method == choices.methods[0] else []
    for partition in first:
        print(f"\n{partition.method}, {partition.ranks} ranks: the dimension of each weight that the cuts divide")
        for (name, dims), count in Counter(_list_weight_cuts(model, partition)).items():
            print(f"  {', '.join(dims):8} {name}{f', {count} times' if count > 1 else ''}")


def _list_weight_cuts(model: nn.Module, partition: Partition) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            schemes = [cut.schemes[f"p_{name}".replace(".", "_")] for cut in partition.cuts]
            yield re.sub(r"\b\d+\b", "*", name), tuple("-" if dim is None else str(dim) for dim in schemes)
