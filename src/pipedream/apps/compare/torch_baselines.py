"""What torch itself offers for a recipe: a plain loop, DistributedDataParallel, Schedule1F1B.

They train as the pipeline does: the same data in the same order, loss, optimizer and evaluation.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from pipedream.capture import call_model
from pipedream.core.errors import RecipeError
from pipedream.core.malloc import keep_freed_memory
from pipedream.core.plan.plan import Plan
from pipedream.runtime.comm.values import to_device
from pipedream.runtime.data.reader import EpochRange, IterableReader, LoaderReader, find_sharding
from pipedream.runtime.data.rng import DataOrder, preserved_rng
from pipedream.runtime.data.splitter import BatchAdapter, count_samples, split_batch
from pipedream.runtime.results import Done
from pipedream.runtime.stage.stage_module import restoring_modes
from pipedream.services.losses.losses import Loss, is_torch_loss, metric_scores
from pipedream.services.losses.totals import Score
from pipedream.services.results.memory import MemoryMeter, tensor_bytes
from pipedream.tensors.auxiliary_loss import auxiliary_loss_scale

Part = tuple[Any, Any, int]
"""Inputs, targets and number of samples of a microbatch."""


class Task(NamedTuple):
    """A recipe on one of several workers, which all make it. A minibatch is split into so many parts."""

    recipe: Any
    rank: int
    workers: int
    device: torch.device
    parts: int = 1


class PlainLoop:
    """One worker's plain loop. A `TrainingLoop` takes it as a `Pipeline` without messages.

    Args:
        module: what this worker trains; by default the recipe's model.
        named_parameters: of its optimizer; by default the model's.

    Attributes:
        minibatches, samples: trained by all workers so far.

    Raises:
        RecipeError: only pipelines can train it; raised on all ranks.
    """

    drains: Sequence[int] = ()
    ready: Sequence[Done] = ()
    should_stop = False
    minibatches = samples = 0
    position = (0, 0)

    _read_together = 1  # minibatches of all workers together, for each one that a worker reads
    _buffer_bytes = 0  # kept besides module and optimizer

    def __init__(
        self, task: Task, module: Any = None, named_parameters: list[tuple[str, nn.Parameter]] | None = None
    ) -> None:
        recipe, self.rank, self.workers, self.device, self.parts = task
        self.recipe = recipe
        if refused := [name for name in ("grad_scaler", "ema") if getattr(recipe, name) is not None]:
            raise RecipeError(f"the recipe has {' and '.join(refused)}, which this comparison runs in pipelines only")
        self.loss = Loss(recipe.loss, recipe.weight)
        self._meter = MemoryMeter(self.device)
        self._adapter = BatchAdapter(recipe.inputs, recipe.targets, is_torch_loss(recipe.loss), recipe.loss is None)
        self.module = recipe.model.to(self.device) if module is None else module
        self.named_parameters = list(recipe.model.named_parameters()) if named_parameters is None else named_parameters
        self.optimizer = recipe.optimizer(self.named_parameters)
        self._scheduler = None if recipe.scheduler is None else recipe.scheduler(self.optimizer)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise RecipeError("the recipe's ReduceLROnPlateau follows evaluations, which is done in pipelines only")

    def _read(self, batch: Any) -> tuple[Any, Any]:
        """Returns inputs and targets on the device."""
        inputs, targets = self._adapter(batch)
        return to_device(inputs, self.device), to_device(targets, self.device)

    def _split(self, batch: Any) -> list[Part]:
        """Returns the microbatches that have samples."""
        dim, values = self.recipe.batch_dim, self._read(batch)
        samples = count_samples(values[0], dim)
        split = [split_batch(value, samples, self.parts, dim) for value in values]
        sizes = [samples // self.parts + (part < samples % self.parts) for part in range(self.parts)]
        return [part for part in zip(*split, sizes, strict=True) if part[2]]

    def _forward(self, module: nn.Module, inputs: Any) -> Any:
        """Returns the module's output, in the recipe's precision."""
        with self._autocast():
            return call_model(module, inputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.recipe.autocast
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _accumulate(self, parts: Sequence[Part], samples: float) -> Any:
        """Adds the gradients of microbatches, each weighed by its share of the samples; returns their loss alike."""
        total: Any = 0.0
        for inputs, targets, size in parts:
            loss = self.loss.value(self._forward(self.module, inputs), targets)
            self._meter.sample(is_forward=True)
            with auxiliary_loss_scale(size / samples):
                torch.autograd.backward(loss * (size / samples) if size != samples else loss)
            self._meter.sample(is_forward=False)
            total = total + loss.detach() * (size / samples)
        return total

    def _compute_gradients(self, batches: Sequence[Any]) -> tuple[int, Any]:
        """Computes those of an update; returns the samples of all workers, and this one's part of their mean loss."""
        parts = [part for batch in batches for part in self._split(batch)]
        samples = sum(size for *_, size in parts)
        return samples, self._accumulate(parts, samples)

    def _read_epoch(self, epoch: int, order: DataOrder) -> Iterator[Sequence[Any]]:
        """Yields the batches that this worker reads for each update of an epoch."""
        for batch in _read_batches(self.recipe.train, order, epoch):
            yield [batch]

    def _output(self, inputs: Any) -> Any:
        """Returns the model's output at an evaluation, on the ranks that score; None elsewhere."""
        return self._forward(self.recipe.model, inputs)

    def drain(self) -> int:
        """Returns the minibatches trained; none are in flight."""
        return self.minibatches

    def train(self, loader: Any, *, until_epoch: int) -> Iterator[Done]:
        """Yields each update as a minibatch, with this worker's part of the loss."""
        keep_freed_memory()
        order = DataOrder()
        for epoch in range(until_epoch):
            updates = self._read_epoch(epoch, order)
            batches = next(updates, None)
            if batches is None:
                raise RecipeError(f"an epoch has fewer minibatches than an update of {self.workers} workers takes")
            while batches is not None:
                samples, loss = self.step(batches)
                if self._scheduler is not None:
                    self._scheduler.step()
                self.samples += samples
                self.minibatches += self._read_together * len(batches)
                batches = next(updates, None)
                self.position = (epoch + (batches is None), 0)
                yield Done(self.minibatches - 1, epoch, batches is None, float(loss), samples, samples, 0.0)

    def step(self, batches: Sequence[Any]) -> tuple[int, Any]:
        """Makes an update, without a step of the scheduler; returns what `_compute_gradients` does."""
        self.module.train()
        self.optimizer.zero_grad()
        samples, loss = self._compute_gradients(batches)
        if (norm := self.recipe.clip_grad_norm) is not None:
            nn.utils.clip_grad_norm_([parameter for _, parameter in self.named_parameters], norm)
        self.optimizer.step()
        return samples, loss

    def sum_over_workers(self, values: Sequence[float]) -> list[float]:
        """Returns the sums of all workers' values; of losses after the training, which it would slow down."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.workers > 1:
            dist.all_reduce(total)
        return total.tolist()

    def measure_peak(self) -> int | None:
        """Returns the bytes of the fullest worker, if they are known."""
        rise = self._meter.measure_peak().rise_bytes
        peak_bytes = 0 if rise is None else rise + tensor_bytes(self.module, self.optimizer) + self._buffer_bytes
        by_rank = [peak_bytes * (rank == self.rank) for rank in range(self.workers)]
        return int(max(self.sum_over_workers(by_rank))) or None

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Returns the means over the test data, equal on all ranks."""
        self.module.eval()
        names = ["loss", *self.recipe.metrics]
        sums = torch.zeros(2 * len(names), dtype=torch.float64)
        with torch.no_grad(), preserved_rng(loader):
            for batch in loader:
                inputs, targets = self._read(batch)
                samples = count_samples(inputs, self.recipe.batch_dim)
                output = self._output(inputs)
                if output is None:
                    continue
                value, weight, is_sum = self.loss(output, targets, samples, 1.0)
                scores: list[Score] = [(value, 1.0 if is_sum else weight), (weight, 1.0)]
                scores += metric_scores(self.recipe.metrics, output, targets, samples)
                sums += torch.tensor([float(number) * factor for number, factor in scores], dtype=torch.float64)
        totals = self.sum_over_workers(sums.tolist())
        return {name: totals[2 * i] / totals[2 * i + 1] for i, name in enumerate(names)}


