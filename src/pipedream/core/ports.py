"""What the ports of outer levels carry, over all stages of a plan.

A worker has one stage, so that `core.site` knows all that its port carries. A machine or a rack may have workers of
several stages, whose messages and sums all cross its port: here they are added up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import gcd, lcm

from .cluster import Cluster
from .cost import all_reduce_bytes

__all__ = ["outer_ports_s"]


def outer_ports_s(
    cluster: Cluster,
    taken: Sequence[Sequence[int]],
    output_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
) -> dict[tuple[int, int], float]:
    """Returns the seconds per minibatch of each component's port, from level 1 on: (level, component) -> seconds.

    Minibatch k goes from replica k mod r of a stage to replica k mod r' of the next, so that each pair of replicas
    with the same remainder by gcd(r, r') exchanges one in lcm(r, r') minibatches: an activation, and a gradient as
    large back. So a port sends what it receives, and its slower direction decides.

    Args:
        cluster: whose.
        taken: of each stage the workers, in the order of its replicas.
        output_bytes, parameter_bytes: of each stage, for one minibatch.
    """
    found: defaultdict[tuple[int, int], float] = defaultdict(float)
    for number, level in enumerate(cluster.levels[1:], 1):
        inside = [[cluster.component(number, worker) for worker in workers] for workers in taken]
        rate = level.link_bytes_per_s
        for here, behind, size in zip(inside, inside[1:], output_bytes, strict=False):
            step, every = gcd(len(here), len(behind)), lcm(len(here), len(behind))
            for remainder in range(step):
                senders, receivers = Counter(here[remainder::step]), Counter(behind[remainder::step])
                for sender, sent in senders.items():
                    for receiver, received in receivers.items():
                        if sender != receiver:
                            seconds = sent * received / every * size / rate
                            found[number, sender] += seconds
                            found[number, receiver] += seconds
        for components, size in zip(inside, parameter_bytes, strict=True):
            if len(set(components)) > 1:
                count = len(components)
                for component in set(components):
                    found[number, component] += all_reduce_bytes(size, count, how=cluster.sums) / count / rate
    return dict(found)
