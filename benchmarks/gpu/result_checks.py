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

import pipedream as pd
from pipedream.core.errors import WorkerError
from pipedream.runtime.checkpoint import writer

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "oracles"))
import delayed
import reference
from findings import Finding, need_card
from loops import (
    CLASSES,
    SEED,
    SGD,
    Scale,
    Trained,
    batches_of,
    dense,
    deterministic,
    differing_bits,
    distance,
    make_pipeline,
    plain_loop,
    plan_of,
    seconds_of,
    summed_loss,
    time_stream,
    time_streams,
    train,
    wait_for,
)

STAGES, MICROBATCHES = 4, 4
LEFT_BYTES = 1 << 30
"""Of a full card: for the batch, one layer's output, and kernels that are loaded now."""

LATE_VERSIONS = {
    "pipedream": lambda stage, k: max(0, k - (STAGES - 1 - stage)),
    "pipedream_2bw": lambda stage, k: max(0, k - 1),
}
"""(stage, minibatch) -> the version of the weights that it reads, as the papers write it."""


def equality(device: torch.device, scale: Scale) -> Iterator[Finding]:
    """Four workers in one process against a plain loop, float32."""
    batches = batches_of(scale.width, scale.samples, scale.minibatches)
    x = batches[0][0]
    with deterministic():
        for name, method, dropout, recompute in (
            ("gpipe", "gpipe", 0.0, False),
            ("1f1b", "1f1b", 0.0, False),
            ("interleaved_1f1b", "interleaved_1f1b", 0.0, False),
            ("chimera", "chimera", 0.0, False),
            ("recompute", "1f1b", 0.0, True),
            ("dropout", "1f1b", 0.2, False),
            ("zb_h1", "zb_h1", 0.0, False),
        ):
            model = dense(scale.width, dropout=dropout)
            plan = plan_of(model, x, STAGES, method, recompute=recompute)
            trained = train(model, plan, batches, device, schedule=method, microbatches=MICROBATCHES)
            holders = 2 if method == "chimera" else 1
            expected = plain_loop(model, batches, device, microbatches=MICROBATCHES, holders=holders)
            if name == "zb_h1":  # the gradients of the weights come from other operations
                yield Finding("zb_h1_distance", distance(trained, expected), "<=", 1e-6)
            else:
                yield Finding(f"{name}_differing_weights", differing_bits(trained, expected), "==", 0)
        for method in ("pipedream", "pipedream_2bw", "pipemare", "spectrain"):
            parts = 1 if method in ("pipedream", "spectrain") else MICROBATCHES
            model = dense(scale.width)
            plan = plan_of(model, x, STAGES)
            trained = train(model, plan, batches, device, schedule=method, microbatches=parts)
            late = _answer_late(
                method, parts, model.to(device), [stage.names for stage in plan.stages], batches, device
            )
            yield Finding(f"{method}_distance", distance(trained, late), "<=", 1e-5)


def _answer_late(
    method: str, parts: int, model: nn.Module, stages: list[Any], batches: list[Any], device: torch.device
) -> Trained:
    """Trains by the method's rule, one minibatch after the other."""
    moved = [(x.to(device), y.to(device)) for x, y in batches]
    if method in LATE_VERSIONS:
        owned = [[name for name, _ in model.named_parameters() if name.rpartition(".")[0] in names] for names in stages]
        answer = reference.delayed(
            model,
            [],  # nothing draws random numbers
            moved,
            _sum_loss,
            partial(_make_sgd, **SGD),
            stages=owned,
            phases={0: reference.Phase(LATE_VERSIONS[method], parts)},
            seed=SEED,
        )
    else:
        paper = delayed.PAPERS[method](len(stages), parts)
        sgd = partial(delayed.Sgd, **SGD)
        answer = delayed.train(model, stages, moved, _sum_loss, paper, sgd, microbatches=parts, seed=SEED)
    return Trained(answer.losses, {name: tensor.cpu() for name, tensor in answer.state.items()})


def _sum_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return summed_loss(output, targets)


def _make_sgd(named: list[tuple[str, nn.Parameter]], **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], **options)


