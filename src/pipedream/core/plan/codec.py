"""The Codec: how the values of a tensor travel between two workers. `extensions/codecs/` has one file for each."""

from abc import ABC, abstractmethod
from typing import Any

from pipedream.core.door import Door
from pipedream.core.errors import PipelineError

FULL = "full"
"""In place of a codec's name: values travel as they are."""


class Codec(ABC):
    """What plans count of an encoding, and its two functions, which alone need torch.

    Attributes:
        name: as in ``messages=``; of a user's file, its path.
        bits: most bits of a value on the wire, scales included.
        keeps_shape: a code is a tensor of the same shape, so that its header need not say it.
        costs_like: the encoding whose measured seconds count in plans; '' for its own, which the runtime measures of
            the library's.
    """

    name: str
    bits: float
    keeps_shape = False
    costs_like = ""

    @abstractmethod
    def encode(self, tensor: Any) -> Any:
        """Returns the code, a tensor, of a floating-point tensor of any strides.

        The code of values that are not finite decodes to such values, so that an overflow is noticed.
        """

    @abstractmethod
    def decode(self, code: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Returns the values of a code in a tensor of this shape, or of the code's if it keeps it.

        Args:
            dtype: to which the values are converted; any other is converted by the caller.
        """


CODECS: Door[Codec] = Door("pipedream.extensions.codecs", "CODECS", "encoding", "messages", PipelineError)


MIN_ENCODED_BYTES = 1024
"""Size from which on tensors are encoded."""


def is_smaller(encoding: str, value_bits: int) -> bool:
    """Returns whether an encoding makes values of so many bits smaller."""
    return encoding != FULL and CODECS.find(encoding).bits < value_bits


def list_encodings() -> list[str]:
    """Returns the names of the library's encodings, those of more bits first."""
    return [codec.name for codec in sorted(CODECS.named.values(), key=lambda codec: (-codec.bits, codec.name))]
