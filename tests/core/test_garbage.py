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


KINDS = """
with pause_collection({options}):
    assert not gc.isenabled()
    cycle = Cycle()
seen = weakref.ref(cycle)
del cycle
assert gc.isenabled()
assert [is_gone(1), is_gone(2)] == {gone}
"""
CHOSEN = """
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
IMPORTED = """
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


@pytest.mark.parametrize(
    "program",
    [  # garbage of a pause is found soon, later or never; what the caller has chosen stays; first uses of names import
        KINDS.format(options="", gone=[True, True]),
        KINDS.format(options="age=True", gone=[False, True]),
        KINDS.format(options="freeze=True", gone=[False, False]),
        CHOSEN.format(change="gc.disable()"),
        CHOSEN.format(change="gc.freeze()"),
        IMPORTED,
    ],
    ids=["soon", "aged", "frozen", "disabled", "frozen before", "imports"],
)
def test_pauses(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES + program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
