"""How the replicas of a stage agree."""

from collections.abc import Callable, Mapping

import torch

from pipedream.runtime.comm.channel import Waiting
from pipedream.runtime.update.gradients import Gradients, ReducedGradients

NamedTensors = dict[str, torch.Tensor]


class Reducer:
    """One replica's part in what its stage's replicas do together; all make the same calls.

    This base class serves a stage with one replica, which has nobody to agree with. In each update `put` may take
    gradients while the last backward runs (`sums_in_backward`), `close` takes the others, `take` returns the sums,
    `finish_step` is called when the update was made or skipped, and `after_step` may change the weights.

    Attributes:
        sums_in_backward: `put` takes gradients.
        averages_weights: the replicas make updates of their own, and differ between two averages.
        updates: since the weights were averaged.
    """

    sums_in_backward = False
    averages_weights = False
    updates = 0

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Takes the complete sum of a handle from the last backward before an update."""
        raise NotImplementedError(f"{type(self).__name__} takes gradients at the update")

    def close(self, gradients: Gradients, stop_request: float) -> None:
        """Takes what `put` has not taken, if the sum begins before the update."""

    def take(
        self, gradients: Gradients, stop_request: float, find_divisor: Callable[[ReducedGradients], float]
    ) -> Waiting[ReducedGradients]:
        """Returns the sums over the replicas; yields where it would wait.

        Args:
            stop_request: not 0 stops all replicas.
            find_divisor: returns what the sums will be divided by.
        """
        yield from ()
        return ReducedGradients(*gradients.take(), stop_request)

    def finish_step(self, *, is_made: bool) -> None:
        """Ends an update, which may have been skipped."""

    def after_step(self) -> Waiting[bool]:
        """Returns whether the weights were changed, because a period has ended; yields where it would wait."""
        yield from ()
        return False

    # -- what is evaluated and saved ------------------------------------------------------------------------

    def show_common(self) -> Waiting[None]:
        """Writes what all replicas have in common over this replica's own weights, at a drain."""
        yield from ()

    def show_local(self) -> None:
        """Restores this replica's own weights."""

    def adopt(self) -> None:
        """Continues with loaded weights, which all replicas have."""

    def local_tensors(self) -> NamedTensors:
        """Returns the state of this replica alone, by KIND/NAME."""
        return {}

    def common_tensors(self) -> NamedTensors:
        """Returns the state that all replicas have in common, besides weights, by KIND/NAME."""
        return {}

    def load(self, local: Mapping[str, torch.Tensor], common: Mapping[str, torch.Tensor], updates: int) -> None:
        """Loads a checkpoint's tensors, of which some may be missing.

        Args:
            local: of this replica; empty if the checkpoint has other replicas.
            updates: since the weights were averaged.
        """


def select_kind(kind: str, tensors: Mapping[str, torch.Tensor]) -> NamedTensors:
    """Returns the tensors KIND/NAME of a kind, by NAME."""
    return {n.removeprefix(f"{kind}/"): tensor for n, tensor in tensors.items() if n.startswith(f"{kind}/")}
