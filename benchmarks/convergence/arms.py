"""What is compared: methods as their papers write them, and arms.csv: methods with an optimizer, one or more in turn.

No method of the library is used here: which weights the passes read is written in tests/oracles/delayed.py. What the
library is asked for, to check an arm and to know its seconds, stands beside each method under the library's own names.

Legend: p stages, s a stage from 0, k a microbatch and n an update of a stage since the last drain, m microbatches of a
minibatch, D the staleness of a stage in updates.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import delayed

from pipedream.testing import Reads


@dataclass(frozen=True)
class Method:
    """Which weights the passes of a microbatch read, and what an update makes of its gradient.

    Attributes:
        schedule: the library's method.
        paper: (p, m) -> which weights are read.
        accumulates: microbatches of a minibatch read different versions: they are computed one by one, m = p.
        splits: the library is asked to split a minibatch in p; here it is computed at once, for all its microbatches
            read one version.
        at_once: (momentum, D) -> b of v <- m v + g; w <- w - lr (a v + b g), a = 1 - b (1 - m), for momentum SGD.
        feedback: D -> lambda of w <- w - (u_n + lambda (u_n - u_{n-1})), u the update of any optimizer.
        rescheduled: PipeMare's T1, the rate over D^(1 - min(n / K, 1)), for this share of the run.
        rotation: matrices are stepped in the basis of their gradients (Jung et al., algorithms 1 and 2), in the form
            that the library has under this text; '' for none.
        compensation: what the library is asked for, where a field above changes the update; {updates} stands for K.
    """

    schedule: str
    paper: Callable[[int, int], Reads]
    accumulates: bool = False
    splits: bool = False
    at_once: Callable[[float, int], float] | None = None
    feedback: Callable[[int], float] | None = None
    rescheduled: float = 0.0
    rotation: str = ""
    compensation: tuple[str, ...] = ()

    def parts(self, p: int) -> int:
        """Returns m, as far as it matters here."""
        return p if self.accumulates else 1

    def staleness(self, p: int, s: int) -> int:
        """Returns D, the greatest staleness of a gradient."""
        m = self.parts(p)
        later = 4 * p  # a minibatch that finds the pipeline full
        return later - self.paper(p, m).forward(s, later * m)

    def microbatches(self, p: int) -> int | None:
        """Returns m, as the library is asked for it; None where its method does not split."""
        if self.splits or self.accumulates:
            return p
        return 1 if self.schedule in ("paci", "pipemare") else None

    @property
    def flushes(self) -> bool:
        """No gradient is stale."""
        return self.schedule == "1f1b"

    def __str__(self) -> str:
        return " ".join([self.schedule, *self.compensation])


@dataclass(frozen=True)
class Turn:
    """A method, until a share of the run; it begins with a drained pipeline, and its views and feedback with 0."""

    method: Method
    until: float = 1.0


@dataclass(frozen=True)
class Arm:
    """What is trained on a task.

    Attributes:
        name: short.
        turns: methods in turn.
        optimizer: of `steppers`.
        about: a line for people.
        source: where it was published.
    """

    task: str
    name: str
    turns: tuple[Turn, ...]
    optimizer: str
    about: str
    source: str

    @property
    def synchronous(self) -> bool:
        """The same at any number of stages."""
        return all(turn.method.flushes for turn in self.turns)

    def __str__(self) -> str:
        return self.name


SYNCHRONOUS = Method("1f1b", lambda p, m: Reads(lambda s, k: k // m), splits=True)
NAIVE = Method("paci", delayed.paci)
PIPEDREAM = Method("pipedream", delayed.stash(lambda p, s: p - 1 - s))
TWO_BW = Method("pipedream_2bw", delayed.stash(lambda p, s: 1), splits=True)
PIPELINED = Method("pipelined_backprop", delayed.pipelined_backprop)
PREDICTED = Method("pb_lwp", delayed.pb_lwp)
PIPEMARE = Method("pipemare", delayed.pipemare)
"""T2; without it, at a microbatch a minibatch, PipeMare is pipelined backpropagation."""
WARMED_UP = 0.2
"""T3: share of the run that is trained synchronously first."""


def _make_spike(momentum: float, late: int) -> float:
    return (1 - momentum**late) / (1 - momentum)


def _add_spike(method: Method) -> Method:
    return replace(method, at_once=_make_spike, compensation=("spike",))


def _add_feedback(method: Method) -> Method:
    return replace(method, feedback=lambda late: 1.0, compensation=(*method.compensation, "error_feedback:1.0"))


def _reschedule(method: Method) -> Method:
    return replace(method, rescheduled=0.5, compensation=("t1:{updates}",))


def _rotate_basis(method: Method, form: str = "basis_rotation") -> Method:
    return replace(method, rotation=form, compensation=() if method.flushes else (form,))


_ALONE = {
    "sync": SYNCHRONOUS,
    "sync_rotation": _rotate_basis(SYNCHRONOUS),
    "naive": NAIVE,
    "naive_recompute": replace(NAIVE, paper=lambda p, m: replace(delayed.paci(p, m), rule="recompute")),
    "paci": replace(NAIVE, accumulates=True),
    "vertical_sync": Method("pipedream_vertical_sync", delayed.stash(lambda p, s: p - 1)),
    "pipedream": PIPEDREAM,
    "pipedream_ef": replace(PIPEDREAM, feedback=float, compensation=("error_feedback",)),
    "nesterov": replace(PIPEDREAM, at_once=lambda momentum, late: 1.0, compensation=("nesterov",)),
    "rotation": _rotate_basis(PIPEDREAM),
    "rotation_one_sided": _rotate_basis(PIPEDREAM, "basis_rotation:one_sided"),
    "2bw": TWO_BW,
    "2bw_ef": _add_feedback(TWO_BW),
    "2bw_rotation": _rotate_basis(TWO_BW),
    "2bw_ef_rotation": _add_feedback(_rotate_basis(TWO_BW)),
    "pb": PIPELINED,
    "pb_sc": _add_spike(PIPELINED),
    "pb_lwp": PREDICTED,
    "pb_lwp_sc": _add_spike(PREDICTED),
    "pipemare_t1": _reschedule(PIPELINED),
    "pipemare_t2": PIPEMARE,
    "pipemare_t1_t2": _reschedule(PIPEMARE),
    "spectrain": Method("spectrain", delayed.spectrain),
    "pipeoptim": Method("pipeoptim", delayed.pipeoptim),
}
METHODS = {name: (Turn(method),) for name, method in _ALONE.items()} | {
    "pipemare_t1_t2_t3": (Turn(SYNCHRONOUS, WARMED_UP), Turn(_reschedule(PIPEMARE))),
    "hybrid": (Turn(PIPELINED, 2 / 3), Turn(SYNCHRONOUS)),
}
"""The methods of arms.csv."""
TASKS = "digits", "char_gpt", "char_gpt_16"
"""The columns of arms.csv with the optimizer of an arm, where it is run. PACI takes too long for the GPT."""


def _read_arms() -> Iterator[Arm]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for task in TASKS:
                if row[task]:
                    turns = METHODS[row["method"]]
                    yield Arm(task, row["name"], turns, row[task], row["about"], row["source"])


ARMS = tuple(_read_arms())


def arms_of(task: str) -> dict[str, Arm]:
    """Returns the arms of a task, by name."""
    return {arm.name: arm for arm in ARMS if arm.task == task}
