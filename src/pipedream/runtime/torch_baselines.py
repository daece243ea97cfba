"""What torch itself offers for a recipe: a plain loop, DistributedDataParallel, Schedule1F1B.

They train as the pipeline does: the same data in the same order, loss, optimizer and evaluation.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from pipedream.core.errors import RecipeError
from pipedream.runtime.comm.values import to_device
from pipedream.runtime.data.batch_adapter import BatchAdapter
from pipedream.runtime.data.batches import split_batch, split_minibatch
from pipedream.runtime.data.reader import EpochRange, IterableReader, LoaderReader
from pipedream.runtime.data.rng import DataOrder, preserved_rng
from pipedream.runtime.data.sharded_loader import ShardedLoader, ShardedReader, can_be_sharded
from pipedream.runtime.results.losses import Loss, is_torch_loss, metric_scores
from pipedream.runtime.results.memory import MemoryMeter, keep_freed_memory, tensor_bytes
from pipedream.runtime.results.results import Score
from pipedream.runtime.stage.auxiliary import auxiliary_loss_scale

_UPDATES = 16  # that are timed without and with messages
_MOST_BYTES, _FILLED = 2e6, 0.4  # of a message: at most, and as a share of what the link carries during an update


class Baseline(ABC):
    """One way to train a recipe; every rank makes it and calls `train`.

    Args:
        recipe: a `pipedream.Recipe`.
        parts: microbatches that a minibatch is cut into.

    Raises:
        RecipeError: this way does not train this recipe; equal on all ranks.
    """

    def __init__(self, recipe: Any, rank: int, workers: int, device: torch.device, *, parts: int = 1) -> None:
        if wrong := [name for name in ("grad_scaler", "ema") if getattr(recipe, name) is not None]:
            raise RecipeError(f"the recipe has {' and '.join(wrong)}, which this comparison runs in pipelines only")
        self._recipe, self._rank, self._workers, self._device, self._parts = recipe, rank, workers, device, parts
        self._loss = Loss(recipe.loss, recipe.weight)
        self._adapter = BatchAdapter(recipe.inputs, recipe.targets, is_torch_loss(recipe.loss), recipe.loss is None)
        self._meter = MemoryMeter(device)
        self._samples = 0  # of an update, over all workers
        self._module = self._trained_module()
        named = list(self._named_parameters())
        self._optimizer = recipe.optimizer(named)
        self._parameters = [parameter for _, parameter in named]
        scheduler = None if recipe.scheduler is None else recipe.scheduler(self._optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise RecipeError("the recipe's ReduceLROnPlateau follows evaluations, which is done in pipelines only")
        self._scheduler = scheduler

    def train(self, epochs: int, minibatches: int | None) -> dict[str, Any]:
        """Returns the figures of a run summary; the throughput is the median of the epochs' (`TrainingLoop`)."""
        keep_freed_memory()
        recipe, order = self._recipe, DataOrder()
        start, done, rates = time.perf_counter(), 0, []
        metrics: dict[str, float] = {}
        evaluations: list[dict[str, Any]] = []
        to_target, most = None, 0
        for epoch in range(epochs):
            mark, samples, now = None, 0, start
            for batches in self._updates(epoch, order):
                self._update(batches)
                samples, most = samples + self._samples, max(most, self._samples)
                done += len(batches) if self._reads_all else self._workers
                now = time.perf_counter()
                mark = mark or (now, samples)
                if minibatches is not None and done >= minibatches:
                    break
            if mark is None:
                raise RecipeError(f"an epoch has fewer minibatches than an update of {self._workers} workers takes")
            if now > mark[0]:
                rates.append((samples - mark[1]) / (now - mark[0]))
            seconds = now - start
            if recipe.test is not None:
                metrics = self._evaluated()
                evaluations.append({"epoch": epoch, "minibatches": done, "seconds": seconds, **metrics})
            if recipe.target is not None and to_target is None and recipe.target[0] in metrics:
                name, value = recipe.target
                reached = metrics[name] <= value if name == "loss" else metrics[name] >= value
                to_target = seconds if reached else None
            if minibatches is not None and done >= minibatches:
                break
        rise = self._meter.at_drain().rise_bytes
        peak = torch.tensor([0 if rise is None else rise + self._kept_bytes()], device=self._device)
        if self._workers > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        return {
            "minibatches": done,
            "samples_per_s": median(rates) if rates else 0.0,
            "samples_per_update": most,
            "peak_bytes": int(peak) or None,  # of the fullest worker
            "seconds_to_target": to_target,
            "metrics": metrics,
            "evaluations": evaluations,
        }

    _reads_all = True
    """Whether each worker reads each minibatch."""

    @abstractmethod
    def _trained_module(self) -> nn.Module:
        """Returns what this worker trains."""

    @abstractmethod
    def _backward(self, batches: Sequence[Any]) -> None:
        """Computes the gradients of an update, and sets `_samples`."""

    @abstractmethod
    def _output(self, inputs: Any) -> Any:
        """Returns the model's output at an evaluation, on the ranks that score; None elsewhere."""

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._module.named_parameters()

    def _kept_bytes(self) -> int:
        return tensor_bytes(self._module, self._optimizer)

    def _updates(self, epoch: int, order: DataOrder) -> Iterator[Sequence[Any]]:
        """Yields the minibatches that this worker reads for each update."""
        with _open(self._recipe.train, order, epoch) as reader:
            for minibatch in reader:
                yield [minibatch.batch]

    def _update(self, batches: Sequence[Any]) -> None:
        self.step(batches)
        if self._scheduler is not None:
            self._scheduler.step()

    def step(self, batches: Sequence[Any]) -> None:
        """Trains on the minibatches that this worker reads for an update; learning rates stay."""
        self._module.train()
        self._optimizer.zero_grad()
        self._backward(batches)
        if self._recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip_grad_norm)
        self._optimizer.step()

    def _read(self, batch: Any) -> tuple[Any, Any]:
        """Returns inputs and targets on the device."""
        inputs, targets = self._adapter(batch)
        return to_device(inputs, self._device), to_device(targets, self._device)

    def _parts_of(self, batch: Any) -> list[tuple[Any, Any, int]]:
        """Returns inputs, targets and number of samples of each microbatch."""
        inputs, targets = self._read(batch)
        dim = self._recipe.batch_dim
        count = split_minibatch(inputs, targets, 1, dim)[0][0]
        cut = [split_batch(value, count, self._parts, dim) for value in (inputs, targets)]
        sizes = [count // self._parts + (part < count % self._parts) for part in range(self._parts)]
        return [part for part in zip(*cut, sizes, strict=True) if part[2]]

    def _forward(self, module: nn.Module, inputs: Any) -> Any:
        with self._autocast():
            if isinstance(inputs, Mapping):
                return module(**inputs)
            return module(*inputs) if isinstance(inputs, tuple) else module(inputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._recipe.autocast
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def _evaluated(self) -> dict[str, float]:
        """Returns the means over the test data, equal on all ranks."""
        self._module.eval()
        names = ["loss", *self._recipe.metrics]
        sums = torch.zeros(2 * len(names), dtype=torch.float64)
        with torch.no_grad(), preserved_rng(self._recipe.test):
            for batch in self._recipe.test:
                inputs, targets = self._read(batch)
                samples = split_minibatch(inputs, targets, 1, self._recipe.batch_dim)[0][0]
                output = self._output(inputs)
                if output is None:
                    continue
                value, weight, is_sum = self._loss(output, targets, samples, 1.0)
                scores: list[Score] = [(value, 1.0 if is_sum else weight), (weight, 1.0)]
                scores += metric_scores(self._recipe.metrics, output, targets, samples)
                sums += torch.tensor([float(number) * factor for number, factor in scores], dtype=torch.float64)
        if self._workers > 1:
            sums = sums.to(self._device)
            dist.all_reduce(sums)
        return {name: float(sums[2 * i] / sums[2 * i + 1]) for i, name in enumerate(names)}


class PlainLoop(Baseline):
    """One worker, one update a minibatch."""

    def _trained_module(self) -> nn.Module:
        module: nn.Module = self._recipe.model.to(self._device)
        return module

    def _backward(self, batches: Sequence[Any]) -> None:
        parts = [part for batch in batches for part in self._parts_of(batch)]
        self._samples = sum(size for *_, size in parts)
        self._accumulate(parts, self._samples)

    def _accumulate(self, parts: Sequence[tuple[Any, Any, int]], samples: float) -> None:
        for inputs, targets, size in parts:
            loss = self._loss.value(self._forward(self._module, inputs), targets)
            self._meter.sample(is_forward=True)
            with auxiliary_loss_scale(size / samples):
                torch.autograd.backward(loss * (size / samples) if size != samples else loss)
            self._meter.sample(is_forward=False)

    def _output(self, inputs: Any) -> Any:
        return self._forward(self._module, inputs)


class DataParallel(PlainLoop):
    """torch's DDP with its own settings.

    Args:
        parts: 1: each worker takes a minibatch of its own for an update, as with a DistributedSampler. Otherwise the
            workers share the parts of one minibatch, and sum the gradients once for it.
    """

    def __init__(self, recipe: Any, rank: int, workers: int, device: torch.device, *, parts: int = 1) -> None:
        self._reads_all = parts > 1
        super().__init__(recipe, rank, workers, device, parts=parts)
        if parts % workers and parts > 1:
            raise RecipeError(f"{parts} microbatches cannot be shared equally by {workers} workers")

    def _trained_module(self) -> nn.Module:
        model = self._recipe.model.to(self._device)
        self._check_all_used(model)
        return DistributedDataParallel(model)

    def _check_all_used(self, model: nn.Module) -> None:
        """Raises a RecipeError if DDP would wait for the gradient of a parameter that has none."""
        tried = copy.deepcopy(model)
        inputs, targets = self._read(self._recipe.first_batch())
        with torch.random.fork_rng(devices=[]):
            torch.autograd.backward(self._loss.value(self._forward(tried.train(), inputs), targets))
        unused = [
            name for name, parameter in tried.named_parameters() if parameter.requires_grad and parameter.grad is None
        ]
        if unused:
            some = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
            raise RecipeError(
                f"DDP needs a gradient for every parameter, but the loss does not depend on {some}; remove them, or "
                "freeze them with requires_grad_(False)"
            )

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._module.module.named_parameters()  # type: ignore[union-attr]

    def _kept_bytes(self) -> int:
        # The buckets hold each gradient once more.
        return super()._kept_bytes() + sum(
            parameter.nbytes for parameter in self._parameters if parameter.requires_grad
        )

    def _updates(self, epoch: int, order: DataOrder) -> Iterator[Sequence[Any]]:
        if self._reads_all:
            yield from super()._updates(epoch, order)
            return
        loader = self._recipe.train
        if can_be_sharded(loader):
            with _open(loader, order, epoch, self._rank, self._workers) as reader:
                for minibatch in islice(reader, len(loader) // self._workers):
                    yield [minibatch.batch]
            return
        with _open(loader, order, epoch) as reader:
            while len(minibatches := list(islice(reader, self._workers))) == self._workers:
                yield [minibatches[self._rank].batch]

    def _backward(self, batches: Sequence[Any]) -> None:
        parts = self._parts_of(batches[0])
        if not self._reads_all:
            self._samples = self._workers * sum(size for *_, size in parts)
            self._accumulate(parts, self._samples / self._workers)
            return
        self._samples = sum(size for *_, size in parts)
        mine = parts[self._rank :: self._workers]
        each = self._samples / self._workers  # DDP takes the mean over the workers
        with self._module.no_sync():  # type: ignore[operator]
            self._accumulate(mine[:-1], each)
        self._accumulate(mine[-1:], each)

    def _output(self, inputs: Any) -> Any:
        self._turn = getattr(self, "_turn", -1) + 1
        if self._turn % self._workers != self._rank:
            return None
        return self._forward(self._module.module, inputs)  # type: ignore[arg-type]


class OneFOneB(Baseline):
    """torch's Schedule1F1B, one stage for each worker.

    Args:
        stages: (name, module) of the layers of each stage, which are called one after the other.
    """

    def __init__(
        self,
        recipe: Any,
        rank: int,
        workers: int,
        device: torch.device,
        *,
        stages: Sequence[Sequence[tuple[str, nn.Module]]],
        parts: int,
    ) -> None:
        self._layers = stages[rank]
        if recipe.clip_grad_norm is not None:
            raise RecipeError("the recipe clips the norm of all stages' gradients, which Schedule1F1B does not know")
        super().__init__(recipe, rank, workers, device, parts=parts)
        inputs, targets = self._read(recipe.first_batch())
        self._count = split_minibatch(inputs, targets, 1, recipe.batch_dim)[0][0]
        if self._count % parts:
            raise RecipeError(f"Schedule1F1B needs equal microbatches, but {self._count} samples are cut into {parts}")
        if not isinstance(inputs, torch.Tensor) or recipe.batch_dim != 0:
            raise RecipeError("this comparison runs Schedule1F1B on one input tensor with its samples in dimension 0")
        self._targets: list[Any] = []
        arriving, leaving = self._shapes(stages)
        stage = PipelineStage(self._module, rank, workers, device, input_args=arriving, output_args=leaving)
        self._module.register_forward_hook(lambda *_: self._meter.sample(is_forward=False))
        self._schedule = Schedule1F1B(stage, parts, loss_fn=self._loss_of_part)

    def _shapes(self, stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> tuple[Any, Any]:
        """Returns what a microbatch's input and output of this stage look like.

        torch would find out by a forward of uninitialized memory, which spoils the running means of a BatchNorm.
        """
        arriving = leaving = self._parts_of(self._recipe.first_batch())[0][0]
        with self._autocast():
            for number, layers in enumerate(stages[: self._rank + 1]):
                module = nn.Sequential(*[module for _, module in layers])
                modes = {submodule: submodule.training for submodule in module.modules()}
                leaving = module.eval()(arriving)
                for submodule, mode in modes.items():
                    submodule.training = mode
                if not isinstance(leaving, torch.Tensor):
                    raise RecipeError("this comparison runs Schedule1F1B on stages that return one tensor")
                leaving = leaving.detach().requires_grad_(leaving.requires_grad)
                arriving = leaving if number < self._rank else arriving
        return arriving, leaving

    def _loss_of_part(self, output: Any, part: torch.Tensor) -> torch.Tensor:
        return self._loss.value(output, self._targets[int(part)])

    def _trained_module(self) -> nn.Module:
        return nn.Sequential(*[module for _, module in self._layers]).to(self._device)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, module in self._layers:
            yield from (
                (f"{name}.{parameter_name}", parameter) for parameter_name, parameter in module.named_parameters()
            )

    def _updates(self, epoch: int, order: DataOrder) -> Iterator[Sequence[Any]]:
        for batches in super()._updates(epoch, order):
            inputs, targets = self._read(batches[0])
            if split_minibatch(inputs, targets, 1)[0][0] == self._count:  # it takes tensors of one shape only
                yield batches

    def _backward(self, batches: Sequence[Any]) -> None:
        self._samples = self._count
        inputs = self._read(batches[0])[0]
        with self._autocast():
            if self._rank == self._workers - 1:
                self._targets = [targets for _, targets, _ in self._parts_of(batches[0])]
                first = () if self._rank else (inputs,)
                self._schedule.step(*first, target=torch.arange(self._parts), losses=[])
            elif self._rank:
                self._schedule.step()
            else:
                self._schedule.step(inputs)

    def _output(self, inputs: Any) -> Any:
        if self._rank:
            received: list[Any] = [None]
            dist.recv_object_list(received, self._rank - 1)
            inputs = received[0]
        output = self._forward(self._module, inputs)
        if self._rank < self._workers - 1:
            dist.send_object_list([output], self._rank + 1)
            return None
        return output


def message_s_per_byte(loop: PlainLoop, batch: Any, rank: int, workers: int, bytes_per_s: float) -> float:
    """Returns what a byte of a message takes from compute, at each of its ends, on a link of this rate.

    The cores that compute also serve gloo and the network. Each worker trains the whole model while a message goes to
    the next one; what that adds to an update is a mean over the workers.
    """

    def update_s(*sizes: int) -> list[float]:
        """The updates take turns, as the speed of a machine drifts."""
        messages = [[torch.zeros(size, dtype=torch.uint8) for _ in range(2)] for size in sizes]
        seconds: list[list[float]] = [[] for _ in sizes]
        for _ in range(_UPDATES):
            for (sent, received), durations_s in zip(messages, seconds, strict=True):
                start = time.perf_counter()
                works = [dist.irecv(received, (rank - 1) % workers), dist.isend(sent, (rank + 1) % workers)]
                loop.step([batch])
                for work in works:
                    assert work is not None, "every rank of the group comes here"
                    work.wait()
                durations_s.append(time.perf_counter() - start)
        medians_s = torch.tensor([median(durations_s) for durations_s in seconds], dtype=torch.float64)
        dist.all_reduce(medians_s)
        return (medians_s / workers).tolist()

    loop.step([batch])
    message_bytes = max(1, int(min(_MOST_BYTES, _FILLED * bytes_per_s * update_s(1)[0])))
    alone_s, beside_s = update_s(1, message_bytes)
    return max(0.0, beside_s - alone_s) / (2 * message_bytes)


class _open:
    """Context: a reader of one epoch of a loader."""

    def __init__(self, loader: Any, order: DataOrder, epoch: int, replica: int = 0, replicas: int = 1) -> None:
        epochs = EpochRange(epoch, epoch + 1)
        self._sharded = ShardedLoader(loader, replica, replicas) if can_be_sharded(loader) else None
        self._reader: LoaderReader = (
            IterableReader(loader, order, epochs, None)
            if self._sharded is None
            else ShardedReader(self._sharded, order, epochs, None)
        )

    def __enter__(self) -> LoaderReader:
        return self._reader

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        if self._sharded is not None:
            self._sharded.close()
