"""Options that exclude each other: one table for Python and the command, one wording."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipedream import schedules
from pipedream.core.errors import PipelineError, PlanError
from pipedream.core.plan.choices import DEFAULTS

_DEFAULTS = {"shape": "any", "in_flight": "noam", "strategy": "simulate"}
_DEFAULTS |= {name: str(choice) or "none" for name, choice in DEFAULTS.named.items()}


def check_options(
    options: Mapping[str, Any],
    spell: Callable[[str, Any], str] | None = None,
    *,
    error: type[PipelineError] = PlanError,
) -> None:
    """Checks that no given option rules out another; `options` may omit some.

    Raises:
        PlanError, or `error`: names the two sides, the reason and what to do.
    """
    spell = spell or as_keyword
    for row in EXCLUSIONS:
        if _read_option(row.condition) not in options:
            continue
        excluded = [_read_option(condition) for condition in row.others.split() if _meets(condition, options)]
        if excluded and _meets(row.condition, options):
            option, others = _read_option(row.condition), [spell(name, options[name]) for name in excluded]
            listed = " and ".join([", ".join(others[:-1]), others[-1]] if len(others) > 1 else others)
            raise error(
                f"{spell(option, options[option])} was given with {listed}, but {row.reason}; "
                f"{row.advice.replace('OTHERS', listed)}"
            )


def as_keyword(name: str, value: Any) -> str:
    """Writes an option as a Python argument; a long value as dots."""
    text = repr(value)
    return f"{name}={text if len(text) <= 80 else '...'}"


def as_flag(name: str, value: Any) -> str:
    """Writes an option as a flag; a name in capitals is an argument."""
    if name == "shape":
        return f"--{value}" if value in ("straight", "data-parallel") else f"--config {value}"
    flag = name if name.isupper() else "--as" if name == "as_device" else f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    return f"{flag} {','.join(map(str, value)) if isinstance(value, tuple | list) else value}"


@dataclass(frozen=True)
class Exclusion:
    """An option that rules out others.

    Attributes:
        condition: ``option`` (is given, with another value than its default), ``option=a|b`` (has one of these values),
            ``option!=a|b`` (has another value that is not None), or ``option:has_property``, a property of
            `_PROPERTIES`.
        others: conditions of the options that are ruled out.
        advice: an imperative; OTHERS is replaced by the excluded options that were given.
    """

    condition: str
    others: str
    reason: str
    advice: str = "leave out OTHERS"


def _read_option(condition: str) -> str:
    return condition.partition(":")[0].partition("=")[0].rstrip("!")


def _meets(condition: str, options: Mapping[str, Any]) -> bool:
    name = _read_option(condition)
    if name not in options:
        return False
    value, rest = options[name], condition.removeprefix(name)
    if rest.startswith(":"):
        return _PROPERTIES[rest[1:]](value)
    if rest:
        is_listed = value in rest.lstrip("!=").split("|")
        return value is not None and is_listed != rest.startswith("!")
    return value not in (None, False, 0, "", (), [], _DEFAULTS.get(name))


def _has_replicas(shape: str | tuple[int, ...] | None) -> bool:
    counts = shape.split("-") if isinstance(shape, str) else shape or ()
    return shape == "data-parallel" or any(str(count).isdecimal() and int(count) > 1 for count in counts)


_PROPERTIES: dict[str, Callable[[Any], bool]] = {
    "has_replicas": _has_replicas,
    "lays_out_stages": lambda schedule: schedule != "auto" and schedules.stage_order_of(schedule) is not None,
    "has_one_stage_a_worker": lambda schedule: schedule != "auto" and schedules.stage_order_of(schedule) is None,
    "is_schedule_file": schedules.is_schedule_file,
}

_TABLE = """
straight | data_parallel config
    each of them sets the shape of the plan
    give one of them
data_parallel | config
    each of them sets the shape of the plan
    give one of them
cuts | shape=data-parallel
    cuts make several stages and data parallelism has one
    give the cuts alone, or with the replicas of each stage
strategy=2bw | shape cuts update_delay in_flight chunks activations
    PipeDream-2BW's planner chooses the stages and the depth itself
strategy=2bw | schedule!=pipedream|2bw|pipedream_2bw
    PipeDream-2BW's planner plans for pipedream_2bw only
    leave one of them out
schedule=auto | cuts chunks strategy=search
    the search for the fastest method chooses the stages
    leave out OTHERS, or name the method
explain | schedule!=auto
    it prints what a search for the fastest method compared
    leave it out, or ask for the schedule auto
allow_asynchronous | schedule!=auto
    it widens the search for the fastest method
    leave it out, or ask for the schedule auto
allow_approximate | strategy=2bw
    its planner knows neither encoded messages nor approximate sums
allow_approximate | messages sums
    it tries encodings and sums itself
schedule:lays_out_stages | shape!=any|pipeline cuts update_delay in_flight recompute=auto
    this method lays its stages out on all workers itself
schedule:has_one_stage_a_worker | chunks
    each worker of this method has one stage
schedule:is_schedule_file | shape:has_replicas update_delay
    a schedule in PyTorch's notation has no replicas
    leave out OTHERS; the file determines the shape
cluster | workers bandwidth latency
    the cluster determines these
    leave out OTHERS, or the cluster
plan | shape update_delay chunks cluster bandwidth latency memory mesh
    a plan has its own stages, workers, links and update delay
phases | schedule microbatches
    each phase has its own (and phases may also come from the recipe or the checkpoint)
    give each phase its own, as Phase('1f1b', until=200, microbatches=4) or as text, 1f1b/4:200
elastic | mesh
    a mesh that loses a rank cannot continue
    leave out OTHERS, or the elastic restart; --max-restarts starts all ranks again
PLAN | uniform stages chunks forward_s backward_s transfer_s
    a plan has its own stages and times, and these describe equal stages
    give one of the two
uniform | cluster
    a cluster is for the stages of a plan
    give the file of a plan with it
ranks | objective!=memory memory operations_per_s bandwidth fixed
    ranks divide tensors by halves, as Tofu does, and these choose what a mesh shards
    leave out OTHERS, or give a mesh
mesh | method!=recursive batch no_replicate
    these divide tensors by halves, as Tofu does
    leave out OTHERS, or give --ranks N in place of the mesh
device!=meta | as_device dtype
    only on the device meta are the times predicted and not measured
    leave out OTHERS, or profile on the device meta
device=meta | microbatches
    nothing runs on the device meta, so no microbatch can be measured
"""


EXCLUSIONS = tuple(
    Exclusion(*map(str.strip, re.split(r" \| |\n", row)))
    for table in (_TABLE, *(choice.exclusions for choice in DEFAULTS.named.values() if choice.exclusions))
    for row in re.split(r"\n(?! )", table.strip())
)
"""The rows of the table, and those of choices. The first that applies is reported."""
