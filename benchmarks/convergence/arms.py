"""What is compared: methods as their papers write them, and arms: methods with an optimizer, one or more in turn.

Nothing of the library is used here. What the library is asked for, to check an arm and to know its seconds, stands
beside each method under the library's own names.

Legend: p stages, s a stage from 0, k a microbatch and n an update of a stage since the last drain, m microbatches of a
minibatch, D the staleness of a stage in updates, T a horizon in updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

OfStage = Callable[[int, int], float]
"""(p, s) -> a number."""


def _count_in_turn(p: int, s: int) -> int:
    """1F1B: stage s holds p - s microbatches; p - 1 - s backwards lie between the two passes of one."""
    return p - 1 - s


def _count_concurrent(p: int, s: int) -> int:
    """Each stage makes a forward and a backward in each cycle; 2 (p - 1 - s) cycles lie between the two of one."""
    return 2 * (p - 1 - s)


@dataclass(frozen=True)
class Method:
    """Which weights the passes of a microbatch read, and what an update makes of its gradient.

    The forward of microbatch k reads version max(0, floor((k - late) / m)) of a stage, at a view `ahead` of it.

    Attributes:
        schedule: the library's method.
        late: (p, s) -> microbatches that a forward is late.
        accumulates: microbatches of a minibatch read different versions: they are computed one by one, m = p.
        splits: the library is asked to split a minibatch in p; here it is computed at once, for all its microbatches
            read one version.
        rule: 'stash': the backward reads what its forward read; 'graph': old activations and the newest weights, at a
            view `back` of them; 'recompute': the true gradient there, on the old input.
        ahead, back: (p, s) -> T; negative: towards weights that are gone.
        step: what one update is taken to add to the weights: 'velocity', the optimizer's own direction at the coming
            rate; 'difference', the last update; 'average', PipeMare's moving average of updates.
        at_once: (momentum, D) -> b of v <- m v + g; w <- w - lr (a v + b g), a = 1 - b (1 - m), for momentum SGD.
        feedback: D -> lambda of w <- w - (u_n + lambda (u_n - u_{n-1})), u the update of any optimizer.
        rescheduled: PipeMare's T1, the rate over D^(1 - min(n / K, 1)), for this share of the run.
        rotation: matrices are stepped in the basis of their gradients (Jung et al., algorithms 1 and 2), in the form
            that the library has under this text; '' for none.
        compensation: what the library is asked for, where a field above changes the update; {updates} stands for K.
    """

    schedule: str
    late: Callable[[int, int], int] = lambda p, s: 0
    accumulates: bool = False
    splits: bool = False
    rule: str = "stash"
    ahead: OfStage | None = None
    back: OfStage | None = None
    step: str = "velocity"
    at_once: Callable[[float, int], float] | None = None
    feedback: Callable[[int], float] | None = None
    rescheduled: float = 0.0
    rotation: str = ""
    compensation: tuple[str, ...] = ()

    def parts(self, p: int) -> int:
        """Returns m, as far as it matters here."""
        return p if self.accumulates else 1

    def staleness(self, p: int, s: int) -> int:
        """Returns D, the most updates that a gradient is late."""
        return -(-self.late(p, s) // self.parts(p))

    def microbatches(self, p: int) -> int | None:
        """Returns m, as the library is asked for it; None where its method does not split."""
        if self.splits or self.accumulates:
            return p
        return 1 if self.schedule in ("paci", "pipemare") else None

    @property
    def flushes(self) -> bool:
        """No gradient is late."""
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
    """What is trained.

    Attributes:
        name: short.
        turns: methods in turn.
        optimizer: of `steppers`.
        about: a line for people.
        source: where it was published.
        tasks: on which it is run.
    """

    name: str
    turns: tuple[Turn, ...]
    optimizer: str
    about: str
    source: str
    tasks: tuple[str, ...] = field(default=("digits", "char_gpt"))

    @property
    def synchronous(self) -> bool:
        """The same at any number of stages."""
        return all(turn.method.flushes for turn in self.turns)

    def __str__(self) -> str:
        return self.name


# -- methods ---------------------------------------------------------------------------------------

SYNCHRONOUS = Method("1f1b", splits=True)
NAIVE = Method("paci", _count_in_turn, rule="graph")
PIPEDREAM = Method("pipedream", _count_in_turn)
VERTICAL_SYNC = Method("pipedream_vertical_sync", lambda p, s: p - 1)
TWO_BW = Method("pipedream_2bw", lambda p, s: 1, splits=True)
PIPELINED = Method("pipelined_backprop", _count_concurrent, rule="graph")
PIPEMARE = Method(
    "pipemare", _count_concurrent, rule="graph", back=lambda p, s: -_count_concurrent(p, s), step="average"
)  # T2; without it, at a microbatch a minibatch, PipeMare is pipelined backpropagation


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


PREDICTED = replace(PIPELINED, schedule="pb_lwp", ahead=_count_concurrent)
WARMED_UP = 0.2
"""T3: share of the run that is trained synchronously first."""


def _add_warm_up(method: Method) -> tuple[Turn, ...]:
    return Turn(SYNCHRONOUS, WARMED_UP), Turn(method)


def _add_finish(method: Method) -> tuple[Turn, ...]:
    return Turn(method, 2 / 3), Turn(SYNCHRONOUS)


# -- arms ------------------------------------------------------------------------------------------


def _make_arms(name: str, method: Method | tuple[Turn, ...], about: str, source: str, **more: Any) -> tuple[Arm, ...]:
    """Returns an arm for each task, with the task's usual optimizer: momentum SGD for digits, AdamW for the GPT."""
    turns = method if isinstance(method, tuple) else (Turn(method),)
    of = {"digits": "sgd", "char_gpt": "adamw"} | more
    return tuple(Arm(name, turns, optimizer, about, source, (task,)) for task, optimizer in of.items() if optimizer)


