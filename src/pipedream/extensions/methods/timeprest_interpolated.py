"""After I-TiMePReSt: nF1B with weight stashing, and backwards at weights between the stashed and the newest ones.

I-TiMePReSt, 2025 (arXiv 2509.23241): the significance of the stale weights decays exponentially with the staleness. We
found no full formula in print, so this is an interpretation: the backward of a forward d updates old uses w_new +
share^d (w_old - w_new), share = 1/e. With share = 0 it is V-TiMePReSt, with 1 weight stashing in this order.

    rank 0 | F0  F1  F2  F3  B0  B1' F4  F5  B2  B3'
    rank 1 | .   F0  F1  B0  B1' F2  F3  B2  B3' F4

All that only this method needs is in this file: `Interpolated` computes the weights of a backward itself
(`WeightRule.backward_reader`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp
from typing import Any, ClassVar

from pipedream.schedules import kit
from pipedream.schedules.asynchronous.timeprest import NewerBackward, nf1b


@dataclass(frozen=True)
class Interpolated(NewerBackward):
    """Weight stashing, but the backward reads weights between the stashed and the newest ones.

    Attributes:
        share: of weights that are one update old.
    """

    name: ClassVar[str] = "interpolated"
    share: float = field(default=exp(-1), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError(f"the share of the old weights must be between 0 and 1, found {self.share}")

    def forward_version(self, stage: int, microbatch: int) -> int:
        return max(0, (microbatch - self._count_late_microbatches(stage)) // self.per_update)

    def versions(self, stage: int) -> int:
        return self.staleness(stage) + 1

    def staleness(self, stage: int) -> int:
        return -(-self._count_late_microbatches(stage) // self.per_update)

    def mean_staleness(self, stage: int) -> float:
        return self._count_late_microbatches(stage) / self.per_update

    def buffers(self, stage: int) -> int:
        return int(self.staleness(stage) > 0)

    @property
    def held_until(self) -> kit.Kind:
        return kit.Kind.BACKWARD

    def backward_reader(self, versions: Any) -> Callable[[Any], Any]:
        storage: list[Any] = []

        def between(old: Any) -> Any:
            newest = versions.peek()
            if old is newest:
                return newest
            if not storage:
                storage.append(versions.make_storage())
            share = float(self.share ** (newest.version - old.version))
            # .data: where the forward is done again these leaves have a graph of their own.
            rows = zip(storage[0].leaves.values(), newest.leaves.values(), old.leaves.values(), strict=True)
            for target, end, begin in rows:
                target.data.copy_(end.data).lerp_(begin.data, share)
            return storage[0]

        return between


def timeprest_interpolated(
    plan: kit.Plan, microbatches: int | None = None, *, share: float = exp(-1), backward_rule: str = "graph"
) -> kit.Schedule:
    """Returns nF1B with interpolated backwards; by default 3 microbatches per minibatch.

    Args:
        share: share of weights that are one update old in those of a backward; from 0 to 1.
        backward_rule: 'graph' or 'recompute'.
    """
    return nf1b(
        "timeprest_interpolated",
        plan,
        microbatches,
        backward_rule,
        lambda waits, replicas, m: Interpolated(waits, replicas, m, backward_rule=backward_rule, share=share),
        versions=lambda p, s, m: -(-min(2, m) * (p - 1 - s) // m) + 1,
    )


METHODS = (
    kit.Method(
        timeprest_interpolated,
        since=2025,
        aliases=("i_timeprest",),
        properties=kit.MethodProperties(flushes=False, same_updates=False, reads_stored_weights=False),
        picture=kit.Picture("nF1B, backwards between the version of the forward and the newest (v); m = 3", 3, 15),
        choose="To study backwards between the forward's weights and the newest: one number, share, leads from "
        "v_timeprest (0) to stashing (1).",
    ),
)
