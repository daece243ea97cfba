"""Files of schedules, in the notations that extensions offer: a suffix chooses the notation."""

from pathlib import Path
from types import ModuleType

from pipedream.core.errors import ScheduleError
from pipedream.core.extensions import list_offers
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.schedule import Schedule


def is_schedule_file(name: str) -> bool:
    """Returns whether a method's name is a file in one of the notations."""
    return _find_notation(name) is not None


def load_schedule(name: str | Path, plan: Plan | None = None) -> Schedule:
    """Reads a file; the schedule has its name.

    Args:
        plan: its stages, on the same ranks; None for equal stages (`Plan.uniform`).

    Raises:
        ScheduleError: the file cannot be used.
    """
    schedule: Schedule = _choose_notation(str(name)).load(name, plan)
    return schedule


def format_schedule(schedule: Schedule, suffix: str) -> str:
    """Returns one minibatch of a schedule in the notation of a suffix.

    Raises:
        ScheduleError: the notation cannot express it.
    """
    text: str = _choose_notation(suffix).write(schedule)
    return text


def _find_notation(name: str) -> ModuleType | None:
    return next((offer for offer in list_offers("notation") if name.lower().endswith(offer.SUFFIX)), None)


def _choose_notation(name: str) -> ModuleType:
    notation = _find_notation(name)
    if notation is None:
        raise ScheduleError(f"the schedule {name} was given, but no extension here reads such files; give a method")
    return notation
