"""What torch itself offers for a recipe: a plain loop, DistributedDataParallel, Schedule1F1B.

They train as the pipeline does: the same data in the same order, loss, optimizer and evaluation.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from pipedream.core.cold import WARM_UP, count_warm_up
from pipedream.core.errors import RecipeError
from pipedream.runtime.comm.values import to_device
from pipedream.runtime.data.reader import EpochRange, IterableReader, LoaderReader
from pipedream.runtime.data.rng import DataOrder, preserved_rng
from pipedream.runtime.data.sharded_reader import ShardedLoader, ShardedReader, can_be_sharded
from pipedream.runtime.data.splitter import BatchAdapter, count_samples, split_batch
from pipedream.runtime.results.losses import Loss, is_torch_loss, metric_scores
from pipedream.runtime.results.memory import MemoryMeter, keep_freed_memory, tensor_bytes
from pipedream.runtime.results.results import Score
from pipedream.runtime.stage.auxiliary import auxiliary_loss_scale
from pipedream.runtime.stage.stage_module import restoring_modes

_TIMED_TURNS, _TURNS_S = 15, 2.0  # at most, of updates without messages and with
_MAX_MESSAGE_BYTES, _LINK_SHARE = 2e6, 0.4  # a message fills this share of what the link carries during an update
_MIN_SUM_S, _MAX_SUM_BYTES = 0.02, 8_000_000  # latency counts for little in what takes longer

Part = tuple[Any, Any, int]
"""Inputs, targets and number of samples of a microbatch."""


@dataclass
class Task:
    """A recipe on one of several workers, which all make it.

    Attributes:
        parts: microbatches that a minibatch is split into.

    Raises:
        RecipeError: only pipelines can train it; raised on all ranks.
    """

    recipe: Any
    rank: int
    workers: int
    device: torch.device
    parts: int = 1

    def __post_init__(self) -> None:
        recipe = self.recipe
        if refused := [name for name in ("grad_scaler", "ema") if getattr(recipe, name) is not None]:
            raise RecipeError(f"the recipe has {' and '.join(refused)}, which this comparison runs in pipelines only")
        self.loss = Loss(recipe.loss, recipe.weight)
        self.meter = MemoryMeter(self.device)
        self._adapter = BatchAdapter(recipe.inputs, recipe.targets, is_torch_loss(recipe.loss), recipe.loss is None)

    def read(self, batch: Any) -> tuple[Any, Any]:
        """Returns inputs and targets on the device."""
        inputs, targets = self._adapter(batch)
        return to_device(inputs, self.device), to_device(targets, self.device)

    def split(self, batch: Any) -> list[Part]:
        """Returns the microbatches that have samples."""
        inputs, targets = self.read(batch)
        dim = self.recipe.batch_dim
        samples = count_samples(inputs, dim)
        values = [split_batch(value, samples, self.parts, dim) for value in (inputs, targets)]
        sizes = [samples // self.parts + (part < samples % self.parts) for part in range(self.parts)]
        return [part for part in zip(*values, sizes, strict=True) if part[2]]

    def forward(self, module: nn.Module, inputs: Any) -> Any:
        """Returns the module's output, in the recipe's precision."""
        with self.autocast():
            if isinstance(inputs, Mapping):
                return module(**inputs)
            return module(*inputs) if isinstance(inputs, tuple) else module(inputs)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context for forwards in the recipe's precision."""
        dtype = self.recipe.autocast
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def accumulate(self, module: nn.Module, parts: Sequence[Part], samples: float) -> None:
        """Adds the gradients of microbatches, each weighed by its share of the samples."""
        for inputs, targets, size in parts:
            loss = self.loss.value(self.forward(module, inputs), targets)
            self.meter.sample(is_forward=True)
            with auxiliary_loss_scale(size / samples):
                torch.autograd.backward(loss * (size / samples) if size != samples else loss)
            self.meter.sample(is_forward=False)

    def read_epoch(self, epoch: int, order: DataOrder) -> Iterator[Any]:
        """Yields all training batches of an epoch."""
        yield from _read_batches(self.recipe.train, order, epoch)


