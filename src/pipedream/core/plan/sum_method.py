"""The SumMethod: what the replicas of a stage exchange, and how often (docs/less_communication.md).

`extensions/reducers/` has those that do not sum gradients as they are; what such a method does is its `Reducer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from pipedream.core.door import Door, is_file
from pipedream.core.errors import PlanError
from pipedream.core.model.profile import Profile
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.choice import Choice
from pipedream.core.plan.cost import SumCosts, Terms
from pipedream.core.units import format_bytes

FULL = "full"


@dataclass(frozen=True, repr=False)
class SumMethod(Choice):
    """How the replicas of a stage agree, as plans count it.

    A method is a frozen dataclass, and a text of its fields: ``NAME[:NUMBER][,FIELD=VALUE...]``. `__post_init__` raises
    a ValueError for a wrong value.

    Attributes:
        name: of a user's file, its path.
        text: what users write.
        number: what the first field is, a whole number from 1 on; '' if the text has no number.
        settings: what the text sets besides, in words.
    """

    approximates: ClassVar[bool] = True
    option = "sums"
    help = (
        "How the replicas of a stage agree: full gradients, gradients in 16 bits, low-rank gradients (powersgd), or "
        "weights averaged every H updates, as they are (every) or with an outer momentum (diloco)."
    )
    name: ClassVar[str]
    text: ClassVar[str]
    number: ClassVar[str] = ""
    settings: ClassVar[str] = "nothing"
    is_exact: ClassVar[bool] = False

    def costs(self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0) -> SumCosts:
        """Returns the costs of sums for some weights; for averages, the mean per update.

        Args:
            matrices: shapes of the weights; of older plans unknown.
            value_bytes: of a number.
        """
        return SumCosts()

    def check_profile(self, profile: Profile) -> None:
        if self.needs_shapes and not profile.matrices:
            raise PlanError(
                f"sums={str(self)!r} was asked for, but the profile does not say which shapes weights have; profile "
                "the model again"
            )

    def check_replicas(self, replicas: Sequence[int]) -> None:
        """Raises a `PlanError` if the method is approximate and no stage has replicas."""
        if not self.is_exact and max(replicas) == 1:
            raise PlanError(
                f"sums={str(self)!r} was asked for, but no stage of the plan {'-'.join(map(str, replicas))} has "
                "replicas; leave it out, or plan with replicas (data parallelism, or a shape such as 2-1)"
            )

    def on_replicas(self, replicas: Sequence[int]) -> Any:
        return self if max(replicas) > 1 else FullSum()

    def add_terms(self, terms: Terms, weights: Any, value_bytes: float) -> Terms:
        return terms._replace(sums=self.costs(weights.trained_bytes, weights.matrices, value_bytes))

    def describe(self, plan: Any) -> Iterator[str]:
        if not self.is_exact:
            pairs = zip(plan.stages, plan.costs.terms, strict=True)
            sizes = [format_bytes(row.trained_bytes * terms.sums.share) for row, terms in pairs if row.replicas > 1]
            yield f"sums: {self}, {', '.join(sizes)} an update in the mean (approximate)"

    @classmethod
    def list_texts(cls) -> str:
        return "|".join(list_sums())

    @classmethod
    def read(cls, text: Any) -> SumMethod:
        """Reads a user's choice, as `parse` does, and opens the file that it names."""
        if isinstance(text, SumMethod):
            return text
        name = _split_text(text)[0]
        if is_file(name):
            SUMS.open_file(name)
        return cls.parse(text)

    @classmethod
    def parse(cls, text: Any) -> SumMethod:
        """Reads a text such as ``powersgd:4``. Raises a `PlanError` if there is no such method."""
        name, number, settings = _split_text(text)
        if is_file(name) and not SUMS.has(name):
            return _UnopenedFile(str(text))
        kind = FullSum if name == FULL else SUMS.find(name) if SUMS.has(name) else None
        if kind is None or (not kind.number and (number is not None or settings)):
            raise PlanError(f"sums={text!r} is not known; write one of {', '.join(list_sums())}, or FILE.py with yours")
        return kind._of_parts(text, number or "", settings)

    @classmethod
    def _of_parts(cls, text: str, number: str, settings: Sequence[str]) -> Self:
        if not cls.number:
            return cls()
        if not (number.isdecimal() and int(number)):
            raise PlanError(f"sums={text!r} has no {cls.number}; write {cls.name}: and a whole number from 1 on")
        method = cls(int(number))  # type: ignore[call-arg]  # a subclass's field
        for setting in settings:
            key, _, value = setting.partition("=")
            try:
                method = replace(method, **{key: float(value)})
            except (TypeError, ValueError):
                raise PlanError(f"sums={text!r} has the setting {setting!r}; {cls.name} takes {cls.settings}") from None
        return method

    def encoded(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return repr(str(self))

    def __str__(self) -> str:
        number, *others = fields(self) if self.number else (None,)
        settings = [f",{f.name}={value:g}" for f in others if f and (value := getattr(self, f.name)) != f.default]
        return f"{self.name}{f':{getattr(self, number.name)}' if number else ''}{''.join(settings)}"

    def __reduce__(self) -> Any:  # a user's file is no module that another process can import
        return SumMethod.parse, (str(self),)


@dataclass(frozen=True, repr=False)
class FullSum(SumMethod):
    """Gradients are summed as they are, at each update."""

    name = text = FULL
    is_exact = True


@dataclass(frozen=True, repr=False)
class _UnopenedFile(SumMethod):
    """A file that a plan or a checkpoint names; it is refused once it is needed."""

    asked_text: str

    def __str__(self) -> str:
        return self.asked_text

    def check_opened(self) -> None:
        SUMS.find(_split_text(self.asked_text)[0])

    def costs(self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0) -> SumCosts:
        self.check_opened()
        return SumCosts()


SUMS: Door[type[SumMethod]] = Door("pipedream.extensions.reducers", "SUMS", "sum", "sums", PlanError)


def list_sums() -> list[str]:
    """Returns the texts of the library's methods, of averages last."""
    kinds = sorted(SUMS.named.values(), key=lambda kind: (kind.averages_weights, bool(kind.number)))
    return [FULL, *(kind.text for kind in kinds)]


def _split_text(text: Any) -> tuple[str, str | None, list[str]]:
    """Returns name, number and settings; a recipe may give anything."""
    head, *settings = str(text).split(",")
    name, has_number, number = head.partition(":")
    return name, number if has_number else None, settings
