"""Options that exclude each other: one table for Python and the command, one wording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipedream import schedules
from pipedream.core.errors import PipelineError, PlanError

Test = Callable[[Any], bool]
Spelling = Callable[[str, Any], str]

_DEFAULTS = {"shape": "any", "in_flight": "noam", "recompute": "never", "strategy": "simulate"}


@dataclass(frozen=True)
class Exclusion:
    """An option that rules out others.

    Attributes:
        applies: the values of it that do.
        others: the options ruled out, each with the values that are.
        advice: an imperative; OTHERS is replaced by those that were found.
    """

    option: str
    applies: Test
    others: Mapping[str, Test]
    reason: str
    advice: str


def check_options(
    options: Mapping[str, Any], spell: Spelling | None = None, *, error: type[PipelineError] = PlanError
) -> None:
    """Checks that no given option rules out another; one that is missing in `options` does not.

    Raises:
        PlanError, or `error`: names the two sides, the reason and what to do.
    """
    spell = spell or as_keyword
    for row in EXCLUSIONS:
        if row.option not in options:
            continue
        excluded = [name for name, is_refused in row.others.items() if name in options and is_refused(options[name])]
        if excluded and row.applies(options[row.option]):
            option, others = spell(row.option, options[row.option]), [spell(name, options[name]) for name in excluded]
            listed = " and ".join([", ".join(others[:-1]), others[-1]] if len(others) > 1 else others)
            raise error(f"{option} was given with {listed}, but {row.reason}; {row.advice.replace('OTHERS', listed)}")


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


def _test_given(*names: str) -> dict[str, Test]:
    """Returns tests of whether each option has another value than its default."""

    def is_given(name: str) -> Test:
        return lambda value: value not in (None, False, 0, "", (), [], _DEFAULTS.get(name))

    return {name: is_given(name) for name in names}


def _is_given(value: Any) -> bool:
    return value not in (None, False, "", ())


def _is(*values: Any) -> Test:
    return lambda value: value in values


def _is_not(*values: Any) -> Test:
    return lambda value: value not in values


def _lays_out(schedule: str) -> bool:
    return schedule != "auto" and schedules.layout_of(schedule) is not None


def _has_one_stage_a_worker(schedule: str) -> bool:
    return schedule != "auto" and schedules.layout_of(schedule) is None


def _has_replicas(shape: str | tuple[int, ...] | None) -> bool:
    counts = shape.split("-") if isinstance(shape, str) else shape or ()
    return shape == "data-parallel" or any(str(count).isdecimal() and int(count) > 1 for count in counts)


_LEAVE_OUT = "leave out OTHERS"

EXCLUSIONS = (
    Exclusion(
        "straight",
        _is_given,
        _test_given("data_parallel", "config"),
        "each of them sets the shape of the plan",
        "give one of them",
    ),
    Exclusion(
        "data_parallel", _is_given, _test_given("config"), "each of them sets the shape of the plan", "give one of them"
    ),
    Exclusion(
        "cuts",
        _is_given,
        {"shape": _is("data-parallel")},
        "cuts make several stages and data parallelism has one",
        "give the cuts alone, or with the replicas of each stage",
    ),
    Exclusion(
        "cost_model",
        _is("classic"),
        {
            "shape": _is_not("any", "straight"),
            **_test_given("cuts", "update_delay", "microbatches", "recompute", "chunks", "batch", "mesh"),
            "strategy": _is("2bw"),
        },
        "the planner of the original PipeDream has no such option",
        f"{_LEAVE_OUT}, or use the cost model pipedream",
    ),
    Exclusion(
        "strategy",
        _is("2bw"),
        _test_given("shape", "cuts", "update_delay", "in_flight", "chunks"),
        "PipeDream-2BW's planner chooses the stages and the depth itself",
        _LEAVE_OUT,
    ),
    Exclusion(
        "strategy",
        _is("2bw"),
        {"schedule": _is_not("pipedream", "2bw", "pipedream_2bw")},
        "PipeDream-2BW's planner plans for pipedream_2bw only",
        "leave one of them out",
    ),
    Exclusion(
        "schedule",
        _is("auto"),
        _test_given("cuts", "chunks"),
        "the search for the fastest method chooses the stages",
        f"{_LEAVE_OUT}, or name the method",
    ),
    Exclusion(
        "explain",
        _is_given,
        {"schedule": _is_not("auto")},
        "it prints what a search for the fastest method compared",
        "leave it out, or ask for the schedule auto",
    ),
    Exclusion(
        "allow_asynchronous",
        _is_given,
        {"schedule": _is_not("auto")},
        "it widens the search for the fastest method",
        "leave it out, or ask for the schedule auto",
    ),
    Exclusion(
        "schedule",
        _lays_out,
        {
            "shape": _is_not("any", "pipeline"),
            **_test_given("cuts", "update_delay", "in_flight"),
            "recompute": _is("auto"),
        },
        "this method lays its stages out on all workers itself",
        _LEAVE_OUT,
    ),
    Exclusion(
        "schedule",
        _has_one_stage_a_worker,
        _test_given("chunks"),
        "each worker of this method has one stage",
        _LEAVE_OUT,
    ),
    Exclusion(
        "schedule",
        schedules.is_torch_csv,
        {"shape": _has_replicas, **_test_given("update_delay")},
        "a schedule in PyTorch's notation has no replicas",
        f"{_LEAVE_OUT}; the file determines the shape",
    ),
    Exclusion(
        "batch",
        _is_given,
        {"PROFILE": lambda path: not str(path).endswith(".txt")},
        "a profile has its own minibatch size, and only a graph.txt has none",
        "leave the batch out",
    ),
    Exclusion(
        "cluster",
        _is_given,
        _test_given("workers", "bandwidth", "latency", "memory"),
        "the cluster determines these",
        f"{_LEAVE_OUT}, or the cluster",
    ),
    Exclusion(
        "plan",
        _is_given,
        _test_given("shape", "update_delay", "chunks", "cluster", "bandwidth", "latency", "memory", "mesh"),
        "a plan has its own stages, workers, links and update delay",
        _LEAVE_OUT,
    ),
    Exclusion(
        "phases",
        _is_given,
        _test_given("schedule", "microbatches"),
        "each phase has its own (and phases may also come from the recipe or the checkpoint)",
        "give each phase its own, as Phase('1f1b', until=200, microbatches=4) or as text, 1f1b/4:200",
    ),
    Exclusion(
        "elastic",
        _is_given,
        _test_given("mesh"),
        "a mesh that loses a rank cannot go on",
        f"{_LEAVE_OUT}, or the elastic restart; --max-restarts starts all ranks again",
    ),
    Exclusion(
        "PLAN",
        _is_given,
        _test_given("uniform", "stages", "chunks", "forward_s", "backward_s", "transfer_s"),
        "a plan has its own stages and times, and these describe equal stages",
        "give one of the two",
    ),
    Exclusion(
        "uniform",
        _is_given,
        _test_given("cluster"),
        "a cluster is for the stages of a plan",
        "give the file of a plan with it",
    ),
    Exclusion(
        "device",
        _is_not("meta"),
        _test_given("as_device", "dtype"),
        "only on the device meta are the times predicted and not measured",
        f"{_LEAVE_OUT}, or profile on the device meta",
    ),
    Exclusion(
        "device",
        _is("meta"),
        _test_given("microbatches"),
        "nothing runs on the device meta, so no microbatch can be measured",
        _LEAVE_OUT,
    ),
)
"""The table. The first row that applies is reported."""
