"""Which weights the passes of a stage read, by a method's rule; each may be a prediction from the version named.

| `backward_rule` | `held_until` | a forward reads | its backward reads |
| --- | --- | --- | --- |
| stash | BACKWARD | its version, kept | the same set |
| recompute, graph | None | the newest | the newest |
| recompute, graph | FORWARD | its version, not kept | the newest |
| recompute, graph | BACKWARD | its version, kept | what `WeightRule.backward_reader` chooses |
"""

from __future__ import annotations

from collections.abc import Callable

from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.weights import WeightRule
from pipedream.runtime.stage.versions import Versions, WeightSet


class WeightChoice:
    """Weight stashing: a backward reads the set that its forward read.

    Attributes:
        reads_predictions: a forward may read a prediction instead.
    """

    reads_predictions = True

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def read(self, version: int) -> WeightSet:
        """Returns the weights for a forward; `release` follows its backward."""
        return self._versions.read(version)

    def choose_for_backward(self, read: WeightSet) -> WeightSet:
        return read

    def backward_version(self, read: WeightSet) -> int:
        return read.version

    def release(self, read: WeightSet) -> None:
        self._versions.release(read)


class _NewerChoice(WeightChoice):
    """A backward reads newer weights than its forward: the newest, or what `reader` returns."""

    def __init__(self, versions: Versions, reader: Callable[[WeightSet], WeightSet] | None) -> None:
        super().__init__(versions)
        self._reader = reader

    def choose_for_backward(self, read: WeightSet) -> WeightSet:
        return self._versions.peek() if self._reader is None else self._reader(read)

    def backward_version(self, read: WeightSet) -> int:
        return self._versions.newest


class _PassingChoice(_NewerChoice):
    """No set is kept for a backward."""

    reads_predictions = False

    def read(self, version: int) -> WeightSet:
        return self._versions.peek(version)

    def release(self, read: WeightSet) -> None:
        """Does nothing."""


def choose_weights(rule: WeightRule, versions: Versions) -> WeightChoice:
    """Returns the choice of a rule."""
    if rule.backward_rule == "stash":
        return WeightChoice(versions)
    newer = _PassingChoice if rule.held_until is Kind.FORWARD else _NewerChoice
    return newer(versions, rule.backward_reader(versions))
