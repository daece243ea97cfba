"""A method in a file of the user's: drawn, proved, simulated, planned for and run by its path."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from programs import program_of

import pipedream as pd

from .test_pictures import picture

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "schedules" / "two_by_two.py"

SHARED = """
from pipedream.schedules import Method, build, method_of
from pipedream.schedules.kit.method import looped

def mine(plan, microbatches=None):
    return build("interleaved_1f1b", plan, microbatches)

METHODS = (Method(mine, stage_order=looped), Method(method_of("gpipe").build, name="other"))
"""

RunCommand = Callable[..., tuple[int, str, str]]
HEAD = "from pipedream.schedules import Method\n"
ORDER = """from dataclasses import replace
from pipedream.schedules import Method, build
def mine(plan, m):
    return replace(build("1f1b", plan, 4), order=lambda rank: {})
METHODS = (Method(mine),)
"""


def test_the_example_is_drawn_as_its_file_says_and_proved() -> None:
    schedule = pd.schedules.build(str(EXAMPLE), pd.Plan.uniform(2), 4)
    shown = [line.strip() for line in EXAMPLE.read_text().splitlines() if line.strip().startswith("rank ")]
    assert shown == picture(schedule, 10)
    proof = pd.verify(pd.lower(pd.schedules.build(str(EXAMPLE), pd.Plan.uniform(3, replicas=(2, 1, 1)), 8)))
    assert (proof.peak_in_flight, set(proof.staleness)) == ((4, 4, 4, 2), {0})
    assert pd.lower(pd.schedules.build(schedule.name, schedule.plan, schedule.microbatches)) == pd.lower(schedule)


def test_one_of_several_is_named(tmp_path: Path, run_command: RunCommand) -> None:
    file = tmp_path / "several.py"
    file.write_text(SHARED)
    mine, other = f"{file}:mine", f"{file}:other"
    assert pd.schedules.stage_order_of(mine) == pd.schedules.stage_order_of("interleaved")
    assert pd.schedules.stage_order_of(other) is None
    assert pd.schedules.build(mine, pd.schedules.uniform(mine, 2), 4).order(0) is not None
    assert replace(program_of(other, pd.Plan.uniform(2), 4), name="gpipe") == program_of("gpipe", pd.Plan.uniform(2), 4)
    with pytest.raises(pd.errors.ScheduleError, match=r"should be one method, .*several.py declares mine, other"):
        pd.schedules.method_of(str(file))
    with pytest.raises(pd.errors.ScheduleError, match="declares mine, other"):
        pd.schedules.method_of(f"{file}:third")
    status, out, _ = run_command("show", mine, "--stages", 2, "--chunks", 3, "--json")
    assert (status, len(json.loads(out)["grid"])) == (0, 3)  # a line for the time, one a worker


def test_a_file_is_read_again_where_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = f"{HEAD}from pipedream.schedules import method_of\nMETHODS = (Method(method_of('{{}}').build, name='mine'),)"
    for name in ("gpipe", "1f1b", "naive", "zb_h1", "zb_h2"):  # within a second, and the last two of one length
        file.write_text(text.format(name))
        assert not (tmp_path / "__pycache__").exists()
        program = program_of(str(file), pd.Plan.uniform(2), 4)
        assert replace(program, name=name) == program_of(name, pd.Plan.uniform(2), 4)


def test_a_method_needs_one_import() -> None:
    """All that the built-in methods import from the kit is in `pipedream.schedules`."""
    assert set(pd.schedules.kit.__all__) <= set(pd.schedules.__all__)
    assert not [name for name in pd.schedules.__all__ if not hasattr(pd.schedules, name)]
    assert EXAMPLE.read_text().count("from pipedream") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("METHODS = ()", "declares none"),
        ("METHODS = [1]", "must be a tuple of Method, found"),
        (
            "raise KeyError('there')",
            r"failed with KeyError: 'there' \(at wrong.py:1 in <module>: raise .*\); fix the file",
        ),
        ("import", "failed with SyntaxError"),
        (HEAD + "METHODS = (Method(lambda plan, m: 3, name='mine'),)", "returned 3, not a Schedule"),
        (HEAD + "METHODS = (Method(lambda: 3, name='mine'),)", "failed with TypeError: .* 0 positional arguments"),
        (ORDER.format("iter([1 // rank])"), r"wrong.py failed with ZeroDivisionError: .* \(at wrong.py:4 in <lambda>"),
        (ORDER.format("[3]"), "yielded 3 in its order, not an Op"),
        (
            HEAD + "from pipedream.schedules.asynchronous.pb_lwp import pb_lwp\n"
            "METHODS = (Method(lambda plan, m: pb_lwp(plan, m, by='magic'), name='mine'),)",
            "a prediction is by velocity, difference or average, found 'magic'",
        ),
    ],
)
def test_what_is_no_method_is_refused(tmp_path: Path, text: str, message: str, run_command: RunCommand) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    with pytest.raises(pd.errors.ScheduleError, match=message):
        list(pd.schedules.build(str(file), pd.Plan.uniform(2)).order(0))
    status, _, error = run_command("show", file)
    assert (status, "Traceback" in error) == (2, False)


def test_names(run_command: RunCommand) -> None:
    with pytest.raises(pd.errors.ScheduleError, match="cannot be read"):
        pd.schedules.build("nowhere.py", pd.Plan.uniform(2))
    with pytest.raises(pd.errors.ScheduleError, match=r"is not known; choose one of .*, or give a file"):
        pd.schedules.build("nowhere", pd.Plan.uniform(2))
    assert len({method.name for method in pd.schedules.METHODS.values()}) == len(pd.schedules.METHODS)
    aliases = [alias for method in pd.schedules.METHODS.values() for alias in method.aliases]
    assert len(aliases) == len({*aliases, *pd.schedules.METHODS}) - len(pd.schedules.METHODS)
    status, out, _ = run_command("simulate", "--uniform", 3, "--schedule", EXAMPLE, "--json")
    assert (status, json.loads(out)["bubble"] > 0) == (0, True)


def test_a_barrier_that_only_some_workers_reach_is_refused() -> None:
    words = "%", "barrier", "before update", pd.schedules.Kind.UPDATE
    place = lambda rules, rank, op, is_first: [0] if rank else []  # noqa: E731
    barrier = pd.schedules.Move(*words, place=place, counts="all ranks", is_joint=True)
    with pytest.raises(pd.errors.ScheduleError, match="and only 1 of 2 have it in this run"):
        pd.verify(pd.lower(replace(pd.schedules.build("1f1b", pd.Plan.uniform(2)), moves=(barrier,))))
