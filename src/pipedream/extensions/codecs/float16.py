"""float16: each value, rounded to the nearest."""

from typing import Any

from pipedream.core.plan.codec import Codec


class Float16(Codec):
    """16 bits, finer than bfloat16; it overflows above 65,504."""

    name, bits = "float16", 16.0
    keeps_shape = True

    def encode(self, tensor: Any) -> Any:
        return tensor.half()

    def decode(self, code: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        return code.to(dtype)


CODECS = (Float16(),)
