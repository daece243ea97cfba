"""Choices: what a plan trades, exactness for bytes on the wire, seconds for memory.

The only place that decides whose text counts. Each file of `extensions/choices/` declares choices, by their defaults:
``CHOICES = (Packing("none"),)``. They are fields of `Choices` and of the user's options, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from pipedream.core.artifact import NOT_STORED
from pipedream.core.extensions import import_folder
from pipedream.core.flags import Panel, option
from pipedream.core.model.profile import Profile, with_longer_backward
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.choice import Choice, PlainChoice
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.stage import Stage
from pipedream.core.plan.sum_method import FullSum

_Options = TypeVar("_Options")

_IN_FILES = (
    FullSum(),
    PlainChoice("messages", "full"),
    PlainChoice("recompute", "never", is_stored=False),
    PlainChoice("activations", ""),
    PlainChoice("optimizer_state", "device"),
)
"""The choices of every plan's file, in its order, where no extension offers them."""


def _list_choices() -> dict[str, Choice]:
    """Returns the default of each choice by its name."""
    offered = [choice for module in import_folder("pipedream.extensions.choices") for choice in module.CHOICES]
    return {choice.option: choice for choice in (*_IN_FILES, *offered)}


_DEFAULTS = _list_choices()


def _with_fields(columns: Iterable[tuple[str, Any, Any]]) -> Callable[[type[_Options]], type[_Options]]:
    """Returns a decorator that gives a frozen dataclass further fields, each by its name, type and default."""

    def extend(options: type[_Options]) -> type[_Options]:
        names = {"__module__": options.__module__, "__doc__": options.__doc__}
        return make_dataclass(options.__name__, columns, bases=(options,), namespace=names, frozen=True, kw_only=True)

    return extend


def _store_choices() -> Iterator[tuple[str, Any, Any]]:
    for name, choice in _DEFAULTS.items():
        kind = Any if isinstance(choice, PlainChoice) else type(choice)
        yield name, kind, field(default=choice, metadata={} if choice.is_stored else NOT_STORED)


