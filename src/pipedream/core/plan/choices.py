"""Choices: what a plan trades, exactness for bytes on the wire, seconds for memory.

The only place that decides whose text counts. Each file of `extensions/choices/` declares further choices, by their
defaults: ``CHOICES = (Packing("none"),)``. They are fields of `Choices` and of the user's options, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, TypeVar, cast

from pipedream.core.artifact import NOT_STORED
from pipedream.core.extensions import import_folder
from pipedream.core.flags import Panel, option
from pipedream.core.model.profile import Profile
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.choice import Choice
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.message_encoding import MessageEncoding
from pipedream.core.plan.residence import DEVICE, NEVER, Activations, OptimizerState, Recomputation
from pipedream.core.plan.stage import Stage
from pipedream.core.plan.sum_method import FullSum, SumMethod

_Options = TypeVar("_Options")


def _choice(default: Choice, **metadata: Any) -> Any:
    return field(default=default, metadata=metadata)


def with_further_choices(make: Callable[[Choice], Any]) -> Callable[[type[_Options]], type[_Options]]:
    """Returns a decorator that gives a frozen dataclass a field for each choice of `extensions/choices/`.

    `make` makes it of the default. Type checkers do not know these fields.
    """

    def extend(options: type[_Options]) -> type[_Options]:
        offered = [choice for module in import_folder("pipedream.extensions.choices") for choice in module.CHOICES]
        columns = [(choice.option, Any, make(choice)) for choice in offered]
        extended = make_dataclass(options.__name__, columns, bases=(options,), frozen=True, kw_only=True)
        extended.__module__ = options.__module__
        return extended if columns else options

    return extend


@with_further_choices(_choice)
@dataclass(frozen=True)
class Choices:
    """What a plan trades; each may be given as its text.

    Attributes:
        sums: how the replicas of a stage agree.
        messages: how messages between workers are encoded.
        recompute: which stages a search lets repeat their forward. In a plan its stages say it, and this is 'never'.
        activations: 'host' if those of the stages with `Stage.offload` wait in the memory of the machine.
        optimizer_state: 'host' if optimizers and their state are in the memory of the machine.

    Raises:
        PlanError: no such text.
    """

    sums: SumMethod = _choice(FullSum())
    messages: MessageEncoding = _choice(MessageEncoding())
    recompute: Recomputation = _choice(Recomputation(NEVER), **NOT_STORED)
    activations: Activations = _choice(Activations(""))
    optimizer_state: OptimizerState = _choice(OptimizerState(DEVICE))

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                object.__setattr__(self, name, kind.read(value))

    @property
    def named(self) -> dict[str, Choice]:
        """Each choice by its name."""
        return {name: getattr(self, name) for name in KINDS}

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
        return self.choosing(recompute=DEFAULTS.recompute)

    @property
    def moves_activations(self) -> bool:
        return any(choice.moves_activations for choice in self.named.values())

    @property
    def hosts_optimizers(self) -> bool:
        return any(choice.hosts_optimizers for choice in self.named.values())

    @property
    def stored(self) -> Choices:
        """Those that a plan keeps beside its stages."""
        names = {name for name, kind in KINDS.items() if not kind.is_stored}.union(self.overridden)
        return self.choosing(**{name: DEFAULTS.named[name] for name in names})

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
        return ", ".join(f"{name}={text}" for name, text in self.words.items() if KINDS[name].approximates)

    @property
    def exact(self) -> Choices:
        """The choices without the approximate ones."""
        return self.choosing(**{name: DEFAULTS.named[name] for name, kind in KINDS.items() if kind.approximates})

    def terms(self, weights: Stage | Profile) -> Terms:
        """Returns what the choices cost; for a model, in the mean over its stages."""
        terms, value_bytes = Terms(), self.messages.value_bits / 8
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
        return replace(self, messages=replace(self.messages, value_bits=bits))

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
        return tuple(stages)

    def of_plan(self, replicas: Sequence[int]) -> Choices:
        """Returns the choices of a new plan with these replicas, which moves no activations yet."""
        defaults = {name: DEFAULTS.named[name] for name, kind in KINDS.items() if kind.is_searched}
        return self.on_replicas(replicas).choosing(**defaults)

    def on_replicas(self, replicas: Sequence[int]) -> Choices:
        """Returns the choices that have a meaning for stages with these replicas."""
        return self.choosing(**{name: choice.on_replicas(replicas) for name, choice in self.named.items()})

    def choosing(self, **texts: Any) -> Choices:
        """Returns the choices with some made otherwise, by their texts."""
        return replace(self, **texts)


KINDS: dict[str, type[Choice]] = {choice.name: type(cast(Choice, choice.default)) for choice in fields(Choices)}
"""Name -> kind of the choice."""


def _list_texts(source: Any) -> dict[str, Any]:
    values = {
        choice.name: source.get(choice.name) if isinstance(source, Mapping) else getattr(source, choice.name, None)
        for choice in fields(Choices)
    }
    if isinstance(source, Choices):
        values = {c.name: values[c.name] for c in fields(source) if str(values[c.name]) != str(c.default)}
    return {name: value for name, value in values.items() if value}


DEFAULTS = Choices()


def option_of_choice(name: str, default: Any, help: str, **settings: Any) -> Any:
    """Declares the option of a choice, see `core.flags.option`."""
    return option(default, help, metavar=KINDS[name].list_texts(), **settings)


@with_further_choices(
    lambda choice: option_of_choice(choice.option, None, choice.help, unset=str(choice), kind=str, panel=Panel.METHOD)
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
