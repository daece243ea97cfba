"""Pauses of the garbage collector."""

import subprocess
import sys

import pytest

CYCLES = """
import gc, weakref
from pipedream.core.garbage import pause_collection

class Cycle:
    def __init__(self):
        self.itself = self

def is_gone(seen, generation):
    gc.collect(generation)
    return seen() is None

def list_gone(**options):
    with pause_collection(**options):
        assert not gc.isenabled()
        cycle = Cycle()
    seen = weakref.ref(cycle)
    del cycle
    assert gc.isenabled()
    return [is_gone(seen, 1), is_gone(seen, 2)]

assert list_gone() == [True, True]  # its garbage is found soon
assert list_gone(age=True) == [False, True]  # later
assert list_gone(freeze=True) == [False, False]  # never
for choose in (gc.freeze, gc.disable):  # what the caller has chosen stays
    cycle = Cycle()
    choose()
    is_enabled = gc.isenabled()
    for options in ({}, {"age": True}):
        with pause_collection(**options):
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    seen = weakref.ref(cycle)
    del cycle
    assert is_gone(seen, 2) is not is_enabled
"""
IMPORTS = """
import gc, sys
import pipedream
paused = []
class Watch:
    def find_spec(self, *_):
        paused.append(not gc.isenabled())
sys.meta_path.insert(0, Watch())
pipedream.Plan
assert paused and all(paused) and gc.isenabled()
import pipedream.apps.sweep.sweep
assert not paused.pop()
"""


@pytest.mark.parametrize("program", [CYCLES, IMPORTS], ids=["cycles", "imports"])
def test_pauses(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