@_with_fields(_store_choices())
@dataclass(frozen=True)
class Choices:
    """What a plan trades, a field for each choice; each may be given as its text.

    Raises:
        PlanError: no such text.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            if not isinstance(value := getattr(self, name), type(default)):
                object.__setattr__(self, name, default.read(value))

    @property
    def named(self) -> dict[str, Choice]:
        """Each choice by its name."""
        return {name: getattr(self, name) for name in _DEFAULTS}

    @classmethod
    def resolve(cls, *, command: Any = None, checkpoint: Any = None, plan: Any = None, recipe: Any = None) -> Choices:
        """Returns each choice of the first that makes it: the command, else the checkpoint, the plan, the recipe.

        Each of them has attributes or items of these names. What is missing, empty, or the default in `Choices`
        chooses nothing. A file that only the checkpoint or the plan names is refused.
        """
        texts: dict[str, Any] = {}
        for source in (recipe, plan, checkpoint, command):
            of_source = _list_texts(source)
            overridden = cls(**of_source).overridden
            texts = {name: text for name, text in texts.items() if name not in overridden} | of_source
        choices = cls(**texts)
        for choice in choices.named.values():
            choice.check_opened()
        return choices

    @property
    def recomputing(self) -> tuple[bool, ...]:
        """See `Choice.recomputing`."""
        ways = (choice.recomputing for choice in self.named.values())
        return next((way for way in ways if any(way)), (False,))

    @property
    def without_recomputation(self) -> Choices:
        return self.choosing(recompute=_DEFAULTS["recompute"])

    @property
    def backward_share(self) -> float:
        """Seconds of a backward for each second of the profile's."""
        return prod(choice.backward_share for choice in self.named.values())

    @property
    def moves_activations(self) -> bool:
        return any(choice.moves_activations for choice in self.named.values())

    @property
    def hosts_optimizers(self) -> bool:
        return any(choice.hosts_optimizers for choice in self.named.values())

    @property
    def stored(self) -> Choices:
        """Those that a plan keeps beside its stages."""
        names = {name for name, choice in _DEFAULTS.items() if not choice.is_stored}.union(self.overridden)
        return self.choosing(**{name: _DEFAULTS[name] for name in names})

    @property
    def overridden(self) -> list[str]:
        """Names of choices that have no meaning beside others."""
        return [name for choice in self.named.values() for name in choice.overrides]

    @property
    def words(self) -> dict[str, Any]:
        """The texts of those that are not the default."""
        return {name: str(value) for name, value in _list_texts(self).items()}

    @property
    def approximations(self) -> str:
        """The approximate ones, as a user writes them; '' if the result is that of one process."""
        return ", ".join(f"{name}={text}" for name, text in self.words.items() if _DEFAULTS[name].approximates)

    @property
    def exact(self) -> Choices:
        """The choices without the approximate ones."""
        return self.choosing(**{name: choice for name, choice in _DEFAULTS.items() if choice.approximates})

    def terms(self, weights: Stage | Profile) -> Terms:
        """Returns what the choices cost; for a model, in the mean over its stages."""
        terms, value_bytes = Terms(), self.value_bits / 8
        for choice in self.named.values():
            terms = choice.add_terms(terms, weights, value_bytes)
        return terms

    def add_costs(self, runtime: RuntimeCosts) -> RuntimeCosts:
        """Returns a worker's costs with those of the choices."""
        for choice in self.named.values():
            runtime = choice.add_costs(runtime)
        return runtime

    def list_smaller(self, *, on_gpus: bool) -> dict[str, str]:
        """Returns the texts of single choices that may save a worker's memory where a plan does not fit."""
        texts = {name: choice.suggest_smaller(self, on_gpus=on_gpus) for name, choice in self.named.items()}
        return {name: text for name, text in texts.items() if text}

    def describe(self, plan: Any) -> list[str]:
        """Returns lines for the description of a `Plan`."""
        return [line for choice in self.named.values() for line in choice.describe(plan)]

    def of_values(self, bits: int) -> Choices:
        """Returns the choices for a model whose values have this many bits."""
        return self.choosing(**{name: choice.of_values(bits) for name, choice in self.named.items()})

    @property
    def value_bits(self) -> int:
        """Bits of a value of the model, 32 if nothing depends on them."""
        return max(choice.value_bits for choice in self.named.values()) or 32

    def check(self, replicas: Sequence[int]) -> None:
        """Raises a `PlanError` for stages with these replicas."""
        for choice in self.named.values():
            choice.check_replicas(replicas)

    def check_profile(self, profile: Profile) -> None:
        """Raises a `PlanError` if a profile lacks what the costs depend on."""
        for choice in self.named.values():
            choice.check_profile(profile)

    def check_device(self, device: str, plan: Any = None) -> None:
        """Raises a `PlanError` if workers on such a device cannot do what a plan, or without one the user, chooses."""
        for choice in self.named.values():
            choice.check_device(device, plan)

    def check_machine(
        self,
        stages: Sequence[Stage],
        free_bytes: int | None,
        versions: Sequence[int] | None = None,
        gradient_sets: int = 1,
    ) -> None:
        """Raises a `PlanError` if a machine has too little memory, besides its workers', for what stages keep there.

        Args:
            free_bytes: None if unknown.
            versions: sets of weights of each stage, if ranks share them there.
            gradient_sets: see `Rules.gradient_sets`.
        """
        if free_bytes is None:
            return
        for choice in self.named.values():
            free_bytes = choice.check_machine(stages, free_bytes, versions, gradient_sets)

    def change_stages(self, stages: Sequence[Stage], before: Choices) -> tuple[Stage, ...]:
        """Returns the stages of a finished plan, in which these are chosen in place of those `before`."""
        for name, choice in self.named.items():
            stages = [choice.change_stage(stage, before.named[name]) for stage in stages]
        factor = self.backward_share / before.backward_share
        return tuple(stages if factor == 1 else (with_longer_backward(stage, factor) for stage in stages))

    def of_plan(self, replicas: Sequence[int]) -> Choices:
        """Returns the choices of a new plan with these replicas, which moves no activations yet."""
        defaults = {name: choice for name, choice in _DEFAULTS.items() if choice.is_searched}
        return self.on_replicas(replicas).choosing(**defaults)

    def on_replicas(self, replicas: Sequence[int]) -> Choices:
        """Returns the choices that have a meaning for stages with these replicas."""
        return self.choosing(**{name: choice.on_replicas(replicas) for name, choice in self.named.items()})

    def choosing(self, **texts: Any) -> Choices:
        """Returns the choices with some made otherwise, by their texts."""
        return replace(self, **texts)


DEFAULTS = Choices()


def _list_texts(source: Any) -> dict[str, Any]:
    get = source.get if isinstance(source, Mapping) else partial(getattr, source)
    values = {name: get(name, None) for name in _DEFAULTS}
    if isinstance(source, Choices):
        values = {name: value for name, value in values.items() if str(value) != str(_DEFAULTS[name])}
    return {name: value for name, value in values.items() if value}


def option_of_choice(name: str, default: Any, **settings: Any) -> Any:
    """Declares the option of a choice, see `core.flags.option`."""
    choice = _DEFAULTS[name]
    return option(default, choice.help, metavar=choice.list_texts(), **settings)


_FURTHER = _DEFAULTS.keys() - {choice.option for choice in _IN_FILES}


@_with_fields(
    (name, Any, option_of_choice(name, None, unset=str(choice), kind=str, panel=Panel.METHOD))
    for name, choice in _DEFAULTS.items()
    if name in _FURTHER
)
@dataclass(frozen=True, kw_only=True)
class Chooser:
    """Options with texts of `Choices`: those of all further ones, and some of the others."""

    @property
    def choices(self) -> Choices:
        return Choices.resolve(command=self)

    def check_choices(self) -> None:
        """Raises a `PlanError` if a text is not known."""
        _ = self.choices
