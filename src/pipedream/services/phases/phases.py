"""Phases: a run may change its method at a drain (docs/exact_rules.md, Phases).

PipeMare trains its first epochs synchronously (Yang et al., MLSys 2021, T3); Zhang & Abdelrahman (2021) end an
asynchronous run synchronously.

As text, phases are ``1f1b/4:200,pipedream+spike:3e,1f1b/4``: a method; ``/`` and its microbatches; ``+`` and a
compensation (``+t1=500``, repeated for several, ``+none``); ``:`` and its end, in minibatches or epochs (e) since the
start of training. A method may be ``FILE.csv``, ``FILE.py`` or ``FILE.py:NAME``, and have options,
``paci[backward_rule=recompute]/4:200``. A Schedule object is ``<NAME>``, which cannot be read back.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.delay_compensation import Compensation, compensations
from pipedream.core.schedule.method_text import OPTIONS, split_list
from pipedream.core.schedule.schedule import Schedule

_METHOD = r"[A-Za-z0-9_-]+|.+?\.(?i:csv|py)(?::[A-Za-z_][A-Za-z0-9_-]*)?"
_PHASE = re.compile(rf"((?:{_METHOD}){OPTIONS})(?:/(\d+))?((?:\+[A-Za-z0-9_.=-]+)*)(?::(\d+)(e?))?")


@dataclass(frozen=True)
class Phase:
    """One phase of a run.

    Attributes:
        schedule: a method's name, a file that declares one, or a Schedule.
        until: minibatches since the start of training at which it ends; rounded up to whole rounds of replicas.
        until_epoch: the same in epochs. Every phase but the last has exactly one of the two.
        microbatches: parts of a minibatch; None for the method's own number.
        compensation: one or several, or their texts; () for none, None for the method's own.

    Raises:
        ScheduleError: an unknown compensation, or a count below 1.
    """

    schedule: str | Schedule
    until: int | None = None
    until_epoch: int | None = None
    microbatches: int | None = None
    compensation: Any = None

    def __post_init__(self) -> None:
        for name in ("until", "until_epoch", "microbatches"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                of = f" of {self.name}" if self.name else ""
                raise ScheduleError(f"a phase{of} with {name}={value!r} was asked for; give a count from 1 on")
        if self.compensation is not None:
            object.__setattr__(self, "compensation", compensations(self.compensation))

    @property
    def name(self) -> str:
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    def __str__(self) -> str:
        name = self.name if isinstance(self.schedule, str) else f"<{self.name}>"
        microbatches = "" if self.microbatches is None else f"/{self.microbatches}"
        rules = () if self.compensation is None else self.compensation or ("none",)
        texts = "".join(f"+{rule}" for rule in rules).replace(":", "=")
        end = "" if self.until is None else f":{self.until}"
        return f"{name}{microbatches}{texts}{end if self.until_epoch is None else f':{self.until_epoch}e'}"


def phases_text(phases: Sequence[Phase]) -> str:
    """Returns the text that `read_phases` reads."""
    return ",".join(map(str, phases))


def read_phases(text: str) -> tuple[Phase, ...]:
    """Reads phases from text.

    Raises:
        ScheduleError: the text is malformed, or see `check_phases`.
    """
    phases = []
    for part in split_list(text):
        match = _PHASE.fullmatch(part.strip())
        if part.strip().startswith("<"):
            raise ScheduleError(
                f"phase {part.strip()!r} was a Schedule object, which cannot be read from text; give the same phases "
                "again (in the recipe, or phases=...)"
            )
        if match is None:
            raise ScheduleError(
                f"phase {part.strip()!r} is not known; write METHOD[/MICROBATCHES][+COMPENSATION[=NUMBER]][:END], "
                "where END is a count of minibatches or, followed by e, of epochs, and METHOD may have options: "
                "1f1b/4:200,paci[backward_rule=recompute]/4+spike:3e,1f1b/4"
            )
        name, microbatches, compensations_text, end, of_epochs = match.groups()
        # Not by `compensations`: the text may be a checkpoint's, which opens no file.
        texts = [item.replace("=", ":") for item in compensations_text.split("+")[1:]]
        phase = Phase(
            name,
            microbatches=int(microbatches) if microbatches else None,
            compensation=None if not texts else () if texts == ["none"] else tuple(map(Compensation.of_text, texts)),
        )
        if end:
            phase = replace(phase, until_epoch=int(end)) if of_epochs else replace(phase, until=int(end))
        phases.append(phase)
    return check_phases(phases)


def check_phases(phases: Any) -> tuple[Phase, ...]:
    """Returns the phases, if they can follow each other.

    Raises:
        ScheduleError: it is no list of `Phase`, there is none, one has no end, two ends or an early one, or the last
            one has an end.
    """
    if not isinstance(phases, Sequence) or not all(isinstance(phase, Phase) for phase in phases):
        raise ScheduleError(f"phases is {phases!r}, neither a text nor a list of Phase")
    if not phases:
        raise ScheduleError("a run without phases was asked for; give at least one")
    *others, last = phases
    if last.until is not None or last.until_epoch is not None:
        raise ScheduleError(f"the last phase, {last}, ends before the run; leave its end out, or give a phase after it")
    for phase in others:
        if (phase.until is None) == (phase.until_epoch is None):
            raise ScheduleError(
                f"phase {phase} needs one end, in minibatches or in epochs: until=N or until_epoch=N, as text "
                f"{phase.name}:N or {phase.name}:Ne"
            )
    for unit in ("until", "until_epoch"):
        ends = [0, *(end for phase in others if (end := getattr(phase, unit)) is not None)]
        if any(after <= before for before, after in pairwise(ends)):
            raise ScheduleError(
                f"the phases {phases_text(phases)} end at {ends[1:]}; these are counts since the start of training, "
                "so each must be greater than the one before"
            )
    return tuple(phases)
