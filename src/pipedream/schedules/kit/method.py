"""What a method's file declares besides its order, in `METHODS`: the registry needs no other change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.kit.layouts import StageOrder


@dataclass(frozen=True)
class Picture:
    """What the gallery draws of a method: `total` microbatches, m of them in a minibatch (None: not split)."""

    title: str
    microbatches: int | None = None
    total: int = 12


@dataclass(frozen=True)
class Method:
    """A method, as declared in `METHODS` of its file.

    Attributes:
        build: (plan, m or None for the method's own choice) -> schedule; raises ScheduleError for what it cannot do.
            Its keyword-only parameters are the method's options.
        name: by default that of `build`.
        since: year of its paper, by which lists are ordered; 0 for a baseline.
        aliases: other names that papers use.
        compensates: another method plus a compensation of delay.
        properties: with options at their defaults. None: derived from small schedules (`properties_of`).
        choose: when to choose it; Markdown.
    """

    build: Callable[[Plan, int | None], Schedule]
    _: KW_ONLY
    name: str = ""
    since: int = 0
    aliases: tuple[str, ...] = ()
    layout: StageOrder | None = None
    compensates: bool = False
    properties: MethodProperties | None = None
    picture: Picture | None = None
    choose: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.build.__name__)
