"""What the checks train: small models and their batches, a pipeline over them, and a plain loop to compare with."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.capture import capture
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.seeds import layer_seed
from pipedream.planner import manual_plan
from pipedream.schedules import STAGE_ORDERS

SEED = 3
CLASSES = 10
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


@dataclass(frozen=True)
class Scale:
    """How large the checks are.

    Attributes:
        width: of a layer.
        samples: of a minibatch whose results are compared.
        minibatches: of a run whose results are compared.
        many_minibatches: of a run whose memory must not grow.
        side: of the square matrices that are multiplied.
        copied_bytes: of a copy that is timed.
        microbatch_s: seconds of a microbatch's forward and backward at a stage, for the throughput.
        repeats: of a measurement.
    """

    width: int
    samples: int
    minibatches: int
    many_minibatches: int
    side: int
    copied_bytes: int
    microbatch_s: tuple[float, ...]
    repeats: int


FULL = Scale(512, 64, 20, 600, 8192, 1 << 30, (5e-3, 30e-3), 100)
TINY = Scale(8, 8, 4, 64, 32, 1 << 16, (1e-4, 2e-4), 3)  # for tests: shows that the code runs, not how fast

Batch = tuple[Tensor, Tensor]


def dense(width: int, layers: int = 8, dropout: float = 0.0) -> nn.Sequential:
    """Returns linear layers with tanh, the same each time; four stages can be cut from it."""
    torch.manual_seed(SEED)
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*parts, nn.Linear(width, CLASSES))


def batches_of(width: int, samples: int, count: int) -> list[Batch]:
    """Returns minibatches on the CPU, as a loader gives them."""
    generator = torch.Generator().manual_seed(SEED)
    return [
        (torch.randn(samples, width, generator=generator), torch.randint(CLASSES, (samples,), generator=generator))
        for _ in range(count)
    ]


def summed_loss(output: Tensor, batch: Any) -> tuple[Tensor, float]:
    """Returns a microbatch's (sum, weight)."""
    targets = batch[1] if isinstance(batch, (tuple, list)) else batch
    return F.cross_entropy(output.float().flatten(0, -2), targets.to(output.device).flatten(), reduction="sum"), len(
        targets
    )


