"""The declaration of a method in its file, `METHODS`, which is all that the registry needs."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.occupancy import MethodProperties
from pipedream.core.schedule.schedule import Schedule


@dataclass(frozen=True)
class StageOrder:
    """A method's order of stages on p workers.

    Attributes:
        words: description for errors and notes.
        order: (p, v) -> `Plan.worker_order`, for v stages per worker (chunks); raises ScheduleError for a number of
            workers that it cannot use.
        chunks: default v; None if the method leaves no choice.
    """

    words: str
    order: Callable[[int, int], tuple[int, ...]]
    replicas: int = 1
    chunks: int | None = 2

    def stages(self, workers: int, chunks: int | None = None) -> int:
        """Returns how many stages p workers take."""
        return len(self.order(workers, chunks or self.chunks or 1)) // self.replicas

    def check(self, name: str, plan: Plan, required: int | None = None) -> int:
        """Returns v, the stages per worker of a plan; `required` is the only v that the method works with.

        Raises:
            ScheduleError: the plan has another order of stages, or another v.
        """
        stage_replicas = sum(plan.replicas)
        order = plan.worker_order or tuple(range(stage_replicas))
        chunks = stage_replicas // plan.workers // self.replicas
        if set(plan.replicas) != {self.replicas} or order != self.order(plan.workers, required or chunks):
            suffix = "" if required is None else f", {required} on each"
            raise ScheduleError(
                f"schedule {name!r} needs {self.words}{suffix}; found plan {plan.config} on workers {order}; plan for "
                "this method, or name the workers in the plan's order"
            )
        return chunks


def _order_wave(workers: int, chunks: int) -> tuple[int, ...]:
    outward = tuple(range(workers))
    return tuple(worker for c in range(chunks) for worker in (reversed(outward) if c % 2 else outward))


def _order_mirrored(workers: int, chunks: int) -> tuple[int, ...]:
    if workers % 2:
        raise ScheduleError(f"two pipelines in opposite directions need an even number of workers, found {workers}")
    return tuple(worker for s in range(workers) for worker in (s, workers - 1 - s))


looped = StageOrder("stage s on worker s mod p, without replicas", lambda p, chunks: tuple(range(p)) * chunks)
"""The stages of a worker are p apart (Megatron-LM, SC 2021, section 2.2.2)."""

wave = StageOrder("the stages there and back over the workers (a V), without replicas", _order_wave)
"""There and back: the first worker has the first stage and, with two stages per worker, the last one. The V of zero
bubble (Qi et al., NeurIPS 2024) and, with more stages, the waves of Hanayo (SC 2023).
"""

mirrored = StageOrder(
    "two replicas of each stage, on workers s and p - 1 - s, p even", _order_mirrored, replicas=2, chunks=None
)
"""Two pipelines in opposite directions (Chimera, SC 2021)."""


@dataclass(frozen=True)
class Picture:
    """The gallery's picture of a method: `total` microbatches, m of them in a minibatch (None: not split)."""

    title: str
    microbatches: int | None = None
    total: int = 12


@dataclass(frozen=True)
class Method:
    """A method, as declared in `METHODS` of its file.

    Attributes:
        build: (plan, m or None for the method's own choice) -> schedule; raises ScheduleError for what it cannot do.
            Its keyword-only parameters are the method's options.
        name: by default that of `build`.
        since: year of its paper, by which lists are ordered; 0 for a baseline.
        aliases: other names that papers use.
        compensates: it is another method plus a compensation.
        properties: with options at their defaults. None: derived from small schedules (`properties_of`).
        choose: when to choose it; Markdown.
    """

    build: Callable[[Plan, int | None], Schedule]
    _: KW_ONLY
    name: str = ""
    since: int = 0
    aliases: tuple[str, ...] = ()
    stage_order: StageOrder | None = None
    compensates: bool = False
    properties: MethodProperties | None = None
    picture: Picture | None = None
    choose: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.build.__name__)