@dataclass
class Baseline:
    """One way to train a recipe.

    Attributes:
        module: what this worker trains.
        named_parameters: of its optimizer.
        backward: computes the gradients of an update from this worker's batch; returns the samples of all workers.
        output: returns the model's output at an evaluation, on the ranks that score; None elsewhere.
        read_epoch: yields the batch that this worker reads for each update of an epoch.
        minibatches: of all workers together, for each one that a worker accumulates.
        accumulated: minibatches that a worker accumulates for an update; above 1 `read_epoch` yields lists of them.
        period: updates from one average of the weights to the next; the first update ends with one.
        buffer_bytes: what it keeps besides module and optimizer.
        wrap_optimizer: returns what steps in place of the recipe's optimizer.
    """

    task: Task
    module: nn.Module
    named_parameters: list[tuple[str, nn.Parameter]]
    backward: Callable[[Any], int]
    output: Callable[[Any], Any]
    read_epoch: Callable[[int, DataOrder], Iterator[Any]]
    minibatches: int = 1
    accumulated: int = 1
    period: int = 1
    buffer_bytes: int = 0
    wrap_optimizer: Callable[[Any], Any] | None = None
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        recipe = self.task.recipe
        self.optimizer = recipe.optimizer(self.named_parameters)
        self._scheduler = None if recipe.scheduler is None else recipe.scheduler(self.optimizer)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise RecipeError("the recipe's ReduceLROnPlateau follows evaluations, which is done in pipelines only")
        if self.wrap_optimizer is not None:
            self.optimizer = self.wrap_optimizer(self.optimizer)

    def train(self, epochs: int, minibatches: int | None) -> dict[str, Any]:
        """Returns the figures of a run summary; the throughput is the median over epochs, as in `TrainingLoop`.

        An epoch's throughput leaves out the warm-up, its first update and a last one of fewer minibatches, if there are
        others, and covers whole periods. One that accumulates makes at least two updates, one that averages rarely at
        least a period after the first.
        """
        keep_freed_memory()
        if minibatches is not None and max(self.accumulated, self.period) > 1:
            minibatches = max(minibatches, (1 + self.period) * self.minibatches * self.accumulated)
        warm_up = count_warm_up(None if minibatches is None else minibatches // self.minibatches) // self.accumulated
        warm_up -= warm_up % self.period
        recipe, order = self.task.recipe, DataOrder()
        start, done, rates, epoch_rates = time.perf_counter(), 0, [], []
        metrics: dict[str, float] = {}
        evaluations: list[dict[str, Any]] = []
        target_s, most_samples, updates = None, 0, 0
        for epoch in range(epochs):
            period_ends: list[tuple[float, int]] = []
            samples, epoch_start = 0, time.perf_counter()
            for batch in self.read_epoch(epoch, order):
                size = self.step(batch)
                if self._scheduler is not None:
                    self._scheduler.step()
                samples, most_samples = samples + size, max(most_samples, size)
                done += self.minibatches * (len(batch) if self.accumulated > 1 else 1)
                now_s = time.perf_counter()
                is_whole = updates % self.period == 0 and (self.accumulated == 1 or len(batch) == self.accumulated)
                if updates + 1 >= warm_up and is_whole:
                    period_ends[1:] = [(now_s, samples)]  # the first and the last
                updates += 1
                if minibatches is not None and done >= minibatches:
                    break
            if not samples:
                raise RecipeError(f"an epoch has fewer minibatches than an update of {self.task.workers} workers takes")
            epoch_rates.append(samples / max(now_s - epoch_start, 1e-9))
            if len(period_ends) > 1:
                (begin_s, begin_samples), (end_s, end_samples) = period_ends
                rates.append((end_samples - begin_samples) / max(end_s - begin_s, 1e-9))
            seconds = now_s - start
            if recipe.test is not None:
                metrics = self._evaluate()
                evaluations.append({"epoch": epoch, "minibatches": done, "seconds": seconds, **metrics})
            if recipe.target is not None and target_s is None and recipe.target[0] in metrics:
                name, value = recipe.target
                reached = metrics[name] <= value if name == "loss" else metrics[name] >= value
                target_s = seconds if reached else None
            if minibatches is not None and done >= minibatches:
                break
        return {
            "minibatches": done,
            "samples_per_s": median(rates or epoch_rates),
            "samples_per_update": most_samples,
            "peak_bytes": self._measure_peak(),
            "seconds_to_target": target_s,
            "metrics": metrics,
            "evaluations": evaluations,
        }

    def step(self, batch: Any) -> int:
        """Makes an update from this worker's batch, without a step of the scheduler; returns `backward`'s samples."""
        self.module.train()
        self.optimizer.zero_grad()
        samples = self.backward(batch)
        if (norm := self.task.recipe.clip_grad_norm) is not None:
            nn.utils.clip_grad_norm_([parameter for _, parameter in self.named_parameters], norm)
        self.optimizer.step()
        return samples

    def _measure_peak(self) -> int | None:
        """Returns the bytes of the fullest worker, if they are known."""
        rise = self.task.meter.measure_peak().rise_bytes
        peak_bytes = 0 if rise is None else rise + tensor_bytes(self.module, self.optimizer) + self.buffer_bytes
        peak = torch.tensor([peak_bytes], device=self.task.device)
        if self.task.workers > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak) or None

    def _evaluate(self) -> dict[str, float]:
        """Returns the means over the test data, equal on all ranks."""
        task, recipe = self.task, self.task.recipe
        self.module.eval()
        names = ["loss", *recipe.metrics]
        sums = torch.zeros(2 * len(names), dtype=torch.float64)
        with torch.no_grad(), preserved_rng(recipe.test):
            for batch in recipe.test:
                inputs, targets = task.read(batch)
                samples = count_samples(inputs, recipe.batch_dim)
                output = self.output(inputs)
                if output is None:
                    continue
                value, weight, is_sum = task.loss(output, targets, samples, 1.0)
                scores: list[Score] = [(value, 1.0 if is_sum else weight), (weight, 1.0)]
                scores += metric_scores(recipe.metrics, output, targets, samples)
                sums += torch.tensor([float(number) * factor for number, factor in scores], dtype=torch.float64)
        if task.workers > 1:
            sums = sums.to(task.device)
            dist.all_reduce(sums)
        return {name: float(sums[2 * i] / sums[2 * i + 1]) for i, name in enumerate(names)}


