"""every:H, diloco:H, sparse:H,SHARE: each replica updates by itself, and weights are averaged after H updates.

Local SGD (Stich, ICLR 2019) takes the average; DiLoCo (Douillard et al. 2023) makes an outer step of Nesterov momentum
from it; SparseLoCo (Sarfi et al., arXiv 2508.15706) makes one without momentum from the largest values alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, ClassVar, Self

from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.choice import Shapes
from pipedream.core.plan.cost import SumCosts, Terms
from pipedream.core.plan.sum_method import SumMethod
from pipedream.extensions.reducers.averages.chunks import CHUNK, count_bytes, divide

# Seconds of one core for each byte of float32 weights: an average; one with an outer step; one of 2% of the values.
# Medians over shapes from 256 x 256 to 4096 x 1024, torch 2.13, an x86 server.
_AVERAGE_S = 0.5e-9
_OUTER_STEP_S = 2.3e-9
_SPARSE_STEP_S = 6.0e-9


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
        return SumCosts(per_update, per_update, 1.0, self.work_s * per_update, self.copies)

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
        overlap: 1 if an average takes as long as the next period, and is applied at its end; otherwise 0.
    """

    name = "diloco"
    text = "diloco:H[,lr=0.7][,momentum=0.9][,overlap=1]"
    settings = "lr=NUMBER above 0, momentum=NUMBER from 0 to below 1 and overlap=0 or 1"
    work_s = _OUTER_STEP_S
    copies = 2
    lr: float = 0.7
    momentum: float = 0.9
    overlap: float = 0

    def __post_init__(self) -> None:
        if not (0 < self.lr < inf and 0 <= self.momentum < 1 and self.overlap in (0, 1)):
            raise ValueError(self.settings)

    def costs(self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0) -> SumCosts:
        costs = super().costs(parameter_bytes, matrices, value_bytes)
        return _overlap(costs) if self.overlap else costs

    def make_reducer(self, replica: Any) -> Any:
        from pipedream.extensions.reducers.averages.average import OuterOptimizer

        return OuterOptimizer(replica, self.updates, self.lr, self.momentum, overlaps=self.overlap == 1)


@dataclass(frozen=True, repr=False)
class Sparse(Every):
    """All take an outer step by the largest values of what each has changed.

    Attributes:
        share: of the values of each chunk, those that are sent.
        lr: of the outer steps.
        decay: of what was not sent, from one period to the next.
        overlap: as of `DiLoCo`.
    """

    name = "sparse"
    text = "sparse:H,SHARE[,lr=1][,decay=0.95][,overlap=1]"
    settings = "a share such as 0.02, lr=NUMBER above 0, decay=NUMBER from 0 to 1 and overlap=0 or 1"
    work_s = _SPARSE_STEP_S
    share: float = 0.0
    lr: float = 1.0
    decay: float = 0.95
    overlap: float = 0

    def __post_init__(self) -> None:
        if not (0 < self.lr < inf and 0 <= self.decay <= 1 and self.overlap in (0, 1)):
            raise ValueError(self.settings)

    @classmethod
    def _of_parts(cls, text: str, number: str, settings: Sequence[str]) -> Self:
        share, *others = settings or [""]
        method = super()._of_parts(text, number, [f"share={share}", *others])
        if 1 <= method.share * CHUNK <= CHUNK:
            return method
        raise PlanError(
            f"sums={text!r} sends the share {method.share:g} of each chunk of {CHUNK:,} values; write one from "
            f"{1 / CHUNK:.3g} (a single value) to 1, such as {cls.name}:{number},0.02"
        )

    def __str__(self) -> str:
        return super().__str__().replace(",share=", ",")

    def costs(
        self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0, replicas: int = 2
    ) -> SumCosts:
        """Returns the costs; weights that are no matrices, or of unknown shapes, count as one.

        In a ring each replica sends its code, and passes on those of all others but one. That is the half of an
        all-reduce's messages, and its bytes if this had `replicas` / 2 codes to sum.
        """
        shapes = list(matrices)
        rest = round((parameter_bytes - sum(shape.size_bytes for shape in shapes)) / value_bytes)
        chunks = [
            replace(row, count=row.count * shape.tensors)
            for shape in (*shapes, Matrices(rest, 1, 1, 0))
            for row in divide(shape.rows * shape.columns, self.share)
        ]
        per_update = 1 / self.updates
        share = per_update * count_bytes(chunks) * replicas / 2 / max(parameter_bytes, 1)
        kept = 1 + ceil(max(value_bytes, 4) / value_bytes)  # outer weights, and errors in float32 or more
        costs = SumCosts(share, per_update / 2, 1.0, self.work_s * per_update, kept)
        return _overlap(costs) if self.overlap else costs

    def add_terms(self, terms: Terms, weights: Any, value_bytes: float) -> Terms:
        """Adds the costs of a stage; for a whole model, those of two replicas."""
        replicas = max(2, getattr(weights, "replicas", 2))
        return terms._replace(sums=self.costs(weights.trained_bytes, weights.matrices, value_bytes, replicas))

    def check(self, plan: Any, programs: Sequence[Any], options: Any, shapes: Shapes) -> None:
        super().check(plan, programs, options, shapes)
        if any(stage.mesh for stage in plan.stages if stage.replicas > 1):
            raise PlanError(
                f"sums={self!r} was asked for, but ranks of a mesh have parts of weights, whose chunks are not those "
                "of the whole; use sums='diloco:H', or replicas without a mesh"
            )

    def make_reducer(self, replica: Any) -> Any:
        from pipedream.extensions.reducers.averages.sparse import SparseAverage

        return SparseAverage(replica, self.updates, self.share, self.lr, self.decay, overlaps=self.overlap == 1)


def _overlap(costs: SumCosts) -> SumCosts:
    """Returns the costs of averages that take as long as the next period, which hides their latency.

    A slice travels during each update. Its last backward hides it, although all of its passes do: the planner takes it
    that forwards hide no sums. What a replica has added, and what travels, are two more tensors.
    """
    return costs._replace(messages=0.0, ready=0.0, kept_tensors=costs.kept_tensors + 2)


SUMS = (Every, DiLoCo, Sparse)
