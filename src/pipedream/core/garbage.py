"""Python's garbage collector, which searches objects again and again: a million, once torch is imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection(*, age: bool = False, freeze: bool = False) -> Iterator[None]:
    """Context without collections, which would take a third of the time or more of an import or a simulation.

    Args:
        age: at the end all objects count as old, which are seldom searched.
        freeze: from the end on no object that is there by then is searched, even once it is garbage.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if freeze or (age and gc.get_freeze_count() < 1000):  # Python 3.12 itself freezes a few hundred
            gc.freeze()
            if not freeze:
                gc.unfreeze()  # into the oldest generation
        gc.enable()
