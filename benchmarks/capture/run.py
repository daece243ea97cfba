"""What it costs to run an unmodified model in stages: per microbatch, with one stage, and to capture it."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, logging

import pipedream
from pipedream.core.units import format_bytes, format_seconds

sys.path.append(str(Path(__file__).parents[1]))
import scaffold

Batch = dict[str, torch.Tensor]
Step = Callable[[list[Batch]], None]
OPTIMIZER = partial(torch.optim.SGD, lr=1e-4)


def gpt2(blocks: int, width: int, words: int = 256, positions: int = 128) -> nn.Module:
    """Returns GPT-2 with random weights, without dropout."""
    torch.manual_seed(0)
    size = {"n_layer": blocks, "n_embd": width, "n_head": max(1, width // 64)}
    size |= {"vocab_size": words, "n_positions": positions, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def batches(count: int, samples: int, length: int, words: int = 256) -> list[Batch]:
    """Returns minibatches of random words."""
    torch.manual_seed(1)
    ids = [torch.randint(words, (samples, length)) for _ in range(count)]
    return [{"input_ids": words, "labels": words} for words in ids]


def plain(model: nn.Module, microbatches: int, forward: Callable[..., Any] | None = None) -> Step:
    """Returns the plain loop; `forward` replaces the model's."""
    optimizer = OPTIMIZER(model.parameters())
    model.train()

    def step(loader: list[Batch]) -> None:
        for batch in loader:
            parts = {name: value.chunk(microbatches) for name, value in batch.items()}
            for i in range(microbatches):
                loss = (forward or model)(**{name: values[i] for name, values in parts.items()}).loss
                (loss / microbatches).backward()
                loss.item()  # a user wants to see it, and the pipeline yields it
            optimizer.step()
            optimizer.zero_grad()

    return step


def in_slices(model: nn.Module, sample: Batch, cut: str, microbatches: int) -> Step:
    """Returns the plain loop with the model in two slices, which are called one after the other: no runtime."""
    captured = pipedream.capture(model, {name: value[:1] for name, value in sample.items()})
    names = [layer.name for layer in captured.graph.layers]
    middle = next(i for i, name in enumerate(names) if name.startswith(f"{cut}."))
    ((_, first),), ((_, second),) = captured.stage(0, middle), captured.stage(middle, len(names))
    return plain(model, microbatches, lambda **batch: second(first(batch)))


def in_pipeline(stack: ExitStack, model: nn.Module, sample: Batch, cuts: tuple[str, ...], microbatches: int) -> Step:
    """Returns training by a pipeline of these stages, all in this process."""
    profile = pipedream.profile(model, sample, runs=1, warmup=1)
    cluster = pipedream.Cluster.flat(len(cuts) + 1)
    shape: dict[str, Any] = {"cuts": cuts} if cuts else {"shape": "data-parallel"}
    plan = pipedream.plan(profile, cluster, schedule="1f1b", microbatches=microbatches, **shape)
    pipeline = stack.enter_context(pipedream.Pipeline(model, plan, loss=None, optimizer=OPTIMIZER))

    def step(loader: list[Batch]) -> None:
        for _ in pipeline.train(loader):
            pass

    return step


