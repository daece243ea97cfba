"""Choices: what a plan trades, exactness for bytes on the wire, seconds for memory.

The only place that reads the texts of a choice, and that decides whose text counts. A further choice is a further field
of `Choices`, of the user's options (`PlanRequest`, `ModelOptions`, `TrainingOptions`), and what reads it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipedream.core.artifact import NOT_STORED
from pipedream.core.errors import PlanError
from pipedream.core.flags import option
from pipedream.core.model.profile import Profile
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.host_memory import check_activations_room, check_host_memory
from pipedream.core.plan.message_encoding import MessageEncoding
from pipedream.core.plan.stage import Stage
from pipedream.core.plan.sum_method import FullSum, SumMethod, list_sums

ALWAYS, AUTOMATIC, NEVER = "always", "auto", "never"
RECOMPUTING = {NEVER: (False,), AUTOMATIC: (False, True), ALWAYS: (True,)}
"""Whether a stage may recompute, the faster way first. Automatic: only where it does not fit otherwise."""
DEVICE, HOST, NONE = "device", "host", "none"


def _read_activations(text: Any) -> str:
    if text in ("", NONE, HOST):
        return "" if text == NONE else str(text)
    if isinstance(text, str) and text.startswith("disk"):
        raise PlanError(
            f"activations={text!r} was asked for, and disks are no longer used; take schedule='roundpipe', "
            "recompute='auto' or more microbatches"
        )
    raise PlanError(f"activations={text!r} was asked for; give 'host' or 'none'")


def _read_optimizer_state(text: Any) -> str:
    if text not in (DEVICE, HOST):
        raise PlanError(f"optimizer_state={text!r} was asked for; give {DEVICE} or {HOST}")
    return str(text)


def _read_recompute(text: Any) -> str:
    if text is not True and text not in RECOMPUTING:
        raise PlanError(f"unknown recompute {text!r}; give {', '.join(RECOMPUTING)}")
    return ALWAYS if text is True else str(text)


def _choice(default: Any, read: Callable[[Any], Any], texts: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"parse": read, "texts": texts} | metadata)


@dataclass(frozen=True)
class Choices:
    """What a plan trades; each may be given as its text.

    Attributes:
        sums: how the replicas of a stage agree.
        messages: how messages between workers are encoded.
        activations: 'host' if those of the stages with `Stage.offload` wait in the memory of the machine.
        optimizer_state: 'host' if optimizers and their state are in the memory of the machine.
        recompute: which stages a search lets repeat their forward. In a plan its stages say it, and this is 'never'.

    Raises:
        PlanError: no such text.
    """

    sums: SumMethod = _choice(FullSum(), SumMethod.read, "|".join(list_sums()))
    messages: MessageEncoding = _choice(MessageEncoding(), MessageEncoding.read, "ENCODING[,ENCODING]")
    activations: str = _choice("", _read_activations, f"{NONE}|{HOST}")
    optimizer_state: str = _choice(DEVICE, _read_optimizer_state, f"{DEVICE}|{HOST}")
    recompute: str = _choice(NEVER, _read_recompute, "|".join(RECOMPUTING), **NOT_STORED)

    def __post_init__(self) -> None:
        for choice in fields(self):
            object.__setattr__(self, choice.name, choice.metadata["parse"](getattr(self, choice.name)))

    @classmethod
    def resolve(cls, *, command: Any = None, checkpoint: Any = None, plan: Any = None, recipe: Any = None) -> Choices:
        """Returns each choice of the first that makes it: the command, else the checkpoint, the plan, the recipe.

        Each of them has attributes or items of these names. What is missing, empty, or the default in `Choices`
        chooses nothing. A file that only the checkpoint or the plan names is refused.
        """
        texts: dict[str, Any] = {}
        for source in (recipe, plan, checkpoint, command):
            of_source = _list_texts(source)
            if cls(**of_source).recompute == ALWAYS:
                texts.pop("activations", None)  # only inputs would be left to move
            texts |= of_source
        choices = cls(**texts)
        choices.sums.check_opened()
        choices.messages.check_opened()
        return choices

    @property
    def hosts_optimizers(self) -> bool:
        return self.optimizer_state == HOST

    @property
    def recomputing(self) -> tuple[bool, ...]:
        """See `RECOMPUTING`."""
        return RECOMPUTING[self.recompute]

    @property
    def words(self) -> dict[str, Any]:
        """The texts of those that are not the default."""
        return {name: str(value) for name, value in _list_texts(self).items()}

    @property
    def approximations(self) -> str:
        """The approximate ones, as a user writes them; '' if the result is that of one process."""
        return ", ".join(f"{name}={text}" for name, text in self.words.items() if name in ("sums", "messages"))

    @property
    def exact(self) -> Choices:
        """The choices without the approximate ones."""
        return replace(self, sums=FullSum(), messages=MessageEncoding())

    def terms(self, weights: Stage | Profile) -> Terms:
        """Returns what the choices cost; for a model, in the mean over its stages."""
        sums = self.sums.costs(weights.trained_bytes, weights.matrices, self.messages.value_bits / 8)
        return Terms(sums, self.messages.shares)

    def of_values(self, bits: int) -> Choices:
        """Returns the choices for a model whose values have this many bits."""
        return replace(self, messages=replace(self.messages, value_bits=bits))

    def check(self, replicas: Sequence[int]) -> None:
        """Raises a `PlanError` for stages with these replicas."""
        self.sums.check_replicas(replicas)

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
        if self.activations:
            free_bytes -= check_activations_room(sum(stage.memory.moved_bytes for stage in stages), free_bytes)
        if versions is not None or self.hosts_optimizers:
            check_host_memory(stages, versions, free_bytes, gradient_sets)

    def of_plan(self, replicas: Sequence[int]) -> Choices:
        """Returns the choices of a new plan with these replicas, which moves no activations yet."""
        return replace(self.on_replicas(replicas), activations="", recompute=NEVER)

    def on_replicas(self, replicas: Sequence[int]) -> Choices:
        """Returns the choices that have a meaning for stages with these replicas."""
        return self if max(replicas) > 1 else replace(self, sums=FullSum())


def _list_texts(source: Any) -> dict[str, Any]:
    values = {
        choice.name: source.get(choice.name) if isinstance(source, Mapping) else getattr(source, choice.name, None)
        for choice in fields(Choices)
    }
    if isinstance(source, Choices):
        values = {c.name: values[c.name] for c in fields(source) if str(values[c.name]) != str(c.default)}
    return {name: value for name, value in values.items() if value}


DEFAULTS = Choices()


class Chooser:
    """Options with some of the texts of `Choices`."""

    @property
    def choices(self) -> Choices:
        return Choices.resolve(command=self)

    def check_choices(self) -> None:
        """Raises a `PlanError` if a text is not known."""
        _ = self.choices


def option_of_choice(name: str, default: Any, help: str, **settings: Any) -> Any:
    """Declares the option of a choice, see `core.flags.option`."""
    texts = Choices.__dataclass_fields__[name].metadata["texts"]
    return option(default, help, metavar=texts, **settings)