AJANTHAN = "Ajanthan et al., ICML 2025"
JUNG = "Jung et al., ICML 2026, arXiv 2602.03515"
KOSSON = "Kosson et al., MLSys 2021"
YANG = "Yang et al., PipeMare, MLSys 2021"
NARAYANAN = "Narayanan et al., PipeDream, SOSP 2019"
ONE_STEP = "One-Step Gradient Delay, arXiv 2606.30634"

ARMS: tuple[Arm, ...] = (
    *_make_arms("sync", SYNCHRONOUS, "synchronous: 1F1B with a flush", "Narayanan et al., PipeDream-2BW, ICML 2021"),
    *_make_arms("naive", NAIVE, "asynchronous 1F1B, one set of weights, written in place", NARAYANAN + ", section 3.3"),
    *_make_arms(
        "naive_recompute",
        replace(NAIVE, rule="recompute"),
        "the same, with true gradients: forwards are done again at the newest weights",
        "Narayanan et al., PipeDream, SOSP 2019; Ajanthan et al., ICML 2025 (without a stash)",
    ),
    *_make_arms("pipedream", PIPEDREAM, "weight stashing", NARAYANAN),
    *_make_arms("vertical_sync", VERTICAL_SYNC, "PipeDream with vertical sync", NARAYANAN),
    *_make_arms("2bw", TWO_BW, "one update of delay at every stage", "Narayanan et al., PipeDream-2BW, ICML 2021"),
    *_make_arms(
        "paci",
        replace(NAIVE, accumulates=True),
        "naive, with an update every p microbatches",
        "PACI, arXiv 2606.07881",
        char_gpt="",  # eight passes an update take too long
    ),
    *_make_arms("pb", PIPELINED, "pipelined backpropagation; also PipeMare without T1, T2, T3", KOSSON),
    *_make_arms("pb_lwp", PREDICTED, "forwards at weights predicted by the velocity, T = D", KOSSON),
    *_make_arms("pb_sc", _add_spike(PIPELINED), "spike compensation", KOSSON, char_gpt=""),
    *_make_arms("pb_lwp_sc", _add_spike(PREDICTED), "both", KOSSON, char_gpt=""),
    *_make_arms("pipemare_t1", _reschedule(PIPELINED), "T1: rates by stage, for half of the run", YANG),
    *_make_arms("pipemare_t2", PIPEMARE, "T2: the backward's weights corrected back", YANG),
    *_make_arms("pipemare_t1_t2", _reschedule(PIPEMARE), "T1 and T2", YANG),
    *_make_arms(
        "pipemare_t1_t2_t3", _add_warm_up(_reschedule(PIPEMARE)), "T1, T2, T3: a synchronous fifth first", YANG
    ),
    *_make_arms("hybrid", _add_finish(PIPELINED), "pb, the last third synchronous", "Zhang and Abdelrahman, 2021"),
    *_make_arms(
        "spectrain",
        replace(
            PIPEDREAM,
            schedule="spectrain",
            rule="graph",
            ahead=lambda p, s: s // 2 + p - 1 - s,
            back=lambda p, s: s // 2,
        ),
        "both passes at weights predicted by the velocity",
        "Chen et al., SpecTrain, 2018",
        char_gpt="",
    ),
    *_make_arms(
        "pipeoptim",
        replace(PIPEDREAM, schedule="pipeoptim", rule="graph", ahead=_count_in_turn),
        "forwards predicted by AdamW's direction",
        "Guan et al., PipeOptim, 2023",
        digits="",
    ),
    *_make_arms(
        "nesterov",
        replace(PIPEDREAM, at_once=lambda momentum, late: 1.0, compensation=("nesterov",)),
        "PipeDream with Nesterov momentum",
        AJANTHAN,
        char_gpt="",
    ),
    *_make_arms("nesterov", PIPEDREAM, "PipeDream, NAdam, beta_1 0.99", AJANTHAN, digits="", char_gpt="nadam"),
    *_make_arms("sync_nadam", SYNCHRONOUS, "synchronous, NAdam, beta_1 0.99", "control", digits="", char_gpt="nadam"),
    *_make_arms("sync_adamw", SYNCHRONOUS, "synchronous, AdamW", "control", digits="adamw", char_gpt=""),
    *_make_arms("2bw_adamw", TWO_BW, "2BW, AdamW", ONE_STEP, digits="adamw", char_gpt=""),
    *_make_arms("2bw_ef", _add_feedback(TWO_BW), "2BW with error feedback, AdamW", ONE_STEP, digits="adamw"),
    *_make_arms("pipedream_adamw", PIPEDREAM, "weight stashing, AdamW", NARAYANAN, digits="adamw", char_gpt=""),
    *_make_arms(
        "sync_rotation", _rotate_basis(SYNCHRONOUS), "synchronous, AdamW in a rotated basis", "control", digits="adamw"
    ),
    *_make_arms("rotation", _rotate_basis(PIPEDREAM), "PipeDream, AdamW in a rotated basis", JUNG, digits="adamw"),
    *_make_arms(
        "sync_rotation_nadam",
        _rotate_basis(SYNCHRONOUS),
        "synchronous, NAdam, beta_1 0.99, in a rotated basis",
        "control",
        digits="nadam",
        char_gpt="nadam",
    ),
    *_make_arms(
        "rotation_nadam",
        _rotate_basis(PIPEDREAM),
        "PipeDream, NAdam, beta_1 0.99, in a rotated basis",
        JUNG,
        digits="nadam",
        char_gpt="nadam",
    ),
    *_make_arms("2bw_rotation", _rotate_basis(TWO_BW), "2BW, AdamW in a rotated basis", JUNG, digits="adamw"),
    *_make_arms(
        "2bw_ef_rotation",
        _add_feedback(_rotate_basis(TWO_BW)),
        "2BW with error feedback, AdamW in a rotated basis",
        ONE_STEP + ", for SOAP",
        digits="",
    ),
    *_make_arms(
        "2bw_rotation_nadam",
        _rotate_basis(TWO_BW),
        "2BW, NAdam, beta_1 0.99, in a rotated basis",
        JUNG,
        digits="",
        char_gpt="nadam",
    ),
    *_make_arms(
        "rotation_one_sided",
        _rotate_basis(PIPEDREAM, "basis_rotation:one_sided"),
        "the same, the shorter side alone",
        JUNG,
        digits="",
    ),
    *_make_arms(
        "rotation_first_moment",
        _rotate_basis(PIPEDREAM, "basis_rotation:first_moment"),
        "the same, the basis of the first moments",
        JUNG,
        digits="",
    ),
    *_make_arms(
        "rotation_by_delay",
        _rotate_basis(PIPEDREAM, "basis_rotation:by_delay"),
        "the same, new bases in proportion to the delay",
        JUNG,
        digits="",
    ),
    *_make_arms("sync_muon", SYNCHRONOUS, "synchronous, Muon", "control", digits="", char_gpt="muon"),
    *_make_arms("pipedream_muon", PIPEDREAM, "PipeDream, Muon", ONE_STEP, digits="", char_gpt="muon"),
    *_make_arms("2bw_muon", TWO_BW, "2BW, Muon", ONE_STEP, digits="", char_gpt="muon"),
    *_make_arms(
        "2bw_ef_muon", _add_feedback(TWO_BW), "2BW with error feedback, Muon", ONE_STEP, digits="", char_gpt="muon"
    ),
    *_make_arms(
        "pipedream_ef_muon",
        replace(PIPEDREAM, feedback=float, compensation=("error_feedback",)),
        "PipeDream at weights predicted by Muon's last update, T = D",
        "a study of delayed gradients for Marin, 2026",
        digits="",
        char_gpt="muon",
    ),
    *_make_arms("sync_sgd", SYNCHRONOUS, "synchronous, momentum SGD", "control", digits="", char_gpt="sgd"),
    *_make_arms("pb_sgd", PIPELINED, "pipelined backpropagation, momentum SGD", KOSSON, digits="", char_gpt="sgd"),
    *_make_arms("pb_lwp_sc_sgd", _add_spike(PREDICTED), "the same, LWP and SC", KOSSON, digits="", char_gpt="sgd"),
)  # fmt: skip
_AT_SIXTEEN = (
    "sync pipedream 2bw sync_rotation 2bw_rotation sync_rotation_nadam rotation_nadam "
    "sync_muon pipedream_muon 2bw_ef_muon pipedream_ef_muon"
)
"""The best three arms at eight stages, what they are compared with, and PipeDream with Muon."""
ARMS += tuple(
    replace(arm, tasks=("char_gpt_16",))
    for arm in ARMS
    if arm.tasks == ("char_gpt",) and arm.name in _AT_SIXTEEN.split()
)


def arms_of(task: str) -> dict[str, Arm]:
    """Returns the arms of a task, by name."""
    return {arm.name: arm for arm in ARMS if task in arm.tasks}