class Recurrent(nn.Module):
    """An LSTM with dropout that flattens its weights in every forward, as many models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        return self.head(self.lstm(x.unsqueeze(1).repeat(1, 3, 1))[0][:, -1])


def precision(device: torch.device, scale: Scale) -> Iterator[Finding]:
    """bfloat16, float16 with a loss scale, and recurrent layers with dropout."""
    batches = batches_of(scale.width, scale.samples, scale.minibatches)
    model = dense(scale.width)
    plan = plan_of(model, batches[0][0], STAGES)
    how: dict[str, Any] = {"microbatches": MICROBATCHES, "autocast": torch.bfloat16}
    trained, expected = (
        train(model, plan, batches, device, schedule="1f1b", **how),
        plain_loop(model, batches, device, **how),
    )
    yield Finding("bf16_loss_distance", _measure_distance(trained.losses, expected.losses), "<=", 2e-2)

    def scaler() -> torch.amp.GradScaler:
        # The gradient of the mean overflows at first, and again when the scale has grown.
        return torch.amp.GradScaler(device.type, init_scale=scale.samples * 2.0**17, growth_interval=3)

    how["autocast"] = torch.float16
    trained = train(model, plan, batches, device, schedule="1f1b", grad_scaler=scaler(), **how)
    expected = plain_loop(model, batches, device, scaler=scaler(), **how)
    yield Finding("fp16_skipped_updates", trained.skipped, "==", expected.skipped)
    yield Finding("fp16_last_scale", trained.scale, "==", expected.scale)

    model = nn.Sequential(nn.Linear(scale.width, scale.width), Recurrent(scale.width))
    plan = plan_of(model, batches[0][0], 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # pipedream keeps several versions of the weights.
        train(model, plan, batches, device, schedule="pipedream")
        trained = train(model, plan, batches, device, schedule="1f1b", microbatches=MICROBATCHES)
    expected = plain_loop(model, batches, device, microbatches=MICROBATCHES)
    chunks = [warning for warning in caught if "contiguous chunk" in str(warning.message)]
    yield Finding("lstm_distance", distance(trained, expected), "<=", 1e-4)
    yield Finding("lstm_contiguous_chunk_warnings", len(chunks), "==", 0)
    start = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    still = [name for name, tensor in trained.state.items() if torch.equal(tensor, start[name])]
    yield Finding("lstm_weights_that_did_not_move", len(still), "==", 0, ", ".join(still))
    need_card(device)
    # So wide that a copy of its weights in each forward would take longer than the runtime's own work.
    width = 4 * scale.width
    model = nn.Sequential(nn.Linear(width, width), Recurrent(width))
    batches = batches_of(width, scale.samples, scale.repeats)
    plan = plan_of(model, batches[0][0], 1)
    piped_s = min(time_streams(model, plan, batches, device, schedule="1f1b", microbatches=1))
    plain_s = min(plain_loop(model, batches, device).seconds for _ in range(3))
    yield Finding("lstm_seconds_by_plain", piped_s / plain_s, "<=", 1.1)


def _measure_distance(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


class WithLoss(nn.Module):
    """Computes its own loss, as the models of Hugging Face do."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers(x), targets)}


def _mean_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def waits(device: torch.device, scale: Scale) -> Iterator[Finding]:
    """How often the host waits for the device in steady training, by torch's own debugging mode.

    With a loss of the model's own the host reads a count at each microbatch, which is only reported.
    """
    layers = dense(scale.width, dropout=0.1)
    for name, method, parts, model, loss in (
        ("1f1b", "1f1b", MICROBATCHES, layers, summed_loss),
        ("pipedream", "pipedream", 1, layers, summed_loss),
        ("loss_of_user", "1f1b", MICROBATCHES, layers, _mean_loss),
        ("loss_of_model", "1f1b", MICROBATCHES, WithLoss(layers), None),
    ):
        minibatches = scale.repeats // parts + 4
        batches: list[Any] = batches_of(scale.width, scale.samples, minibatches)
        if loss is None:
            batches = [{"x": x, "targets": targets} for x, targets in batches]
        plan = plan_of(model, batches[0] if loss is None else batches[0][0], STAGES)
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

            train(model, plan, batches, device, schedule=method, microbatches=parts, loss=loss, on_done=begin)
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


