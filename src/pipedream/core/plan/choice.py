"""The Choice: one thing that a plan trades, exactness for bytes on the wire or seconds for memory.

Each kind reads its text, refuses what it cannot do, says what it costs and describes itself. By default it costs and
refuses nothing. `Choices` has one of each; the files of `extensions/choices/` have further ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pipedream.core.errors import PlanError
from pipedream.core.model.profile import Profile
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.placement import Carries
from pipedream.core.plan.stage import Stage

Shapes = Callable[[], list[tuple[int, ...]]]
"""Returns the shapes of the trained weights of all stages with replicas."""


class Choice:
    """A value of one choice.

    Attributes:
        option: its name; `help` is that of its flag.
        approximates: it may change results.
        is_searched: it says what a search may do, so that a plan of one begins with the default.
        is_stored: files of plans have it; otherwise their stages say what was chosen.
        exclusions: rows about it of the table in `workflows/exclusions.py`.
        is_exact: sums over replicas are those of one process, up to rounding.
        averages_weights: replicas update by their own gradients, and weights are averaged once per `period`.
        needs_shapes: its costs depend on the shapes of weights.
        value_bits: of a value of the model; 0 if nothing depends on them.
    """

    option: str
    help: str = "No extension here offers it."
    approximates: ClassVar[bool] = False
    is_searched: ClassVar[bool] = False
    is_stored: bool = True
    exclusions: ClassVar[str] = ""
    is_exact: ClassVar[bool] = True
    averages_weights: ClassVar[bool] = False
    needs_shapes: ClassVar[bool] = False
    value_bits: int = 0

    def list_texts(self) -> str:
        """Returns what users may write, for the help of its flag."""
        raise NotImplementedError(f"{type(self).__name__} has a text")

    def read(self, text: Any) -> Any:
        """Reads a user's text or value. Raises a `PlanError` if there is none such."""
        raise NotImplementedError(f"{type(self).__name__} reads its text")

    @property
    def recomputing(self) -> tuple[bool, ...]:
        """Whether a stage may repeat its forward, the faster way first; the second only where it does not fit so."""
        return (False,)

    @property
    def moves_activations(self) -> bool:
        """Whether activations of stages with `Stage.offload` wait in the memory of the machine."""
        return False

    @property
    def hosts_optimizers(self) -> bool:
        """Whether optimizers and their state are in the memory of the machine."""
        return False

    @property
    def backward_share(self) -> float:
        """Seconds of a backward for each second of the profile's."""
        return 1.0

    @property
    def period(self) -> int:
        """Updates from one exchange of the replicas to the next."""
        return 1

    @property
    def overrides(self) -> tuple[str, ...]:
        """Names of choices that have no meaning with this value."""
        return ()

    def check_opened(self) -> None:
        """Raises a `PlanError` if it is a file that the user has not named."""

    def check_profile(self, profile: Profile) -> None:
        """Raises a `PlanError` if a profile lacks what its costs depend on."""

    def check_device(self, device: str, plan: Any) -> None:
        """Raises a `PlanError` if workers on such a device cannot do it.

        Args:
            plan: whose choice it is; None if it is the user's.
        """

    def check(self, plan: Any, programs: Sequence[Any], options: Any, shapes: Shapes) -> None:
        """Raises a `PlanError` or a `ScheduleError` if a `Plan`, its `Program`s or the `PipelineOptions` exclude it."""

    def check_replicas(self, replicas: Sequence[int]) -> None:
        """Raises a `PlanError` if it has no meaning for stages with these replicas."""

    def check_machine(
        self, stages: Sequence[Stage], free_bytes: int, versions: Sequence[int] | None, gradient_sets: int
    ) -> int:
        """Returns the bytes that it leaves free on a machine; see `Choices.check_machine`."""
        return free_bytes

    def of_values(self, bits: int) -> Self:
        """Returns the value for a model whose values have this many bits."""
        return self

    def on_replicas(self, replicas: Sequence[int]) -> Self:
        """Returns the value that has a meaning for stages with these replicas."""
        return self

    def change_stage(self, stage: Stage, before: Any) -> Stage:
        """Returns a stage of a finished plan, in which this is chosen in place of the value `before`."""
        return stage

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        """Returns the text that may save memory where a plan with these `Choices` does not fit; '' if there is none."""
        return ""

    def add_terms(self, terms: Terms, weights: Any, value_bytes: float) -> Terms:
        """Returns terms with its own.

        Args:
            weights: a `Stage`, or a `Profile` for the mean over its stages.
            value_bytes: of a number in the model.
        """
        return terms

    def add_costs(self, runtime: RuntimeCosts) -> RuntimeCosts:
        """Returns a worker's costs with its own."""
        return runtime

    def wrap_sender(self, sender: Any, carries: Carries) -> Any:
        """Returns a channel's sending end, which may change its messages; by default that `Sender` itself."""
        return sender

    def wrap_receiver(self, receiver: Any, carries: Carries) -> Any:
        """Returns the receiving end of such a channel, which changes them back; by default that `Receiver` itself."""
        return receiver

    def imitate_message(self, tensor: Any) -> Any:
        """Returns a tensor as another worker would receive it; its gradient is as this worker would receive it."""
        return tensor

    def make_reducer(self, replica: Any) -> Any:
        """Returns the `Reducer` of a `runtime.update.replica.Replica`; by default a sum of its gradients."""
        return replica.reduce_gradients()

    def describe(self, plan: Any) -> Iterator[str]:
        """Yields a line of the description of a `Plan`, if it differs from the default."""
        yield from ()


@dataclass(frozen=True)
class PlainChoice(Choice):
    """The default, by its text, of a choice that no extension here offers."""

    option: str
    text: str
    is_stored: bool = True

    def list_texts(self) -> str:
        return self.text or "none"

    def read(self, text: Any) -> Self:
        if text not in ("", self.text):
            raise PlanError(
                f"{self.option}={text!r} was asked for, but no extension here offers this choice; leave it out"
            )
        return self

    def encoded(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        return False


class WordChoice(str, Choice):
    """A choice whose values are words, the default first."""

    texts: ClassVar[tuple[str, ...]]

    @classmethod
    def list_texts(cls) -> str:
        return "|".join(cls.texts)

    @classmethod
    def read(cls, text: Any) -> Self:
        if text not in cls.texts:
            words = f"{', '.join(cls.texts[:-1])} or {cls.texts[-1]}"
            raise PlanError(f"{cls.option}={text!r} was asked for; give {words}")
        return cls(text)

    @classmethod
    def parse(cls, text: Any) -> Self:
        return cls.read(text)
