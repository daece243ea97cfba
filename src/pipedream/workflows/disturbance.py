"""Whether other work has disturbed the measurement of a profile, so that it decides nothing."""

from pipedream.core.model.profile import Profile
from pipedream.core.units import describe_slowness, format_seconds

_DISTURBED = "other work disturbed the measurement"
_MUCH_SLOWER_THREADS = 1.5
"""Threads of a pass wait for the slowest. If it waits for a core, milliseconds are added to passes of microseconds: at
a slowness of 1.9, small layers took 2 to 3 times as long, at 4 more than 100 times. One thread alone took 1.2 times."""


def describe_disturbance(profile: Profile, slowness: float, threads: int) -> str:
    """Returns a note for a profile whose seconds may be many times too long; '' for others.

    Args:
        slowness: of the process that measured, see `CoreTimes`.
        threads: that computed together.
    """
    seconds = profile.forward_s + profile.backward_s
    spread_s = sum(layer.forward_spread_s + layer.backward_spread_s for layer in profile.layers)
    if spread_s > seconds:
        sign = f"runs were {format_seconds(spread_s)} apart, at medians of {format_seconds(seconds)}"
    elif threads > 1 and slowness > _MUCH_SLOWER_THREADS:
        sign = f"{threads} threads waited for each other, and {describe_slowness(slowness, 'their')}"
    else:
        return ""
    return f"{_DISTURBED}: {sign}; profile again on free cores, or with OMP_NUM_THREADS=1"


def find_doubt(profile: Profile) -> str:
    """Returns that note of a profile; '' if it has none."""
    return next((note for note in profile.notes if note.startswith(_DISTURBED)), "")