def checkpoint(device: torch.device, scale: Scale) -> Iterator[Finding]:
    """Saves in the background, trains on, and continues from the checkpoint in another pipeline."""
    batches = batches_of(scale.width, scale.samples, scale.minibatches)
    model = dense(scale.width, dropout=0.2)
    plan = plan_of(model, batches[0][0], STAGES)
    devices: list[int] = []  # the current one of each write
    write = writer.write_tensors

    def noted(*args: Any, **rest: Any) -> Any:
        devices.append(torch.cuda.current_device() if device.type == "cuda" else 0)
        return write(*args, **rest)

    def pipeline() -> pd.Pipeline:
        return make_pipeline(model, plan, device, schedule="pipedream", optimizer=partial(torch.optim.AdamW, lr=1e-3))

    def state_of(trained: pd.Pipeline) -> Trained:
        return Trained(state={name: tensor.detach().cpu().clone() for name, tensor in trained.state_dict().items()})

    loader = _Listed(batches)
    added_bytes = 0
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(writer, "write_tensors", noted):
        with pipeline() as first, deterministic():
            for done in first.train(loader, epochs=2):
                if done.number == scale.minibatches // 2:
                    before_bytes = _count_card_bytes(device)
                    first.save(folder, wait=False)
                    added_bytes = _count_card_bytes(device) - before_bytes
            whole = state_of(first)
        with pipeline() as second, deterministic():
            epoch, _ = second.load(folder)
            for _ in second.train(loader, epochs=2 - epoch):
                pass
            resumed = state_of(second)
    yield Finding("differing_weights", differing_bits(resumed, whole), "==", 0)
    yield Finding("writes", len(devices), "==", 1)
    need_card(device)
    elsewhere = [index for index in devices if index != (device.index or 0)]
    yield Finding("writers_on_another_device", len(elsewhere), "==", 0, f"current devices: {devices}")
    yield Finding("live_bytes_that_a_save_adds", added_bytes, "<=", 1 << 20)


def _count_card_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class _Listed:
    """A loader with a length, which finds a position by iterating to it."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def compiled(device: torch.device, scale: Scale) -> Iterator[Finding]:
    """Compiled layers over four sets of weights."""
    batches = batches_of(scale.width, scale.samples, scale.minibatches)
    model = dense(scale.width)
    plan = plan_of(model, batches[0][0], STAGES)
    inner = torch._dynamo.lookup_backend("inductor" if device.type == "cuda" else "eager")
    graphs: list[Any] = []

    def note_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return inner(graph, inputs)

    torch._dynamo.reset()
    states, counts = [], []
    for arguments in ({"backend": note_graph}, False):
        with make_pipeline(model, plan, device, schedule="pipedream", compile=arguments) as pipeline:
            for part in (batches[:1], batches[1:]):  # the first has one set of weights
                time_stream(pipeline, part, device)
                counts.append(len(graphs))
            states.append(Trained(state={name: tensor.cpu() for name, tensor in pipeline.state_dict().items()}))
    yield Finding("compilations_before_the_first_update", counts[0], ">=", 1)
    yield Finding("recompilations", counts[1] - counts[0], "<=", 2)
    yield Finding("distance", distance(*states), "<=", 1e-3)


def full_card(device: torch.device, scale: Scale) -> Iterator[Finding]:
    """A pipeline that needs more than what is left of the card."""
    need_card(device)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    filler = torch.empty(free_bytes - LEFT_BYTES, dtype=torch.uint8, device=device)
    # The output of one layer takes half of what is left.
    samples = max(8, LEFT_BYTES // (4 * scale.width) // 2)
    model = dense(scale.width)
    batches = batches_of(scale.width, samples, 1)
    plan = plan_of(model, batches[0][0][:8], 2)
    began, caught = time.perf_counter(), ""
    try:
        train(model, plan, batches, device, schedule="pipedream")
    except WorkerError as error:
        caught = str(error)
    yield Finding("full_card_names_the_op", float("stage" in caught), "==", 1, caught[:300])
    yield Finding("full_card_seconds", time.perf_counter() - began if caught else math.inf, "<=", 15)
    del filler
    wait_for(device)
    yield Finding("full_card_seconds_of_a_sum_after", seconds_of(lambda: torch.ones(8, device=device).sum(), device, 1))
