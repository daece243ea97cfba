"""The SumMethod: what the replicas of a stage exchange, and how often (docs/less_communication.md).

| text | what is exchanged | what approximates |
| --- | --- | --- |
| `full` | gradients, at each update | nothing |
| `bfloat16`, `float16` | gradients in 16 bits | rounding |
| `powersgd:RANK` | two thin factors of each matrix's gradient (Vogels et al. 2019) | the rank, with error feedback |
| `every:H` | weights, after H updates of each replica by itself (local SGD) | the replicas differ between averages |
| `diloco:H` | the same, followed by an outer step of Nesterov momentum (Douillard et al. 2023) | the same |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import inf, prod
from typing import Self

from pipedream.core.errors import PlanError
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.cost import SumCosts

FULL = "full"
_SIXTEEN_BITS = ("bfloat16", "float16")
_METHODS = (FULL, *_SIXTEEN_BITS, "powersgd:RANK", "every:H", "diloco:H[,lr=0.7][,momentum=0.9]")
_NUMBERS = {"powersgd": "rank", "every": "period", "diloco": "period"}
_SETTINGS = {"lr": "rate", "momentum": "momentum"}
SUMS_METAVAR = "|".join(_METHODS)


# Seconds of one core for each byte of float32 weights: both conversions; PowerSGD of rank 4 (16: up to twice as many);
# an average; one with an outer step. Medians over shapes from 256 x 256 to 4096 x 1024, torch 2.13, an x86 server.
_ROUNDING_S = 0.2e-9
_FACTORS_S = 1.0e-9
_AVERAGE_S = 0.5e-9
_OUTER_STEP_S = 2.3e-9


@dataclass(frozen=True, repr=False)
class SumMethod:
    """How the replicas of a stage agree.

    Attributes:
        rank: rank of PowerSGD's factors.
        period: updates from one average of the weights to the next.
        rate, momentum: learning rate and momentum of DiLoCo's outer steps.
    """

    name: str = FULL
    rank: int = 0
    period: int = 1
    rate: float = 0.7
    momentum: float = 0.9

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a text such as ``powersgd:4``. Raises a `PlanError` if it is not one of `_METHODS`."""
        head, *settings = str(text).split(",")  # a recipe may give anything
        name, has_number, number = head.partition(":")
        if name not in _NUMBERS and (name not in (FULL, *_SIXTEEN_BITS) or has_number or settings):
            raise PlanError(f"sums={text!r} is not known; write one of {', '.join(_METHODS)}")
        if name not in _NUMBERS:
            return cls(name)
        if not (number.isdecimal() and int(number)):
            missing = "rank" if name == "powersgd" else "number of updates between averages"
            raise PlanError(f"sums={text!r} has no {missing}; write {name}: and a whole number from 1 on")
        chosen: dict[str, float] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            end = {"lr": inf, "momentum": 1.0}.get(key)
            try:
                is_valid = (
                    name == "diloco" and end is not None and 0 <= float(value) < end and (float(value) or key != "lr")
                )
            except ValueError:
                is_valid = False
            if not is_valid:
                raise PlanError(
                    f"sums={text!r} has the setting {setting!r}; only diloco has settings, lr=NUMBER above 0 and "
                    "momentum=NUMBER from 0 to below 1"
                )
            chosen[_SETTINGS[key]] = float(value)
        return cls(name, **{_NUMBERS[name]: int(number)}, **chosen)  # type: ignore[arg-type]

    def encoded(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return repr(str(self))

    def __str__(self) -> str:
        if self.name not in _NUMBERS:
            return self.name
        defaults = {field.name: field.default for field in fields(self)}
        settings = [
            f",{key}={getattr(self, attribute):g}"
            for key, attribute in _SETTINGS.items()
            if getattr(self, attribute) != defaults[attribute]
        ]
        return f"{self.name}:{getattr(self, _NUMBERS[self.name])}{''.join(settings)}"

    def check_replicas(self, replicas: Sequence[int]) -> None:
        """Raises a `PlanError` if the method is approximate and no stage has replicas."""
        if not self.is_exact and max(replicas) == 1:
            raise PlanError(
                f"sums={str(self)!r} was asked for, but no stage of the plan {'-'.join(map(str, replicas))} has "
                "replicas; leave it out, or plan with replicas (data parallelism, or a shape such as 2-1)"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the result is that of one process, up to rounding."""
        return self.name == FULL

    @property
    def averages_weights(self) -> bool:
        """Whether each replica updates by its own gradients, and weights are averaged once per period."""
        return self.name in ("every", "diloco")

    @property
    def has_outer_steps(self) -> bool:
        """Whether an outer optimizer makes a step from each average."""
        return self.name == "diloco"

    @property
    def is_low_rank(self) -> bool:
        return self.name == "powersgd"

    def compresses(self, shape: Sequence[int]) -> bool:
        """Returns whether PowerSGD sends factors of a gradient: less than half of its numbers, as in torch's hook.

        A tensor is a matrix of its first dimension and all others.
        """
        return self.is_low_rank and self.rank <= greatest_rank(shape)

    def costs(self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0) -> SumCosts:
        """Returns the costs of sums for some weights; for averages, the mean per update.

        Weights of unknown shapes, as in older plans, count as one square matrix.
        """
        if self.averages_weights:
            per_update = 1 / self.period
            work_s = _OUTER_STEP_S if self.has_outer_steps else _AVERAGE_S
            return SumCosts(per_update, per_update, False, work_s * per_update, 2 * self.has_outer_steps)
        if self.sent_dtype:
            share = min(1.0, 2 / value_bytes)
            return SumCosts(share, work_s_per_byte=_ROUNDING_S * (share < 1))
        if not self.is_low_rank:
            return SumCosts()
        side = round((parameter_bytes / value_bytes) ** 0.5)
        shapes = list(matrices) or [Matrices(side, side, 1, round(side * side * value_bytes))]
        compressed = [m for m in shapes if self.compresses((m.rows, m.columns))]
        compressed_bytes = sum(m.size_bytes for m in compressed)
        factor_bytes = max(value_bytes, 4) * sum(m.tensors * self.rank * (m.rows + m.columns) for m in compressed)
        share = (parameter_bytes - compressed_bytes + factor_bytes) / max(parameter_bytes, 1)
        return SumCosts(share, 3.0, False, _FACTORS_S * compressed_bytes / max(parameter_bytes, 1), 1)

    @property
    def sent_dtype(self) -> str:
        """The dtype in which gradients are sent; '' for their own."""
        return self.name if self.name in _SIXTEEN_BITS else ""


def greatest_rank(shape: Sequence[int]) -> int:
    """Returns the greatest rank at which PowerSGD sends factors of a gradient; 0 if there is none."""
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (0, 0)
    return (rows * columns - 1) // (2 * (rows + columns)) if rows * columns else 0
