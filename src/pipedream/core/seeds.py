"""Randomness that does not depend on the plan.

Before each layer runs, the generator is seeded from (run seed, microbatch, layer name), so that dropout masks are the
same for any plan, any number of replicas, with recomputation, and after a restart.
"""

from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=65536)
def _hash_name(seed: int, layer: str) -> int:
    return int.from_bytes(blake2b(f"{seed}/{layer}".encode(), digest_size=8).digest(), "little")


def layer_seed(seed: int, microbatch: int, layer: str) -> int:
    """Returns the 63-bit seed of one layer for one microbatch.

    The microbatch is added as a Weyl step with the odd constant of the golden ratio, a bijection on 64 bits: no two
    microbatches of a layer share a seed.
    """
    return (_hash_name(seed, layer) + microbatch * 0x9E3779B97F4A7C15) % (1 << 64) >> 1
