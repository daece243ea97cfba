"""every:H, diloco:H: each replica updates by itself, and weights are averaged after H updates.

Local SGD (Stich, ICLR 2019) takes the average; DiLoCo (Douillard et al. 2023) makes an outer step of Nesterov momentum
from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.choice import Shapes
from pipedream.core.plan.cost import SumCosts
from pipedream.core.plan.sum_method import SumMethod

# Seconds of one core for each byte of float32 weights: an average; one with an outer step. Medians over shapes from
# 256 x 256 to 4096 x 1024, torch 2.13, an x86 server.
_AVERAGE_S = 0.5e-9
_OUTER_STEP_S = 2.3e-9


@dataclass(frozen=True, repr=False)
class Every(SumMethod):
    """All take the average.

    Attributes:
        updates: of each replica, from one average to the next.
    """

    name = "every"
    text = "every:H"
    number = "number of updates between averages"
    averages_weights = True
    work_s: ClassVar[float] = _AVERAGE_S
    copies: ClassVar[int] = 0
    updates: int

    @property
    def period(self) -> int:
        return self.updates

    def costs(self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0) -> SumCosts:
        per_update = 1 / self.updates
        return SumCosts(per_update, per_update, False, self.work_s * per_update, self.copies)

    def check(self, plan: Any, programs: Sequence[Any], options: Any, shapes: Shapes) -> None:
        if options.clip_grad_norm is not None and options.clip != "local" and len(plan.stages) > 1:
            raise ScheduleError(
                f"clip_grad_norm with clip={options.clip!r} was asked for with sums={self!r}: each replica of a stage "
                "has gradients of its own, so there is no norm over all stages. Use clip='local' (each replica of each "
                "stage by its own norm)"
            )
        for tied in plan.tied_weights:
            if any(plan.replicas[stage] > 1 for stage in tied.stages):
                raise PlanError(
                    f"sums={self!r} was asked for, but the stages share {tied}, whose gradients all holders sum at "
                    "each update, while replicas update by themselves; keep its layers in one stage, or use "
                    "sums='bfloat16'"
                )
        for program in programs:
            self._check_updates(program)

    def _check_updates(self, program: Any) -> None:
        for stage in (stage for stage, count in enumerate(program.placement.replicas) if count > 1):
            rules = [rule for rule in program.updates.compensation if rule.moves_weights]
            if rules or program.weights.predictions(stage):
                cause = f"the compensation {rules[0]} moves" if rules else f"{program.name!r} predicts"
                raise ScheduleError(
                    f"sums={self!r} was asked for, but {cause} weights by what one replica's updates have done, which "
                    "an average with other replicas changes; leave it out, or use sums='bfloat16' or 'powersgd:RANK'"
                )

    def make_reducer(self, replica: Any) -> Any:
        from pipedream.extensions.reducers.averages.average import WeightAverage

        return WeightAverage(replica, self.updates)


@dataclass(frozen=True, repr=False)
class DiLoCo(Every):
    """All take what an outer optimizer makes of the average.

    Attributes:
        lr, momentum: of its steps.
    """

    name = "diloco"
    text = "diloco:H[,lr=0.7][,momentum=0.9]"
    settings = "lr=NUMBER above 0 and momentum=NUMBER from 0 to below 1"
    work_s = _OUTER_STEP_S
    copies = 2
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (0 < self.lr < inf and 0 <= self.momentum < 1):
            raise ValueError(self.settings)

    def make_reducer(self, replica: Any) -> Any:
        from pipedream.extensions.reducers.averages.average import OuterOptimizer

        return OuterOptimizer(replica, self.updates, self.lr, self.momentum)


SUMS = (Every, DiLoCo)
