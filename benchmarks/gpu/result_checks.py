"""Checks of what comes out: results, waits, memory, checkpoints, compiled layers, a full card."""

from __future__ import annotations

import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import pipedream as pd
from pipedream.core.errors import WorkerError
from pipedream.services.checkpoint import writer
from pipedream.testing import Loop, MethodRules, Passes

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "oracles"))
import delayed
import loops
from findings import Finding, need_card

STAGES, MICROBATCHES = 4, 4
LEFT_BYTES = 1 << 30
"""Of a full card: for the batch, one layer's output, and kernels that are loaded now."""

PAPERS = delayed.PAPERS | {
    "pipedream": delayed.stash(lambda p, s: p - 1 - s),
    "pipedream_2bw": delayed.stash(lambda p, s: 1),
    "roundpipe[delay=1]": delayed.stash(lambda p, s: 1),
}
"""(stages, microbatches) -> the versions of the weights that are read, as the papers write it."""


def equality(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Four workers in one process against a plain loop, float32."""
    batches = loops.batches_of(scale.width, scale.samples, scale.minibatches)
    x = batches[0][0]
    with loops.deterministic():
        for name in (
            "gpipe", "1f1b", "interleaved_1f1b", "chimera", "recompute", "dropout", "zb_h1", "roundpipe", "host"
        ):  # fmt: skip
            method = "1f1b" if name in ("recompute", "dropout", "host") else name
            model = loops.dense(scale.width, dropout=0.2 if name == "dropout" else 0.0)
            plan = loops.plan_of(model, x, STAGES, method, recompute=name == "recompute")
            plan = plan.choosing(optimizer_state="host" if name == "host" else "device")
            trained = loops.train(model, plan, batches, device, schedule=method, microbatches=MICROBATCHES)
            holders = 2 if method == "chimera" else 1
            expected = loops.plain_loop(model, batches, device, microbatches=MICROBATCHES, holders=holders)
            # The gradients of the weights come from other operations; the updates are made on the CPU.
            if name in ("zb_h1", "roundpipe", "host"):
                yield Finding(f"{name}_distance", loops.distance(trained, expected), "<=", 1e-6)
            else:
                yield Finding(f"{name}_differing_weights", loops.differing_bits(trained, expected), "==", 0)
        for method in ("pipedream", "pipedream_2bw", "pipemare", "spectrain", "roundpipe[delay=1]"):
            parts = 1 if method in ("pipedream", "spectrain") else MICROBATCHES
            model = loops.dense(scale.width)
            plan = loops.plan_of(model, x, STAGES, method.partition("[")[0])
            trained = loops.train(model, plan, batches, device, schedule=method, microbatches=parts)
            late = _answer_late(
                method, parts, model.to(device), [stage.names for stage in plan.stages], batches, device
            )
            yield Finding(f"{method}_distance", loops.distance(trained, late), "<=", 1e-5)


def _answer_late(
    method: str, parts: int, model: nn.Module, stages: list[Any], batches: list[Any], device: torch.device
) -> loops.Trained:
    """Trains by the method's rule, one minibatch after the other."""
    moved = [(x.to(device), y.to(device)) for x, y in batches]
    reads, rounds = PAPERS[method](len(stages), parts), parts == 1
    passes = Passes(model, stages, loops.summed_loss, loops.SEED)
    answer = Loop(
        passes, moved, partial(torch.optim.SGD, **loops.SGD), {0: MethodRules(reads, parts, rounds=rounds)}
    ).run()
    return loops.Trained(list(answer.losses.values()), {name: tensor.cpu() for name, tensor in answer.state.items()})


class Recurrent(nn.Module):
    """An LSTM with dropout that flattens its weights in every forward, as many models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, loops.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        return self.head(self.lstm(x.unsqueeze(1).repeat(1, 3, 1))[0][:, -1])


def precision(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """bfloat16, float16 with a loss scale, and recurrent layers with dropout."""
    batches = loops.batches_of(scale.width, scale.samples, scale.minibatches)
    model = loops.dense(scale.width)
    plan = loops.plan_of(model, batches[0][0], STAGES)
    how: dict[str, Any] = {"microbatches": MICROBATCHES, "autocast": torch.bfloat16}
    trained = loops.train(model, plan, batches, device, schedule="1f1b", **how)
    expected = loops.plain_loop(model, batches, device, **how)
    distance = max(abs(a - b) for a, b in zip(trained.losses, expected.losses, strict=True))
    yield Finding("bf16_loss_distance", distance, "<=", 2e-2)

    def scaler() -> torch.amp.GradScaler:
        # The gradient of the mean overflows at first, and again when the scale has grown.
        return torch.amp.GradScaler(device.type, init_scale=scale.samples * 2.0**17, growth_interval=3)

    how["autocast"] = torch.float16
    trained = loops.train(model, plan, batches, device, schedule="1f1b", grad_scaler=scaler(), **how)
    expected = loops.plain_loop(model, batches, device, scaler=scaler(), **how)
    yield Finding("fp16_skipped_updates", trained.skipped, "==", expected.skipped)
    yield Finding("fp16_last_scale", trained.scale, "==", expected.scale)

    model = nn.Sequential(nn.Linear(scale.width, scale.width), Recurrent(scale.width))
    plan = loops.plan_of(model, batches[0][0], 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # pipedream keeps several versions of the weights.
        loops.train(model, plan, batches, device, schedule="pipedream")
        trained = loops.train(model, plan, batches, device, schedule="1f1b", microbatches=MICROBATCHES)
    expected = loops.plain_loop(model, batches, device, microbatches=MICROBATCHES)
    chunks = [warning for warning in caught if "contiguous chunk" in str(warning.message)]
    yield Finding("lstm_distance", loops.distance(trained, expected), "<=", 1e-4)
    yield Finding("lstm_contiguous_chunk_warnings", len(chunks), "==", 0)
    start = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    still = [name for name, tensor in trained.state.items() if torch.equal(tensor, start[name])]
    yield Finding("lstm_weights_that_did_not_move", len(still), "==", 0, ", ".join(still))


def recurrent(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Seconds of a recurrent layer, whose weights must lie in one block of a GPU's memory."""
    # So wide that a copy of its weights in each forward would take longer than the runtime's own work.
    width = 4 * scale.width
    model = nn.Sequential(nn.Linear(width, width), Recurrent(width))
    batches = loops.batches_of(width, scale.samples, scale.repeats)
    plan = loops.plan_of(model, batches[0][0], 1)
    piped_s = min(loops.time_streams(model, plan, batches, device, schedule="1f1b", microbatches=1))
    plain_s = min(loops.plain_loop(model, batches, device).seconds for _ in range(3))
    yield Finding("lstm_seconds_by_plain", piped_s / plain_s, "<=", 1.1)


class WithLoss(nn.Module):
    """Computes its own loss, as the models of Hugging Face do."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers(x), targets)}


def waits(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """How often the host waits for the device in steady training, by torch's own debugging mode.

    With a loss of the model's own the host reads a count at each microbatch, which is only reported.
    """
    layers = loops.dense(scale.width, dropout=0.1)
    for name, method, parts, model, loss in (
        ("1f1b", "1f1b", MICROBATCHES, layers, loops.summed_loss),
        ("pipedream", "pipedream", 1, layers, loops.summed_loss),
        ("loss_of_user", "1f1b", MICROBATCHES, layers, lambda output, batch: F.cross_entropy(output, batch[1])),
        ("loss_of_model", "1f1b", MICROBATCHES, WithLoss(layers), None),
    ):
        minibatches = scale.repeats // parts + 4
        batches: list[Any] = loops.batches_of(scale.width, scale.samples, minibatches)
        if loss is None:
            batches = [{"x": x, "targets": targets} for x, targets in batches]
        plan = loops.plan_of(model, batches[0] if loss is None else batches[0][0], STAGES)
        places: Counter[str] = Counter()
        with ExitStack() as watched:

            def begin(
                pipeline: pd.Pipeline,
                done: Any,
                watched: ExitStack = watched,
                places: Counter[str] = places,
                last: int = max(3, minibatches - 2 * STAGES),
            ) -> None:
                if done.number == 1:  # libraries are loaded, and optimizers have their state
                    watched.enter_context(_note_waits(device, places))
                if done.number == last:  # the end of the stream may wait
                    watched.close()

            loops.train(model, plan, batches, device, schedule=method, microbatches=parts, loss=loss, on_done=begin)
        events = {place: count for place, count in places.items() if place.startswith("event ")}
        note = "; ".join(f"{count} x {place}" for place, count in places.most_common(6))
        sign = "" if name == "loss_of_model" else "=="
        yield Finding(f"{name}_waits", places.total() - sum(events.values()), sign, 0, note)
        yield Finding(f"{name}_waits_for_one_event", sum(events.values()))
    need_card(device)  # a CPU has nothing to wait for: only that the code runs was seen


@contextmanager
def _note_waits(device: torch.device, places: Counter[str]) -> Iterator[None]:
    """Counts waits by place. torch's mode does not see waits for events and for the whole device."""

    def noted(what: str, waits: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **rest: Any) -> Any:
            caller = sys._getframe(1)
            places[f"{what} {Path(caller.f_code.co_filename).name}:{caller.f_lineno}"] += 1
            return waits(*args, **rest)

        return wait

    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for what, owner, name in (
            ("event", torch.cuda.Event, "synchronize"),
            ("stream", torch.cuda.Stream, "synchronize"),
            ("device", torch.cuda, "synchronize"),
        ):
            stack.enter_context(mock.patch.object(owner, name, noted(what, getattr(owner, name))))
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            places[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def checkpoint(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Saves in the background, trains on, and continues from the checkpoint in another pipeline."""
    batches = loops.batches_of(scale.width, scale.samples, scale.minibatches)
    model = loops.dense(scale.width, dropout=0.2)
    plan = loops.plan_of(model, batches[0][0], STAGES)
    devices: list[int] = []  # the current one of each write
    write = writer.write_tensors

    def noted(*args: Any, **rest: Any) -> Any:
        devices.append(torch.cuda.current_device() if device.type == "cuda" else 0)
        return write(*args, **rest)

    adamw = partial(torch.optim.AdamW, lr=1e-3)
    pipeline = partial(loops.make_pipeline, model, plan, device, schedule="pipedream", optimizer=adamw)
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    added_bytes = 0
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(writer, "write_tensors", noted):
        with pipeline() as first, loops.deterministic():
            for done in first.train(loader, epochs=2):
                if done.number == scale.minibatches // 2:
                    before_bytes = _count_card_bytes(device)
                    first.save(folder, wait=False)
                    added_bytes = _count_card_bytes(device) - before_bytes
            whole = loops.Trained(state=loops.copy_state(first))
        with pipeline() as second, loops.deterministic():
            epoch, _ = second.load(folder)
            for _ in second.train(loader, epochs=2 - epoch):
                pass
            resumed = loops.Trained(state=loops.copy_state(second))
    yield Finding("differing_weights", loops.differing_bits(resumed, whole), "==", 0)
    yield Finding("writes", len(devices), "==", 1)
    need_card(device)
    elsewhere = [index for index in devices if index != (device.index or 0)]
    yield Finding("writers_on_another_device", len(elsewhere), "==", 0, f"current devices: {devices}")
    yield Finding("live_bytes_that_a_save_adds", added_bytes, "<=", 1 << 20)


def _count_card_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def compiled(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Compiled layers over four sets of weights."""
    batches = loops.batches_of(scale.width, scale.samples, scale.minibatches)
    model = loops.dense(scale.width)
    plan = loops.plan_of(model, batches[0][0], STAGES)
    inner = torch._dynamo.lookup_backend("inductor" if device.type == "cuda" else "eager")
    graphs: list[Any] = []

    def note_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return inner(graph, inputs)

    torch._dynamo.reset()
    states, counts = [], []
    for arguments in ({"backend": note_graph}, False):
        with loops.make_pipeline(model, plan, device, schedule="pipedream", compile=arguments) as pipeline:
            for part in (batches[:1], batches[1:]):  # the first has one set of weights
                loops.time_stream(pipeline, part, device)
                counts.append(len(graphs))
            states.append(loops.Trained(state=loops.copy_state(pipeline)))
    yield Finding("compilations_before_the_first_update", counts[0], ">=", 1)
    yield Finding("recompilations", counts[1] - counts[0], "<=", 2)
    yield Finding("distance", loops.distance(*states), "<=", 1e-3)


def full_card(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """A pipeline that needs more than what is left of the card."""
    need_card(device)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    filler = torch.empty(free_bytes - LEFT_BYTES, dtype=torch.uint8, device=device)
    # The output of one layer takes half of what is left.
    samples = max(8, LEFT_BYTES // (4 * scale.width) // 2)
    model = loops.dense(scale.width)
    batches = loops.batches_of(scale.width, samples, 1)
    plan = loops.plan_of(model, batches[0][0][:8], 2)
    began, caught = time.perf_counter(), ""
    try:
        loops.train(model, plan, batches, device, schedule="pipedream")
    except WorkerError as error:
        caught = str(error)
    yield Finding("full_card_names_the_op", float("stage" in caught), "==", 1, caught[:300])
    yield Finding("full_card_seconds", time.perf_counter() - began if caught else math.inf, "<=", 15)
    del filler
    loops.wait_for(device)
    sum_s = loops.seconds_of(lambda: torch.ones(8, device=device).sum(), device, 1)
    yield Finding("full_card_seconds_of_a_sum_after", sum_s)
