"""The interface of what a stage has besides its layers, the versions of its weights and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.comm.message import Message
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage.versions import Versions, WeightChoice, WeightSet, WeightStore
from pipedream.runtime.update.optimizer import Optimizer

_NOTHING = nullcontext()

RunLayers = Callable[[], Any]
Resident = Callable[[], Iterable[torch.Tensor]]
Override = TypeVar("Override", bound=Callable[..., Any])


class Task(StrEnum):
    """What a program may need of a stage's parts, because the stage would compute something else or take more memory
    without: a phrase of errors.
    """

    PREDICT = "predicts weights"
    USE_NEWER = "uses newer weights in a backward than in its forward"
    OFFLOAD = "keeps activations in the memory of the machine"
    REPEAT = "repeats forwards"


class ForwardFunction(Protocol):
    """A stage's forward, from the received message to the next one; fills in the `SavedForward`."""

    def __call__(self, message: Message, recomputes: bool = False) -> Message:
        """`recomputes`: whether this is the second forward."""


@dataclass(frozen=True)
class PassFacts:
    """What the parts of a stage are made from, where only its passes run.

    Attributes:
        programs: of all phases.
        shared: what the parts of all stages of this rank share, by keys of their own.
    """

    stage: int
    rank: int
    programs: Sequence[Program]
    module: StageModule
    shared: dict[object, Any]
    store: WeightStore
    choice: WeightChoice


@dataclass(frozen=True)
class StageFacts(PassFacts):
    """What the parts of a stage are made from, where it is updated.

    Attributes:
        versions: the store.
        replica_group: None for a single replica.
    """

    versions: Versions
    optimizer: Optimizer
    replica_group: Group | None = None


class StagePart:
    """Takes part in a stage's passes, streams, updates and checkpoints. By default it does nothing.

    Attributes:
        task: what it does, of what a program may need.
    """

    task: ClassVar[Task | None] = None

    @classmethod
    def check(cls, facts: StageFacts, program: Program) -> None:
        """Raises a `ScheduleError` before a run if a method or an optimizer does not fit."""

    @classmethod
    def explain_difference(cls, program: Program, inputs: Sequence[Message]) -> str:
        """Returns why the first minibatch's numbers may not be the model's own, given the microbatches; '' if none."""
        return ""

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        """Returns the part of a stage; None if it has none with this program."""
        raise NotImplementedError(f"{cls.__name__} is not made from facts")

    def begin(self) -> None:
        """Begins a stream."""

    # -- passes -------------------------------------------------------------------------------------

    def acquire(self, version: int) -> tuple[WeightSet, int]:
        """Returns what a forward reads, see `WeightChoice.acquire`. At most one part overrides it."""
        raise NotImplementedError

    def receive(self, message: Message) -> None:
        """Takes the message of a forward whose backward follows. Of a stage's parts at most one overrides it."""

    def forward(self, saved: SavedForward) -> AbstractContextManager[None]:
        """Returns the context of a forward with training."""
        return _NOTHING

    def backward(self, saved: SavedForward) -> AbstractContextManager[None]:
        """Returns the context of a backward, of each half of one, or of a repeated forward."""
        return _NOTHING

    def run_forward(self, saved: SavedForward, message: Message, run: ForwardFunction) -> Message:
        """Runs a forward that a backward follows. Of a stage's parts at most one overrides it."""
        return run(message)

    def run_layers(self, layers: RunLayers, value: Any, weights: WeightSet) -> Any:
        """Runs the layers on `value`, in a forward or when it is repeated."""
        return layers()

    def packing(self, index: int, resident: Resident) -> AbstractContextManager[None]:
        """Returns the context in which a forward saves tensors for its backward. At most one part overrides it.

        Args:
            resident: yields tensors that stay in memory anyway: weights, buffers, inputs.
        """
        return _NOTHING

    def begin_backward(self, kind: Kind, index: int) -> None:
        """Called before a backward, each half of one, and a repeated forward. At most one part overrides it."""

    def end_backward(self, index: int) -> None:
        """Called after a backward, or half of one. At most one part overrides it."""

    # -- updates ------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Called before the storage of an update's weights is chosen."""

    def before_step(self) -> None:
        """Called when the handles are where the update writes."""

    def after_step(self) -> None:
        """Called when the update has its number."""

    # -- drains -------------------------------------------------------------------------------------

    def end(self) -> Waiting[None]:
        """Ends a stream, at a drain; yields where it would wait."""
        yield from ()

    def close(self) -> None:
        """Ends what it has begun, such as threads."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns its state in a checkpoint, by KIND/NAME."""
        return {}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets its state, of which a checkpoint may lack tensors."""


class PassParts:
    """What parts do in the passes of a stage, which pay only for methods that are overridden.

    Attributes:
        forward, backward: see `StagePart`; the context of all parts.
        run_layers: see `StagePart`; through all parts, of which the first is the outermost.
        acquire, receive, run_forward, packing, begin_backward, end_backward: see `StagePart`; of the part that
            overrides it.
    """

    def __init__(self, parts: Sequence[StagePart], choice: WeightChoice) -> None:
        nothing = StagePart()
        self.acquire = _find_override(parts, "acquire", choice.acquire)
        self.receive = _find_override(parts, "receive", nothing.receive)
        self.forward = _join_contexts(_list_overrides(parts, "forward"))
        self.backward = _join_contexts(_list_overrides(parts, "backward"))
        self.run_forward = _find_override(parts, "run_forward", nothing.run_forward)
        self.packing = _find_override(parts, "packing", nothing.packing)
        self.begin_backward = _find_override(parts, "begin_backward", nothing.begin_backward)
        self.end_backward = _find_override(parts, "end_backward", nothing.end_backward)
        self.run_layers = nothing.run_layers
        for outer in reversed(_list_overrides(parts, "run_layers")):
            self.run_layers = partial(_run_layers_in, outer, self.run_layers)


def _list_overrides(parts: Sequence[StagePart], method: str) -> list[Any]:
    return [getattr(part, method) for part in parts if getattr(type(part), method) is not getattr(StagePart, method)]


def _find_override(parts: Sequence[StagePart], method: str, default: Override) -> Override:
    overrides = _list_overrides(parts, method)
    assert len(overrides) <= 1, f"several parts override {method}: {overrides}"
    return overrides[0] if overrides else default


def _run_layers_in(outer: Any, inner: Any, layers: RunLayers, value: Any, weights: WeightSet) -> Any:
    return outer(lambda: inner(layers, value, weights), value, weights)


def _join_contexts(
    contexts: Sequence[Callable[[SavedForward], AbstractContextManager[None]]],
) -> Callable[[SavedForward], AbstractContextManager[None]]:
    @contextmanager
    def enter_all(saved: SavedForward) -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(saved))
            yield

    if len(contexts) > 1:
        return enter_all
    return contexts[0] if contexts else StagePart().forward
