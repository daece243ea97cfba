"""Messages: how the tensors that cross from one worker to another are encoded, and what that costs.

Only floating-point tensors with a gradient are encoded, and their gradients: masks, tables of angles, integers and
targets travel as they are, and so do tensors below `LEAST_BYTES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipedream.core.errors import PipelineError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.placement import Carries

BLOCK = 64
"""Values that share a scale, in int8 and int4."""

LEAST_BYTES = 1024
"""Of a tensor that is encoded. Plans count smaller ones as if they were."""

_SCALE_BITS = 32 / BLOCK
BITS = {"full": 64.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8 + _SCALE_BITS, "int4": 4 + _SCALE_BITS}
"""Bits of a value on the wire, scales included, if it has no fewer itself; "full" has no limit."""

ENCODINGS = tuple(BITS)


@dataclass(frozen=True)
class Messages:
    """The encodings of activations and of gradients, see `ENCODINGS`.

    Attributes:
        value_bits: of a value that is not encoded.
    """

    activations: str = "full"
    gradients: str = "full"
    value_bits: int = 32

    def __post_init__(self) -> None:
        for name in (self.activations, self.gradients):
            if name not in BITS:
                raise PipelineError(
                    f"messages={name!r} was asked for; the encodings are {', '.join(ENCODINGS)}, one for all messages "
                    "or two, for activations and for gradients"
                )

    @classmethod
    def read(cls, value: str | Sequence[str] | Messages | None, value_bits: int = 32) -> Messages:
        """Returns what a user has written: ``"int8"``, ``"int8,bfloat16"`` or ``("int8", "bfloat16")``.

        Raises:
            PipelineError: no such encoding.
        """
        if isinstance(value, Messages):
            return value
        names = value.split(",") if isinstance(value, str) else list(value or ["full"])
        if len(names) > 2 or not all(isinstance(name, str) for name in names):
            raise PipelineError(f"messages={value!r} was asked for; give one encoding, or two: activations, gradients")
        return cls(names[0].strip(), names[-1].strip(), value_bits)

    def __bool__(self) -> bool:
        return self.activations != "full" or self.gradients != "full"

    def __str__(self) -> str:
        return ",".join(dict.fromkeys((self.activations, self.gradients)))

    def encoding(self, carries: Carries) -> str:
        return {Carries.ACTIVATION: self.activations, Carries.GRADIENT: self.gradients}.get(carries, "full")

    def on(self, cluster: Cluster) -> Cluster:
        """Returns a cluster for messages before they are encoded."""
        if not self:
            return cluster
        return replace(cluster, message_shares=(self._share(self.activations), self._share(self.gradients)))

    def add_costs(self, runtime: RuntimeCosts) -> RuntimeCosts:
        """Returns costs for messages before they are encoded, the mean of an activation and its gradient."""
        if not self:
            return runtime
        more_s = sum(
            runtime.encodings_s_per_byte.get(encoding, 0.0) - (1 - self._share(encoding)) * runtime.message_s_per_byte
            for encoding in (self.activations, self.gradients)
        )
        return replace(runtime, encoding_s_per_byte=more_s / 2)

    def _share(self, encoding: str) -> float:
        return min(1.0, BITS[encoding] / self.value_bits)
