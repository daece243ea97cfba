"""The Choice: one thing that a plan trades, exactness for bytes on the wire or seconds for memory.

Each kind reads its text, refuses what it cannot do, says what it costs and describes itself. By default it costs and
refuses nothing. `Choices` has one of each; the files of `extensions/choices/` have further ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from pipedream.core.errors import PlanError
from pipedream.core.model.profile import Profile
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.stage import Stage

Shapes = Callable[[], list[tuple[int, ...]]]
"""Returns the shapes of the trained weights of all stages with replicas."""


class Choice:
    """A value of one choice.

    Attributes:
        option: its name; `help` is that of its flag. Both are of further choices and of words.
        approximates: it may change results.
        is_searched: it says what a search may do, so that a plan of one begins with the default.
        is_stored: files of plans have it; otherwise their stages say what was chosen.
        exclusions: rows about it of the table in `workflows/exclusions.py`.
        is_exact: sums over replicas are those of one process, up to rounding.
        averages_weights: replicas update by their own gradients, and weights are averaged once per `period`.
        needs_shapes: its costs depend on the shapes of weights.
    """

    option: ClassVar[str]
    help: ClassVar[str] = ""
    approximates: ClassVar[bool] = False
    is_searched: ClassVar[bool] = False
    is_stored: ClassVar[bool] = True
    exclusions: ClassVar[str] = ""
    is_exact: ClassVar[bool] = True
    averages_weights: ClassVar[bool] = False
    needs_shapes: ClassVar[bool] = False

    @classmethod
    def list_texts(cls) -> str:
        """Returns what users may write, for the help of its flag."""
        raise NotImplementedError(f"{cls.__name__} has a text")

    @classmethod
    def read(cls, text: Any) -> Any:
        """Reads a user's text or value. Raises a `PlanError` if there is none such."""
        raise NotImplementedError(f"{cls.__name__} reads its text")

    @property
    def recomputing(self) -> tuple[bool, ...]:
        """Whether a stage may repeat its forward, the faster way first; the second only where it does not fit so."""
        return (False,)

    @property
    def moves_activations(self) -> bool:
        """Whether those of the stages with `Stage.offload` wait in the memory of the machine."""
        return False

    @property
    def hosts_optimizers(self) -> bool:
        """Whether optimizers and their state are in the memory of the machine."""
        return False

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

    def make_reducer(self, replica: Any) -> Any:
        """Returns the `Reducer` of a `runtime.update.replica.Replica`; by default a sum of its gradients."""
        return replica.reduce_gradients()

    def describe(self, plan: Any) -> Iterator[str]:
        """Yields a line of the description of a `Plan`, if it differs from the default."""
        yield from ()


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
