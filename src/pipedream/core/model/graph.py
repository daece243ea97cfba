"""The layers of a model, and which layer reads which output.

Layers, which the planner may not split, are in an order in which they can run; edge ``(i, j)`` means that j reads the
output of i. Capture returns chains, ``(0, 1), (1, 2), ...``. The planner takes any graph (`planner.cuts.downsets`), the
runtime only chains.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipedream.core.artifact import Artifact

__all__ = ["Layer", "LayerGraph"]


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: the user's own (``features.3``), unique in the graph.
        kind: class of the module (``Conv2d``).
        parameters: names of its parameters and buffers in the user's state dict.
    """

    name: str
    kind: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerGraph(Artifact):
    """Layers in an order in which they can run, and the edges between them.

    Attributes:
        edges: index pairs (producer, consumer), producer before consumer.
        ties: groups of layers that share a trained parameter or state; a cut should not separate a group.
        whole: ties that no method can train in separate stages: what is shared changes without an update, or is
            different parameters of one storage.
        loss_weight: what the model's own loss is a mean over, found on a sample (`runtime.results.losses.LossWeight`);
            empty if it is not known.

    Raises:
        ValueError: no layer, a repeated name, an edge or tie out of range, or a group in `whole` that is not a tie.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, ...], ...] = ()
    whole: tuple[tuple[int, ...], ...] = ()
    loss_weight: str = ""

    def __post_init__(self) -> None:
        count = len(self.layers)
        if not count:
            raise ValueError("a model has at least one layer, found none")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != count:
            raise ValueError(f"layer names must differ, found {sorted(n for n in set(names) if names.count(n) > 1)}")
        for source, target in self.edges:
            if not 0 <= source < target < count:
                raise ValueError(f"edge {(source, target)} does not run forward within {count} layers")
        for group in self.ties:
            if not group or min(group) < 0 or max(group) >= count:
                raise ValueError(f"tie {group} names a layer that is not among the {count}")
        if strange := set(self.whole) - set(self.ties):
            raise ValueError(f"whole names {min(strange)}, which is not one of the ties")

    @classmethod
    def chain(
        cls, layers: tuple[Layer, ...], ties: tuple[tuple[int, ...], ...] = (), whole: tuple[tuple[int, ...], ...] = ()
    ) -> LayerGraph:
        return cls(layers, tuple((i, i + 1) for i in range(len(layers) - 1)), ties, whole)

    def cuts(self) -> tuple[int, ...]:
        """Returns the cuts that the runtime supports; i is the cut between layers i - 1 and i.

        Only the output of layer i - 1 crosses it, and no tied group has members on both sides.
        """
        return tuple(
            i
            for i in range(1, len(self.layers))
            if all(source == i - 1 for source, target in self.edges if source < i <= target)
            and all(max(group) < i or min(group) >= i for group in self.ties)
        )
