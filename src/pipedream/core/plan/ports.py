"""What each port of a cluster carries, over all stages of a plan.

A machine or a rack may have workers of several stages, whose messages and sums all cross its port: here they are added
up, wherever these workers are. `core.plan.site` counts one stage, and takes its neighbours to be beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import gcd, lcm

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import all_reduce_bytes

__all__ = ["ports_s"]


def ports_s(
    cluster: Cluster,
    taken: Sequence[Sequence[int]],
    output_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
) -> dict[tuple[int, int], float]:
    """Returns the seconds per minibatch of each port that has something to carry: (level, component) -> seconds.

    Minibatch k goes from replica k mod r of a stage to replica k mod r' of the next, so that each pair of replicas
    with the same remainder by gcd(r, r') exchanges one in lcm(r, r') minibatches: an activation, and a gradient as
    large back. So a port sends what it receives, and its slower direction decides.

    Args:
        cluster: whose.
        taken: of each stage the workers, in the order of its replicas.
        output_bytes, parameter_bytes: of each stage, for one minibatch.
    """
    found: defaultdict[tuple[int, int], float] = defaultdict(float)
    edges = (0.0, *output_bytes[: len(taken) - 1], 0.0)
    for workers, received_bytes, sent_bytes, size in zip(taken, edges, edges[1:], parameter_bytes, strict=False):
        carried = received_bytes + sent_bytes + all_reduce_bytes(size, len(workers), how=cluster.sums)
        for worker in workers:
            found[0, worker] += carried / len(workers) / cluster.levels[0].link_bytes_per_s
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