def plain_loop(task: Task) -> Baseline:
    """Returns one worker with one update a minibatch."""
    module = task.recipe.model.to(task.device)

    def backward(batch: Any) -> int:
        parts = task.split(batch)
        samples = sum(size for *_, size in parts)
        task.accumulate(module, parts, samples)
        return samples

    parameters = list(module.named_parameters())
    return Baseline(task, module, parameters, backward, lambda inputs: task.forward(module, inputs), task.read_epoch)


def data_parallel(task: Task, accumulated: int = 1, sums: str = "full") -> Baseline:
    """Returns torch's DDP with its default settings, or with its own ways to send less.

    With one part per minibatch each worker takes its own minibatches for an update, as with a DistributedSampler.
    Otherwise the workers share the parts of one minibatch. Either way they sum the gradients once.

    Args:
        accumulated: minibatches that each worker takes for an update; at the end of an epoch fewer.
        sums: 'full', 'float16' (`fp16_compress_hook`) or 'every:H' (`PostLocalSGDOptimizer`).
    """
    rank, workers = task.rank, task.workers
    if task.parts % workers and task.parts > 1:
        raise RecipeError(f"{task.parts} microbatches cannot be shared equally by {workers} workers")
    model = task.recipe.model.to(task.device)
    _check_all_used(task, model)
    module, period = DistributedDataParallel(model), 0
    if sums == "float16":
        module.register_comm_hook(None, fp16_compress_hook)
    elif sums.startswith("every:"):
        period = int(sums.partition(":")[2])
        state = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
        module.register_comm_hook(state, post_localSGD_hook)

    def wrap_averaging(optimizer: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # which this import calls
            from torch.distributed.optim import PostLocalSGDOptimizer
        return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period))

    def sum_once(parts: Sequence[Part], samples: int) -> int:
        with module.no_sync():
            task.accumulate(module, parts[:-1], samples / workers)  # DDP takes the mean over the workers
        task.accumulate(module, parts[-1:], samples / workers)
        return samples

    def backward_of_minibatches_each(batch: Any) -> int:
        batches = batch if accumulated > 1 else [batch]
        parts = [part for minibatch in batches for part in task.split(minibatch)]
        return sum_once(parts, workers * sum(size for *_, size in parts))

    def backward_of_shared_minibatch(batch: Any) -> int:
        parts = task.split(batch)
        return sum_once(parts[rank::workers], sum(size for *_, size in parts))

    def read_minibatches_each(epoch: int, order: DataOrder) -> Iterator[Any]:
        batches = _read_every_nth(task, epoch, order)
        if accumulated == 1:
            yield from batches
        while accumulated > 1 and (group := list(islice(batches, accumulated))):
            yield group

    evaluations = count()
    named = list(model.named_parameters())
    return Baseline(
        task,
        module,
        named,
        backward_of_shared_minibatch if task.parts > 1 else backward_of_minibatches_each,
        # The workers take turns in evaluating.
        lambda inputs: task.forward(model, inputs) if next(evaluations) % workers == rank else None,
        task.read_epoch if task.parts > 1 else read_minibatches_each,
        minibatches=1 if task.parts > 1 else workers,
        accumulated=accumulated,
        period=period or 1,
        # The buckets hold each gradient once more.
        buffer_bytes=sum(parameter.nbytes for _, parameter in named if parameter.requires_grad),
        wrap_optimizer=wrap_averaging if period else None,
    )


