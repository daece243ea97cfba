"""basis_rotation: Adam and its relatives step in the eigenbasis of the gradients' covariance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_type_hints

from pipedream.core.late import LateModule
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.schedule.delay_compensation import Compensation, expect

if TYPE_CHECKING:
    from pipedream.extensions.compensations.basis_rotation import rotation
else:
    rotation = LateModule("pipedream.extensions.compensations.basis_rotation.rotation")

_QR_COST = 4.0
"""A QR decomposition takes as long as so many products of square matrices (one core, 512 to 1024 rows)."""
_TEMPORARY_MATRICES = 4
"""Matrices that torch needs to compute eigenvectors or a QR decomposition."""


@dataclass(frozen=True)
class BasisRotation(Compensation):
    """Adam in the basis of the gradients' covariance, in which stale gradients still make useful steps.

    Jung, Shin and Lee, Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation, ICML 2026,
    algorithms 1 and 2. For a matrix with gradient G, moments M and V in the rotated basis, and any optimizer of the
    Adam family:

        L = E[G G^T],  R = E[G^T G],  U <- qr(L U),  V <- qr(R V),  W <- W - lr U adam(U^T G V) V^T

    E are averages with the optimizer's second decay; `first_moment` takes M M^T and M^T M for them. The first basis has
    the eigenvectors; before each later one its columns are sorted by eigenvalue. All weights of two or more dimensions
    are rotated, as matrices of their first dimension and all others, except sides longer than `longest` (SOAP's limit).

    Attributes:
        every: updates from one basis to the next.
        frequency: `by_delay` gives a stage new bases in proportion to its D + 1, and all stages the same total.
        geometry: `one_sided` rotates only the shorter side.
    """

    name: ClassVar[str] = "basis_rotation"
    steps_whole_matrices: ClassVar[bool] = True
    longest: ClassVar[int] = 10_000
    every: int = 10
    frequency: Literal["uniform", "by_delay"] = "uniform"
    geometry: Literal["two_sided", "one_sided"] = "two_sided"
    estimate: Literal["second_moment", "first_moment"] = "second_moment"

    def __post_init__(self) -> None:
        expect(self.every >= 1, f"a basis is renewed after at least 1 update, found {self.every}")
        for name in ("frequency", "geometry", "estimate"):
            value, choices = getattr(self, name), get_args(get_type_hints(BasisRotation)[name])
            expect(value in choices, f"{name} is one of {', '.join(choices)}, found {value!r}")

    @property
    def keeps_covariance(self) -> bool:
        return self.estimate == "second_moment"

    def at_stage(self, stage: int, delays: Sequence[int]) -> Self:
        if self.frequency == "uniform":
            return self
        # A single division: a second one could change how a half is rounded.
        every = self.every * sum(delay + 1 for delay in delays) / (len(delays) * (delays[stage] + 1))
        return replace(self, every=max(1, round(every)), frequency="uniform")

    def kept_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, int, int]]:
        """Returns what is kept for a weight's rows ('left') and columns: (1 or 2, n, n), the basis and the average."""
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        lengths = {"left": rows, "right": columns}
        if self.geometry == "one_sided":
            lengths = {"left": rows} if rows < columns else {"right": columns}
        count = 1 + self.keeps_covariance
        return {side: (count, length, length) for side, length in lengths.items() if 0 < length <= self.longest}

    def matrix_bytes(self, matrices: Iterable[Matrices]) -> tuple[int, int]:
        kept_bytes = largest_bytes = 0
        for rows, columns, tensors, size_bytes in matrices:
            value_bytes = max(size_bytes // max(tensors * rows * columns, 1), 4)  # float32 or more
            for count, n, _ in self.kept_shapes((rows, columns)).values():
                kept_bytes += tensors * count * n * n * value_bytes
                largest_bytes = max(largest_bytes, n * n * value_bytes)
        return kept_bytes, _TEMPORARY_MATRICES * largest_bytes

    def update_flops(self, matrices: Iterable[Matrices]) -> float:
        """Each update rotates the gradient and the step, each new basis also the first moment, back and forth."""
        flops = 0.0
        for rows, columns, tensors, _ in matrices:
            for _, n, _ in self.kept_shapes((rows, columns)).values():
                product = 2.0 * rows * columns * n
                new_basis = 2 * product + (2.0 * n**3 if self.keeps_covariance else 2 * product) + _QR_COST * 2.0 * n**3
                flops += tensors * ((2 + self.keeps_covariance) * product + new_basis / self.every)
        return flops

    def list_smaller_forms(self) -> list[Compensation]:
        one_sided = replace(self, geometry="one_sided")
        return [one_sided, replace(one_sided, estimate="first_moment")]

    def check_optimizer(self, optimizer: Any) -> None:
        rotation.check_has_moments(self, optimizer)

    def begin(self, stage: Any) -> None:
        stage.tool = rotation.RotatedStep(self, stage.optimizer, stage.names, stage.state, stage.adds_decay)

    def step(self, stage: Any, step: Callable[[], None]) -> None:
        stage.tool.step(step)

    def load(self, stage: Any, name: str, saved: Mapping[str, Any]) -> None:
        sides, handle = rotation.select_sides(saved), stage.handles[name]
        if {side: tuple(matrix.shape) for side, matrix in sides.items()} == self.kept_shapes(handle.shape):
            stage.state[name] |= {side: matrix.to(handle.device, copy=True) for side, matrix in sides.items()}
        else:
            self.leave(stage, name, saved)

    @classmethod
    def leave(cls, stage: Any, name: str, saved: Mapping[str, Any]) -> None:
        if sides := rotation.select_sides(saved):
            rotation.leave_basis(stage, name, sides)


COMPENSATIONS = (BasisRotation,)