class DataParallel(PlainLoop):
    """torch's DDP with its default settings, or with its own ways to send less.

    With one part per minibatch each worker takes its own minibatches for an update, as with a DistributedSampler.
    Otherwise the workers share the parts of one minibatch. Either way they sum the gradients once.

    Args:
        accumulated: minibatches that each worker takes for an update; at the end of an epoch fewer.
        sums: 'full', 'float16' (`fp16_compress_hook`) or 'every:H' (`PostLocalSGDOptimizer`).
    """

    def __init__(self, task: Task, accumulated: int = 1, sums: str = "full") -> None:
        if task.parts % task.workers and task.parts > 1:
            raise RecipeError(f"{task.parts} microbatches cannot be shared equally by {task.workers} workers")
        self._accumulated, self._evaluations = accumulated, count()
        self._read_together = task.workers if task.parts == 1 else 1
        super().__init__(task, DistributedDataParallel(task.recipe.model.to(task.device)))
        # The buckets hold each gradient once more.
        self._buffer_bytes = sum(weight.nbytes for _, weight in self.named_parameters if weight.requires_grad)
        if sums == "float16":
            self.module.register_comm_hook(None, fp16_compress_hook)
        elif sums.startswith("every:"):
            state = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
            self.module.register_comm_hook(state, post_localSGD_hook)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # which this import calls
                from torch.distributed.optim import PostLocalSGDOptimizer
            averager = PeriodicModelAverager(int(sums.partition(":")[2]))
            self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)

    def _compute_gradients(self, batches: Sequence[Any]) -> tuple[int, Any]:
        parts = [part for batch in batches for part in self._split(batch)]
        samples = self._read_together * sum(size for *_, size in parts)
        if self.parts > 1:
            parts = parts[self.rank :: self.workers]
        each = samples / self.workers  # DDP takes the mean over the workers
        with self.module.no_sync():
            loss = self._accumulate(parts[:-1], each)
        return samples, (loss + self._accumulate(parts[-1:], each)) / self.workers

    def _read_epoch(self, epoch: int, order: DataOrder) -> Iterator[Sequence[Any]]:
        if self.parts > 1:
            yield from super()._read_epoch(epoch, order)
            return
        loader, workers = self.recipe.train, self.workers
        # Every nth batch, without a last round that is not complete.
        if find_sharding(loader):
            mine: Iterator[Any] = islice(
                _read_batches(loader, order, epoch, self.rank, workers), len(loader) // workers
            )
        else:
            batches = _read_batches(loader, order, epoch)
            rounds = iter(lambda: list(islice(batches, workers)), [])
            mine = (each[self.rank] for each in rounds if len(each) == workers)
        while group := list(islice(mine, self._accumulated)):
            yield group

    def _output(self, inputs: Any) -> Any:
        # The workers take turns in evaluating.
        return super()._output(inputs) if next(self._evaluations) % self.workers == self.rank else None


