"""What the file of a method declares beside its order: the names, the layout, the picture, the words for the gallery.

The registry reads `METHODS` of every file in this folder, and of a file of the user's whose path stands in place of a
name; so a further method is one further file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.layouts import Layout

__all__ = ["Method", "Picture"]


@dataclass(frozen=True)
class Picture:
    """What the gallery draws of a method.

    Attributes:
        title: above it.
        microbatches: m, of a minibatch; None for a method that does not split it.
        total: microbatches drawn.
    """

    title: str
    microbatches: int | None = None
    total: int = 12


@dataclass(frozen=True)
class Method:
    """A method, as `METHODS` of its file has it.

    Attributes:
        build: (plan, m or None for the method's own choice) -> schedule; raises ScheduleError for what it cannot do.
        name: that of `build` unless given.
        since: year of its paper, by which lists are ordered; 0 for a baseline.
        aliases: other names that papers use.
        layout: where each stage goes, if workers have several; None takes a plan of one stage a worker.
        compensates: it is another method with a compensation of delay, and that one in time and memory.
        picture: for the gallery.
        choose: when to choose it; Markdown.
    """

    build: Callable[[Plan, int | None], Schedule]
    _: KW_ONLY
    name: str = ""
    since: int = 0
    aliases: tuple[str, ...] = ()
    layout: Layout | None = None
    compensates: bool = False
    picture: Picture | None = None
    choose: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.build.__name__)