def plan_of(
    model: nn.Module,
    sample: Any,
    stages: int,
    method: str = "1f1b",
    *,
    recompute: bool = False,
    workers: int = 0,
    replicas: tuple[int, ...] = (),
) -> Plan:
    """Returns a plan of stages with the same number of layers; nothing is timed.

    Args:
        sample: the model's only argument, or a mapping of all by their names.
    """
    graph = capture(model, sample if isinstance(sample, dict) else (sample,)).graph
    count = len(graph.layers)
    samples = len(next(iter(sample.values())) if isinstance(sample, dict) else sample)
    profile = Profile(type(model).__name__, graph, (LayerProfile(1.0, 2.0, 8, 8),) * count, samples)
    layout = STAGE_ORDERS.get(method)
    replicas = replicas or (1 if layout is None else layout.replicas,) * stages
    cuts = tuple(stage * count // stages for stage in range(1, stages))
    plan = manual_plan(profile, Cluster.flat(sum(replicas)), cuts, replicas)
    if layout is not None:
        workers = workers or max(1, sum(replicas) // 2)
        plan = replace(plan, worker_order=layout.order(workers, sum(replicas) // workers))
    return replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))


@dataclass
class Trained:
    """What a run left.

    Attributes:
        state: on the CPU.
        scale: of the loss, at the end.
        seconds: of a plain loop.
    """

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    skipped: int = 0
    scale: float = 1.0
    seconds: float = 0.0


def make_pipeline(model: nn.Module, plan: Plan, device: torch.device, **options: Any) -> pd.Pipeline:
    """Returns a pipeline over a copy of the model; by default with the loss and the optimizer of the plain loop."""
    options = {"loss": summed_loss, "optimizer": partial(torch.optim.SGD, **SGD), "seed": SEED} | options
    return pd.Pipeline(copy.deepcopy(model), plan, device=str(device), **options)


def copy_state(source: pd.Pipeline | nn.Module) -> dict[str, Tensor]:
    """Returns the weights, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in source.state_dict().items()}


def time_stream(pipeline: pd.Pipeline, batches: Iterable[Any], device: torch.device) -> float:
    """Returns the seconds of training from a drain to the next."""
    wait_for(device)
    began = time.perf_counter()
    for _ in pipeline.train(batches):
        pass
    wait_for(device)
    return time.perf_counter() - began


def time_streams(
    model: nn.Module, plan: Plan, batches: Sequence[Any], device: torch.device, repeats: int = 3, **options: Any
) -> list[float]:
    """Returns the seconds of training on the batches several times; first is a short stream that does not count.

    Libraries are loaded in it, and optimizers get their state. Nothing compares the first minibatch.
    """
    with make_pipeline(model, plan, device, check=False, **options) as pipeline:
        time_stream(pipeline, batches[:2], device)
        return [time_stream(pipeline, batches, device) for _ in range(repeats)]


def train(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    device: torch.device,
    *,
    on_done: Callable[[pd.Pipeline, Any], None] = lambda pipeline, done: None,
    **options: Any,
) -> Trained:
    """Trains a copy of the model through a pipeline.

    Args:
        on_done: called after each minibatch.
        options: of the pipeline.
    """
    trained = Trained()
    with make_pipeline(model, plan, device, **options) as pipeline:
        for done in pipeline.train(batches):
            trained.losses.append(done.loss)
            on_done(pipeline, done)
        trained.skipped = max(pipeline.skipped_updates())
        trained.scale = next(
            state.optimizer.loss_scale.value
            for worker in pipeline._session.workers_here.workers
            for state in worker.stage_states.values()
        )
        trained.state = copy_state(pipeline)
    return trained


def plain_loop(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    microbatches: int = 1,
    holders: int = 1,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Trained:
    """Trains a copy of the model without this library, but by its rule for seeds.

    Args:
        holders: of each stage, which take the microbatches by turns and add up their gradients by themselves.
    """
    model = copy.deepcopy(model).to(device).train()
    parameters = list(model.parameters())
    stepper = torch.optim.SGD(parameters, **SGD)
    trained, number = Trained(), [0]
    hooks = []
    for name, layer in model.named_children():
        if any(isinstance(m, nn.Dropout) or getattr(m, "dropout", 0.0) for m in layer.modules()):
            hooks.append(layer.register_forward_pre_hook(partial(_seed, name, number)))
    wait_for(device)
    began = time.perf_counter()
    for k, (x, y) in enumerate(batches):
        parts = list(zip(torch.tensor_split(x, microbatches), torch.tensor_split(y, microbatches), strict=True))
        gradients: list[list[Tensor]] = [[] for _ in range(holders)]
        losses, weight = [], 0.0
        for part, (xs, ys) in enumerate(parts):
            number[0] = k * microbatches + part
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                loss, amount = summed_loss(model(xs.to(device)), ys)
            # A loss scale is of the mean over the minibatch.
            gradient = torch.autograd.grad(loss if scaler is None else scaler.scale(loss / len(y)), parameters)
            before_it = gradients[part % holders]
            sums = [a + b for a, b in zip(before_it, gradient, strict=True)] if before_it else list(gradient)
            gradients[part % holders] = sums
            losses.append(loss.detach())
            weight += amount
        sums_by_holder = [sums for sums in gradients if sums]
        for index, parameter in enumerate(parameters):
            parameter.grad = sum((sums[index] for sums in sums_by_holder[1:]), start=sums_by_holder[0][index])
            if scaler is None:
                parameter.grad /= weight
        if scaler is None:
            stepper.step()
        else:
            before = scaler.get_scale()
            scaler.step(stepper)
            scaler.update()
            trained.skipped += scaler.get_scale() < before
            trained.scale = scaler.get_scale()
        trained.losses.append(sum(float(loss) for loss in losses) / weight)
    wait_for(device)
    trained.seconds = time.perf_counter() - began
    trained.state = copy_state(model)
    for hook in hooks:
        hook.remove()
    return trained


def _seed(name: str, number: Sequence[int], layer: nn.Module, inputs: Any) -> None:
    torch.manual_seed(layer_seed(SEED, number[0], name))


def differing_bits(trained: Trained, expected: Trained) -> int:
    """Returns how many elements of the weights are not the same."""
    assert set(trained.state) == set(expected.state)
    return sum(int((trained.state[name] != tensor).sum()) for name, tensor in expected.state.items())


def distance(trained: Trained, expected: Trained) -> float:
    """Returns the largest distance of a tensor of the weights, as a share of its norm."""
    return max(
        float((trained.state[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-30))
        for name, tensor in expected.state.items()
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Every operation gives the same bits each time, without TF32.

    cuBLAS also asks for CUBLAS_WORKSPACE_CONFIG in the environment, before its first use.
    """
    was = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = was[:2]
        torch.use_deterministic_algorithms(was[2])


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes of all tensors on the device; of the CPU, those that the garbage collector knows."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    storages = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.device.type == "cpu" and item.layout is torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def wait_for(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the seconds of one call, of many in a row after one that does not count."""
    work()
    wait_for(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return (time.perf_counter() - began) / repeats