class OneFOneB(PlainLoop):
    """torch's Schedule1F1B, one stage for each worker.

    Args:
        stages: (name, module) of the layers of each stage, which are called one after the other.
    """

    def __init__(self, task: Task, stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> None:
        recipe, rank, workers, device, parts = task
        self._is_last, self._targets = rank == workers - 1, list[Any]()
        module = nn.Sequential(*[layer for _, layer in stages[rank]]).to(device)
        super().__init__(task, module, [
            (f"{name}.{inner_name}", parameter)
            for name, layer in stages[rank]
            for inner_name, parameter in layer.named_parameters()
        ])  # fmt: skip
        inputs, _ = self._read(recipe.first_batch())
        self._batch = count_samples(inputs, recipe.batch_dim)
        if self._batch % parts:
            raise RecipeError(
                f"Schedule1F1B needs equal microbatches, but {self._batch} samples are split into {parts}"
            )
        if not isinstance(inputs, torch.Tensor) or recipe.batch_dim != 0:
            raise RecipeError("this comparison runs Schedule1F1B on one input tensor with its samples in dimension 0")
        stage_input, stage_output = self._infer_messages(stages)
        stage = PipelineStage(self.module, rank, workers, device, input_args=stage_input, output_args=stage_output)
        self.module.register_forward_hook(lambda *_: self._meter.sample(is_forward=False))
        self._schedule = Schedule1F1B(
            stage, parts, loss_fn=lambda output, part: self.loss.value(output, self._targets[int(part)])
        )

    def _infer_messages(self, stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> tuple[Any, Any]:
        """Returns a sample input and output of this rank's stage for one microbatch.

        torch would infer them by a forward of uninitialized memory, which spoils the running means of a BatchNorm.
        """
        stage_input = stage_output = self._split(self.recipe.first_batch())[0][0]
        with self._autocast():
            for number, layers in enumerate(stages[: self.rank + 1]):
                module = nn.Sequential(*[layer for _, layer in layers])
                with restoring_modes(module.modules()):
                    stage_output = module.eval()(stage_input)
                if not isinstance(stage_output, torch.Tensor):
                    raise RecipeError("this comparison runs Schedule1F1B on stages that return one tensor")
                stage_output = stage_output.detach().requires_grad_(stage_output.requires_grad)
                stage_input = stage_output if number < self.rank else stage_input
        return stage_input, stage_output

    def _compute_gradients(self, batches: Sequence[Any]) -> tuple[int, Any]:
        (batch,) = batches
        inputs = (self._read(batch)[0],) if self.rank == 0 else ()
        losses: list[Any] = []
        with self._autocast():
            if self._is_last:
                self._targets[:] = [targets for _, targets, _ in self._split(batch)]
                self._schedule.step(*inputs, target=torch.arange(self.parts), losses=losses)
            else:
                self._schedule.step(*inputs)
        return self._batch, sum(loss.detach() for loss in losses) / self.parts

    def _output(self, inputs: Any) -> Any:
        if self.rank:
            received: list[Any] = [None]
            dist.recv_object_list(received, self.rank - 1)
            inputs = received[0]
        result = self._forward(self.module, inputs)
        if self._is_last:
            return result
        dist.send_object_list([result], self.rank + 1)
        return None

    def _read_epoch(self, epoch: int, order: DataOrder) -> Iterator[Sequence[Any]]:
        for batches in super()._read_epoch(epoch, order):
            if count_samples(self._read(batches[0])[0]) == self._batch:  # Schedule1F1B takes tensors of one shape only
                yield batches


def check_torch_trains(kind: str, recipe: Any, plan: Plan) -> None:
    """Raises a RecipeError if torch's way of a kind of `run_job` cannot train a recipe, as far as one worker sees."""
    if kind == "1f1b" and recipe.clip_grad_norm is not None:
        raise RecipeError("the recipe clips the norm of all stages' gradients, which Schedule1F1B does not know")
    if kind == "1f1b" and plan.graph is not None:
        raise RecipeError("Schedule1F1B needs a chain of modules, and this model runs by its own forward")
    PlainLoop(Task(recipe, 0, 1, torch.device("cpu")))


def _read_batches(loader: Any, order: DataOrder, epoch: int, replica: int = 0, replicas: int = 1) -> Iterator[Any]:
    """Yields the batches of one epoch of a loader, or one replica's share of them."""
    epochs = EpochRange(epoch, epoch + 1)
    offer: Any = find_sharding(loader)
    sharded = offer and offer.ShardedLoader(loader, replica, replicas)
    reader: LoaderReader = (sharded and sharded.open(order, epochs, None)) or IterableReader(
        loader, order, epochs, None
    )
    try:
        for minibatch in reader:
            yield minibatch.batch
    finally:
        reader.close()
        if sharded is not None:
            sharded.close()