def collect_batches(recipe: Any, count: int) -> Any:
    """Returns the recipe with `count` of its batches in one, fewer at the end of an epoch.

    Raises:
        RecipeError: its loader makes no batches.
    """
    loader = recipe.train
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise RecipeError("accumulating needs a DataLoader that makes the batches itself (batch_size=)")
    larger = DataLoader(
        loader.dataset,
        count * loader.batch_size,
        sampler=None if isinstance(loader.dataset, IterableDataset) else loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
    )
    return replace(recipe, train=larger)


def _check_all_used(task: Task, model: nn.Module) -> None:
    """Raises a RecipeError if DDP would wait for the gradient of a parameter that has none."""
    trial = copy.deepcopy(model)
    inputs, targets = task.read(task.recipe.first_batch())
    with torch.random.fork_rng(devices=[]):
        torch.autograd.backward(task.loss.value(task.forward(trial.train(), inputs), targets))
    unused = [
        name for name, parameter in trial.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    if unused:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        raise RecipeError(
            f"DDP needs a gradient for every parameter, but the loss does not depend on {names}; remove them, or "
            "freeze them with requires_grad_(False)"
        )


def _read_every_nth(task: Task, epoch: int, order: DataOrder) -> Iterator[Any]:
    """Yields every nth batch, from this worker's number on; leaves out a last round that is not complete."""
    loader, workers = task.recipe.train, task.workers
    if can_be_sharded(loader):
        yield from islice(_read_batches(loader, order, epoch, task.rank, workers), len(loader) // workers)
        return
    batches = _read_batches(loader, order, epoch)
    while len(round_batches := list(islice(batches, workers))) == workers:
        yield round_batches[task.rank]


def one_f_one_b(task: Task, stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> Baseline:
    """Returns torch's Schedule1F1B, one stage for each worker.

    Args:
        stages: (name, module) of the layers of each stage, which are called one after the other.
    """
    rank, recipe, last = task.rank, task.recipe, task.workers - 1
    if recipe.clip_grad_norm is not None:
        raise RecipeError("the recipe clips the norm of all stages' gradients, which Schedule1F1B does not know")
    module = nn.Sequential(*[layer for _, layer in stages[rank]]).to(task.device)
    inputs, _ = task.read(recipe.first_batch())
    samples = count_samples(inputs, recipe.batch_dim)
    if samples % task.parts:
        raise RecipeError(f"Schedule1F1B needs equal microbatches, but {samples} samples are split into {task.parts}")
    if not isinstance(inputs, torch.Tensor) or recipe.batch_dim != 0:
        raise RecipeError("this comparison runs Schedule1F1B on one input tensor with its samples in dimension 0")
    stage_input, stage_output = _infer_messages(task, stages)
    stage = PipelineStage(module, rank, task.workers, task.device, input_args=stage_input, output_args=stage_output)
    module.register_forward_hook(lambda *_: task.meter.sample(is_forward=False))
    part_targets: list[Any] = []
    schedule = Schedule1F1B(
        stage, task.parts, loss_fn=lambda output, part: task.loss.value(output, part_targets[int(part)])
    )

    def backward(batch: Any) -> int:
        inputs = (task.read(batch)[0],) if rank == 0 else ()
        with task.autocast():
            if rank == last:
                part_targets[:] = [targets for _, targets, _ in task.split(batch)]
                schedule.step(*inputs, target=torch.arange(task.parts), losses=[])
            else:
                schedule.step(*inputs)
        return samples

    def output(inputs: Any) -> Any:
        if rank:
            received: list[Any] = [None]
            dist.recv_object_list(received, rank - 1)
            inputs = received[0]
        result = task.forward(module, inputs)
        if rank == last:
            return result
        dist.send_object_list([result], rank + 1)
        return None

    def read_epoch(epoch: int, order: DataOrder) -> Iterator[Any]:
        for batch in task.read_epoch(epoch, order):
            if count_samples(task.read(batch)[0]) == samples:  # Schedule1F1B takes tensors of one shape only
                yield batch

    named_parameters = [
        (f"{name}.{parameter_name}", parameter)
        for name, layer in stages[rank]
        for parameter_name, parameter in layer.named_parameters()
    ]
    return Baseline(task, module, named_parameters, backward, output, read_epoch)


def _infer_messages(task: Task, stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> tuple[Any, Any]:
    """Returns a sample input and output of this rank's stage for one microbatch.

    torch would infer them by a forward of uninitialized memory, which spoils the running means of a BatchNorm.
    """
    stage_input = stage_output = task.split(task.recipe.first_batch())[0][0]
    with task.autocast():
        for number, layers in enumerate(stages[: task.rank + 1]):
            module = nn.Sequential(*[layer for _, layer in layers])
            with restoring_modes(module.modules()):
                stage_output = module.eval()(stage_input)
            if not isinstance(stage_output, torch.Tensor):
                raise RecipeError("this comparison runs Schedule1F1B on stages that return one tensor")
            stage_output = stage_output.detach().requires_grad_(stage_output.requires_grad)
            stage_input = stage_output if number < task.rank else stage_input
    return stage_input, stage_output


def measure_message_s_per_byte(loop: Baseline, batch: Any, bytes_per_s: float) -> float:
    """Returns by how many seconds a byte on a link of this rate delays the computation of its sender or receiver.

    The cores that compute also serve gloo and the network. Each worker trains the whole model while a message goes to
    the next one; the delay of an update is a mean over the workers.
    """
    rank, workers = loop.task.rank, loop.task.workers

    def make_update(size: int) -> Callable[[], None]:
        sent, received = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))

        def update() -> None:
            works = [dist.irecv(received, (rank - 1) % workers), dist.isend(sent, (rank + 1) % workers)]
            loop.step(batch)
            for work in works:
                assert work is not None, "every rank of the group comes here"
                work.wait()

        return update

    _warm_up(loop, batch)
    (update_s,) = _time_in_turns(loop.task, [make_update(1)])
    message_bytes = max(1, int(min(_MAX_MESSAGE_BYTES, _LINK_SHARE * bytes_per_s * update_s)))
    without_messages_s, with_messages_s = _time_in_turns(loop.task, [make_update(1), make_update(message_bytes)])
    return max(0.0, with_messages_s - without_messages_s) / (2 * message_bytes)


def measure_sum(loop: Baseline, batch: Any, bytes_per_s: float) -> tuple[float, float]:
    """Returns `Level.sum_bytes_per_s` over a link of this rate, and `RuntimeCosts.sum_s_per_byte`.

    Each worker trains the whole model without an all-reduce, and beside one. What this takes more than the longer of
    the two, computing takes from the all-reduce, which then has a lower rate, or the all-reduce from computing.
    """
    workers = loop.task.workers
    size = max(sum(parameter.nbytes for _, parameter in loop.named_parameters), _MIN_SUM_S * bytes_per_s)
    gradients = torch.zeros(max(1, int(min(size, _MAX_SUM_BYTES)) // 4))
    port_bytes = 2 * (workers - 1) / workers * gradients.nbytes

    def update_beside() -> None:
        work = dist.all_reduce(gradients, async_op=True)
        loop.step(batch)
        assert work is not None, "every rank of the group comes here"
        work.wait()

    _warm_up(loop, batch)
    runs = [lambda: loop.step(batch), lambda: dist.all_reduce(gradients), update_beside]
    update_s, sum_s, beside_s = _time_in_turns(loop.task, runs)
    delay_s = max(0.0, beside_s - max(update_s, sum_s))
    return port_bytes / (sum_s + delay_s * (sum_s > update_s)), delay_s / port_bytes


def _warm_up(loop: Baseline, batch: Any) -> None:
    keep_freed_memory()
    for _ in range(WARM_UP):
        loop.step(batch)


def _time_in_turns(task: Task, runs: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the median seconds of each, a mean over the workers; in turns, as a machine's speed drifts."""
    seconds: list[list[float]] = [[] for _ in runs]

    def take_turns(turns: int) -> list[float]:
        for _ in range(turns):
            for run, durations_s in zip(runs, seconds, strict=True):
                start_s = time.perf_counter()
                run()
                durations_s.append(time.perf_counter() - start_s)
        medians_s = torch.tensor([median(durations_s) for durations_s in seconds], dtype=torch.float64)
        dist.all_reduce(medians_s)
        return (medians_s / task.workers).tolist()

    turn_s = sum(take_turns(1))
    return take_turns(min(_TIMED_TURNS, max(2, int(_TURNS_S / max(turn_s, 1e-9)))))


def _read_batches(loader: Any, order: DataOrder, epoch: int, replica: int = 0, replicas: int = 1) -> Iterator[Any]:
    """Yields the batches of one epoch of a loader, or one replica's share of them."""
    epochs = EpochRange(epoch, epoch + 1)
    sharded = ShardedLoader(loader, replica, replicas) if can_be_sharded(loader) else None
    reader: LoaderReader = (
        IterableReader(loader, order, epochs, None) if sharded is None else ShardedReader(sharded, order, epochs, None)
    )
    try:
        for minibatch in reader:
            yield minibatch.batch
    finally:
        reader.close()
        if sharded is not None:
            sharded.close()
