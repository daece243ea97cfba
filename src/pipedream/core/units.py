"""Reads and writes seconds, bytes and rates; elsewhere a number's unit is part of its name (``_s``, ``_bytes``).

Decimal prefixes: 1 kB is 1,000 bytes, as in the papers and on network cards.
"""

import math
import re
from typing import NamedTuple

from pipedream.core.errors import PlanError

MUCH_SLOWER = 1.1
"""Slowness from which on cores do not count as free."""

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_BITS = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*"


def parse_bytes(text: str | float) -> int:
    """Reads ``16e9``, ``512MB`` or ``2 GiB``. Raises ValueError: another text, or no positive size."""
    match = re.fullmatch(_NUMBER + r"([kKmMgGtT]i?)?[bB]?\s*", str(text))
    scale = {**_PREFIX, **_BINARY}
    size_bytes = float(match[1]) * scale[(match[2] or "").lower()] if match else 0.0
    if not 0 < size_bytes < math.inf:
        raise ValueError(f"{text!r} is not a size; write for example 16e9, 512MB or 2GiB")
    return int(size_bytes)


def parse_rate(text: str | float) -> float:
    """Reads ``1e9`` (bytes per second), ``1.25GB/s`` or ``10 Gbit/s`` as bytes per second.

    Raises:
        ValueError: any other text, or a rate that is not positive. ``Gb/s`` and ``Gbps`` are among these: bits to some,
            bytes to others.
    """
    match = re.fullmatch(_NUMBER + r"(?:([kKmMgGtT])?(bit|B)(?:/s|ps)?)?\s*", str(text))
    if match is None or not 0 < float(match[1]) < math.inf:
        ambiguous = re.fullmatch(_NUMBER + r"([kKmMgGtT])(?:b/s|bps|b)\s*", str(text))
        suggestion = f"; did you mean {ambiguous[1]}{ambiguous[2]}bit/s?" if ambiguous else ""
        raise ValueError(f"{text!r} is not a bandwidth; write for example 1e9, 1.25GB/s or 10Gbit/s{suggestion}")
    units_per_byte = 8.0 if match[3] == "bit" else 1.0
    return float(match[1]) * _PREFIX[(match[2] or "").lower()] / units_per_byte


class LinkSpeed(NamedTuple):
    """What a link carries in one direction, and the seconds from one end to the other: half of a round trip."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __str__(self) -> str:
        return format_link(*self)


def parse_link(text: str | float) -> LinkSpeed:
    """Reads a rate as `parse_rate` does, and after a plus the latency of one way: ``25mbit/s+50ms``.

    Raises:
        ValueError: no bandwidth, or a latency that is negative or has no unit (s, ms, us).
    """
    parts = re.fullmatch(r"(.*?[^eE])\+(.*)", str(text))  # not the plus of 1e+9
    if parts is None:
        return LinkSpeed(parse_rate(text))
    match = re.fullmatch(_NUMBER + "(s|ms|us)?\\s*", parts[2])
    if match is None or match[2] is None:
        suggestion = f"; did you mean {match[1]}ms?" if match else ""
        raise ValueError(f"{parts[2]!r} is not a latency; write for example 50ms or 0.05s{suggestion}")
    return LinkSpeed(parse_rate(parts[1]), float(match[1]) * _SECONDS[match[2]])


def format_bytes(value: float) -> str:
    """Returns three significant digits: ``1.34 MB``."""
    return _format_scaled(value, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def check_factor(what: str, factor: float) -> None:
    """Raises PlanError if a factor is not positive and finite."""
    if not 0 < factor < math.inf:
        raise PlanError(f"a {what} of {factor} was asked for; give a positive number")


def format_excess(excess: float) -> str:
    """Returns ``within 27 %`` for 0.27, ``within 2.8 times`` for 1.8."""
    return f"within {100 * excess:.2g} %" if excess < 1 else f"within {1 + excess:.2g} times"


def describe_slowness(slowness: float, whose: str) -> str:
    """Says which share of the cores other work took, given that ours took `slowness` times as long; '' if little."""
    return f"other work took {1 - 1 / slowness:.0%} of {whose} cores" if slowness > MUCH_SLOWER else ""


def format_number(value: float | None) -> str:
    """Returns a number with four significant digits, or as a whole number from 1000 on; '-' for None.

    >>> [format_number(value) for value in (12.0, 0.03125, 1234567, math.nan)]
    ['12', '0.03125', '1234567', 'nan']
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}"


def format_rate(value: float) -> str:
    """Returns three significant digits: ``1.25 GB/s``."""
    return format_bytes(value) + "/s"


def format_link(bytes_per_s: float, latency_s: float = 0.0) -> str:
    """Returns a rate in bits, as networks are sold, and the latency of one way if there is one.

    >>> format_link(50e6), format_link(1.25e9), format_link(3.125e6, 0.05)
    ('400 Mbit/s', '10 Gbit/s', '25 Mbit/s + 50 ms')
    """
    bits = 8 * bytes_per_s
    name, size = next((row for row in _BITS if bits >= row[1]), ("bit/s", 1.0))
    rate = f"{bits / size:.0f} {name}" if bits >= 1000 * size else f"{bits / size:.3g} {name}"
    return f"{rate} + {1e3 * latency_s:.3g} ms" if latency_s else rate


def format_seconds(value: float) -> str:
    """Returns three significant digits: ``2.41 ms``."""
    return _format_scaled(value, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def _format_scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return f"0 {next(name for name, size in units if size == 1.0)}"
    name, size = next((unit for unit in units if abs(value) >= unit[1]), units[-1])
    scaled = value / size
    digits = max(0, 2 - math.floor(math.log10(abs(scaled)))) if scaled else 0
    return f"{scaled:.{min(digits, 3)}f} {name}"


def shorten(path: str, max_length: int = 32) -> str:
    """Returns a module's path with at most `max_length` characters: ``model...layers.10.self_attn.q_proj``.

    The last parts, which distinguish a model's layers, remain.
    """
    if len(path) <= max_length:
        return path
    first, *rest = path.split(".")
    while rest and len(first) + 3 + len(".".join(rest)) > max_length:
        rest.pop(0)
    if rest:
        return f"{first}...{'.'.join(rest)}"
    half = (max_length - 3) // 2
    return f"{path[:half]}...{path[half + 3 - max_length :]}"
