"""bfloat16, float16: each value, rounded to the nearest."""

from typing import Any

from pipedream.core.plan.codec import Codec


class _SixteenBits(Codec):
    bits = 16.0
    keeps_shape = True

    def decode(self, code: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        return code.to(dtype)


class BFloat16(_SixteenBits):
    """16 bits, with the range of float32."""

    name = "bfloat16"

    def encode(self, tensor: Any) -> Any:
        return tensor.bfloat16()


class Float16(_SixteenBits):
    """16 bits, finer than bfloat16; it overflows above 65,504."""

    name = "float16"

    def encode(self, tensor: Any) -> Any:
        return tensor.half()


CODECS = (BFloat16(), Float16())
