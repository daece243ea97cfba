"""Optimizers in the memory of the machine, for weights on a device.

Life of an update: the gradients are copied to the machine's memory, the optimizer steps copies of the weights there,
and these are copied back. The weights and their versions stay on the device.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.program import Program
from pipedream.runtime.stage.part import PassFacts, StageFacts, StagePart
from pipedream.runtime.update.stepped import SteppedWeights

CopyTensors = Callable[[list[torch.Tensor | None]], tuple[list[torch.Tensor | None], torch.cuda.Event | None]]


class CpuOptimizerWeights(StagePart, SteppedWeights):
    """Copies of a stage's trained weights, which an optimizer steps.

    Args:
        places: memory of the copies, by name.
        copy_gradients: returns copies of gradients, and the event to wait for before they are read.

    Attributes:
        weights: the copies, with the attributes of the handles.
    """

    def __init__(
        self, handles: Mapping[str, torch.nn.Parameter], places: Mapping[str, torch.Tensor], copy_gradients: CopyTensors
    ) -> None:
        self._copy_gradients = copy_gradients
        super().__init__(handles, {name: _make_like(handle, places[name]) for name, handle in handles.items()})
        self.begin()

    @classmethod
    def check(cls, facts: StageFacts, program: Program) -> None:
        if not isinstance(facts.optimizer.stepped, cls):
            return
        check_movable(facts.optimizer.optimizer)
        reads_both = program.weights.predicts_by_velocity(facts.stage)
        reads_both |= any(rule.needs_read_weights for rule in program.updates.compensation)
        if reads_both or facts.optimizer.reducer.averages_weights:
            raise ScheduleError(
                f"optimizer_state='host' was asked for with {program.name!r}, which "
                f"{'reads weights beside the state' if reads_both else 'averages weights over replicas'} of its "
                "optimizer; keep the optimizer on the device"
            )

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        stepped = facts.optimizer.stepped if isinstance(facts, StageFacts) else None
        return stepped if isinstance(stepped, cls) else None

    def begin(self) -> None:
        """Copies the weights, which may have been loaded, from the handles."""
        for name, copy in self.weights.items():
            copy.data.copy_(self.handles[name].data)

    def take_gradients(self) -> None:
        gradients, ready = self._copy_gradients([handle.grad for handle in self.handles.values()])
        if ready is not None:
            ready.synchronize()
        for copy, gradient in zip(self.weights.values(), gradients, strict=True):
            copy.grad = gradient

    def write(self) -> None:
        """Copies the weights into the handles, without waiting for a GPU."""
        for name, copy in self.weights.items():
            copy.grad = None
            self.handles[name].data.copy_(copy.data, non_blocking=True)


def check_movable(optimizer: torch.optim.Optimizer) -> None:
    """Raises a `ScheduleError` if an optimizer cannot step in the memory of the machine."""
    obstacle = next(_list_obstacles(optimizer), "")
    if obstacle:
        raise ScheduleError(
            f"optimizer_state='host' was asked for with {type(optimizer).__name__}, which {obstacle}; leave that out, "
            "or keep the optimizer on the device"
        )


def _list_obstacles(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    for group in optimizer.param_groups:
        if group.get("capturable"):
            yield "has capturable=True, for CUDA graphs"
        yield from (f"has {key!r} on {value.device}" for key, value in group.items() if _is_on_device(value))
    for values in (*optimizer.state.values(), vars(optimizer)):
        items = values.items() if isinstance(values, Mapping) else ()
        yield from (f"holds {key!r} on {value.device}" for key, value in items if _is_on_device(value))


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


def _make_like(handle: torch.nn.Parameter, tensor: torch.Tensor) -> torch.nn.Parameter:
    copy: torch.nn.Parameter = torch.Tensor._make_subclass(type(handle), tensor, handle.requires_grad)
    copy.__dict__.update(handle.__dict__)
    return copy
