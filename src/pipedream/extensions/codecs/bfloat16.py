"""bfloat16: each value, rounded to the nearest."""

from typing import Any

from pipedream.core.plan.codec import Codec


class BFloat16(Codec):
    """16 bits, with the range of float32."""

    name, bits = "bfloat16", 16.0
    keeps_shape = True

    def encode(self, tensor: Any) -> Any:
        return tensor.bfloat16()

    def decode(self, code: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        return code.to(dtype)


CODECS = (BFloat16(),)
