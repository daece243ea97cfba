"""Pauses of the garbage collector."""

import subprocess
import sys

import pytest

CYCLES = """
import gc, sys, weakref
from pipedream.core.garbage import pause_collection

class Cycle:
    def __init__(self):
        self.itself = self

def is_gone(generation):
    gc.collect(generation)
    return seen() is None
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES + program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "gone"), [("", [True, True]), ("age=True", [False, True]), ("freeze=True", [False, False])]
)
def test_garbage_of_a_pause_is_found_soon_or_later_or_never(options: str, gone: list[bool]) -> None:
    run(
        f"""
with pause_collection({options}):
    assert not gc.isenabled()
    cycle = Cycle()
seen = weakref.ref(cycle)
del cycle
assert gc.isenabled()
assert [is_gone(1), is_gone(2)] == {gone}
"""
    )


@pytest.mark.parametrize("change", ["gc.disable()", "gc.freeze()"])
def test_what_the_caller_has_chosen_stays(change: str) -> None:
    run(
        f"""
cycle = Cycle()
{change}
is_enabled = gc.isenabled()
for options in ({{}}, {{"age": True}}):
    with pause_collection(**options):
        assert not gc.isenabled()
    assert gc.isenabled() is is_enabled
seen = weakref.ref(cycle)
del cycle
assert is_gone(2) is not is_enabled
"""
    )


def test_the_first_use_of_a_name_imports_in_a_pause() -> None:
    run(
        """
import pipedream
paused = []
class Watch:
    def find_spec(self, *_):
        paused.append(not gc.isenabled())
sys.meta_path.insert(0, Watch())
pipedream.Plan
assert paused and all(paused) and gc.isenabled()
import pipedream.core.sweep
assert not paused.pop()
"""
    )
