"""Messages: the encoding of tensors between workers, and its costs.

Only floating-point tensors with a gradient are encoded, and their gradients. Masks, tables of angles, integers, targets
and tensors below `MIN_ENCODED_BYTES` are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipedream.core.errors import PipelineError
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.placement import Carries

BLOCK = 64
"""Values of int8 and int4 that share a scale."""

MIN_ENCODED_BYTES = 1024
"""Size from which on tensors are encoded. Plans count smaller ones as encoded, too."""

_SCALE_BITS = 32 / BLOCK
BITS = {"full": 64.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8 + _SCALE_BITS, "int4": 4 + _SCALE_BITS}
"""Most bits of a value on the wire, scales included; "full" has no limit."""

ENCODINGS = tuple(BITS)


@dataclass(frozen=True)
class MessageEncoding:
    """The encodings of activations and of gradients, see `ENCODINGS`.

    Attributes:
        value_bits: bits of a value that is not encoded.
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
    def parse(cls, value: str | Sequence[str] | MessageEncoding | None, value_bits: int = 32) -> MessageEncoding:
        """Reads a user's choice: ``"int8"``, ``"int8,bfloat16"`` or ``("int8", "bfloat16")``.

        Raises:
            PipelineError: no such encoding.
        """
        if isinstance(value, MessageEncoding):
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

    @property
    def shares(self) -> tuple[float, float]:
        """Bytes on the wire for each byte of an activation, and of a gradient."""
        return self._share(self.activations), self._share(self.gradients)

    def add_costs(self, runtime: RuntimeCosts) -> RuntimeCosts:
        """Returns costs for each byte before encoding, the mean of an activation and its gradient."""
        if not self:
            return runtime
        added_s = sum(
            runtime.encodings_s_per_byte.get(encoding, 0.0) - (1 - self._share(encoding)) * runtime.message_s_per_byte
            for encoding in (self.activations, self.gradients)
        )
        return replace(runtime, encoding_s_per_byte=added_s / 2)

    def _share(self, encoding: str) -> float:
        return min(1.0, BITS[encoding] / self.value_bits)