def seconds(steps: dict[str, Step], loader: list[Batch], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a minibatch in each round; the ways take turns, and each round starts with another one."""

    def time_minibatch(name: str) -> float:
        gc.collect()
        began = time.perf_counter()
        steps[name](loader)
        return (time.perf_counter() - began) / len(loader)

    for step in steps.values():
        step(loader[:2])
    return scaffold.collect_rounds(time_minibatch, steps, rounds)


def overhead(quick: bool) -> None:
    """Prints the milliseconds that a pipeline takes beyond the plain loop, for each microbatch and stage."""
    blocks, microbatches, rounds, count = (4, 2, 2, 2) if quick else (12, 4, 15, 8)
    loader = batches(count, microbatches, 16)
    half = blocks // 2
    alone = "2 slices, without the runtime"
    cut = {
        "2 stages, cut between blocks": (f"transformer.h.{half}",),
        "2 stages, cut inside a block": (f"transformer.h.{half}.mlp",),
        "4 stages, cut between blocks": tuple(f"transformer.h.{blocks * s // 4}" for s in (1, 2, 3)),
    }
    with ExitStack() as stack:
        steps = {"plain": plain(gpt2(blocks, 64), microbatches)}
        steps[alone] = in_slices(gpt2(blocks, 64), loader[0], f"transformer.h.{half}", microbatches)
        for name, cuts in cut.items():
            steps[name] = in_pipeline(stack, gpt2(blocks, 64), loader[0], cuts, microbatches)
        seconds_by_way = seconds(steps, loader, rounds)
    print(f"### Overhead: GPT-2, {blocks} blocks of width 64, microbatches of 1 x 16 words\n")
    print(scaffold.format_head(" | a minibatch | ms beyond the plain loop, per microbatch and stage", "lr"))
    for name, times in seconds_by_way.items():
        stages = 2 if name == alone else len(cut.get(name, ())) + 1
        more = [1e3 * (a - b) / microbatches / stages for a, b in zip(times, seconds_by_way["plain"], strict=True)]
        shown = "" if name == "plain" else scaffold.format_range(more, "{:.2f}".format)
        print(scaffold.format_row((name, format_seconds(median(times)), shown)))


def beside_plain(quick: bool) -> None:
    """Prints the time of a pipeline of one stage beside that of the plain loop."""
    blocks, width, rounds, count = (2, 64, 2, 2) if quick else (6, 192, 21, 10)
    loader = batches(count, 4, 64)
    with ExitStack() as stack:
        steps = {"plain": plain(gpt2(blocks, width), 1)}
        steps["pipeline of one stage"] = in_pipeline(stack, gpt2(blocks, width), loader[0], (), 1)
        seconds_by_way = seconds(steps, loader, rounds)
    print(f"### One stage: GPT-2, {blocks} blocks of width {width}\n")
    print(scaffold.format_head(" | a minibatch (least to most) | of plain", "lr"))
    for name, times in seconds_by_way.items():
        share = median(scaffold.compare_rounds(times, seconds_by_way["plain"]))
        print(scaffold.format_row((name, scaffold.format_range(times, format_seconds), f"{share:.1%}")))


def capture_alone(quick: bool) -> str:
    """Captures GPT-2 medium in this process, and returns a row."""
    torch.set_num_threads(1)
    blocks, width, words = (2, 64, 256) if quick else (24, 1024, 50257)
    model = gpt2(blocks, width, words, 1024)
    size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    batch = batches(1, 1, 64, words)[0]
    before = scaffold.read_memory("VmRSS")
    began = time.perf_counter()
    captured = pipedream.capture(model, batch)
    capture_s = time.perf_counter() - began
    most = scaffold.read_memory("VmHWM")
    sizes = format_bytes(most - before), f"{(most - before + size) / size:.2f}"
    return scaffold.format_row((format_bytes(size), len(captured.graph.layers), f"{capture_s:.1f} s", *sizes))


def capture_in_processes(quick: bool) -> None:
    """Prints the time and memory of captures, each in a process of its own."""
    print("### Capture and check: GPT-2 medium, 1 x 64 words\n")
    titles = "weights | layers | seconds | memory beyond the model's | model and that, of the model"
    print(scaffold.format_head(titles, "r"), flush=True)
    for _ in range(1 if quick else 3):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            print(pool.submit(capture_alone, quick).result(), flush=True)


PARTS = {"overhead": overhead, "one-stage": beside_plain, "capture": capture_in_processes}


def main() -> None:
    parser = scaffold.make_parser(__doc__, "small: that it runs, not how long it takes")
    parser.add_argument("parts", nargs="*", help="overhead, one-stage, capture; all by default")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor, where others work on it too")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.cpu_time:
        time.perf_counter = time.process_time
    environment = scaffold.Environment()
    for name in options.parts or PARTS:
        print()
        PARTS[name](options.quick)
    print("\n" + environment.describe("1 thread"))


if __name__ == "__main__":
    main()
