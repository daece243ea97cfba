"""The Profile: seconds and bytes of every layer, and where and how they were measured.

As in PipeDream, SOSP 2019, section 3.1, with the spread of times, the bytes that autograd keeps, and update times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from pipedream.core.artifact import Artifact
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.model.weight_shapes import Matrices, join_matrices
from pipedream.core.tabular import Tabular, align, fold
from pipedream.core.units import format_bytes, format_number, format_seconds


def _check_not_negative(costs: LayerProfile | RankProfile | Profile) -> None:
    for name, value in vars(costs).items():  # the fixed seconds of passes may be negative
        if name.endswith(("_s", "_bytes", "_flops")) and not name.endswith("ward_fixed_s") and value < 0:
            raise ValueError(f"{name} cannot be negative, found {value}")


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer for one profiled minibatch.

    Attributes:
        forward_s, backward_s: medians over the measured runs.
        forward_spread_s, backward_spread_s: distance between the first and the third quartile.
        activation_bytes: bytes that autograd keeps for its backward, without parameters.
        forward_fixed_s, backward_fixed_s: the part that does not depend on the batch; 0 if unknown, negative if a
            smaller batch takes less time per sample.
        forward_launch_s, backward_launch_s: seconds that the host needs to launch the pass on a GPU, which computes
            meanwhile; equal for any batch, 0 if the host itself computes.
        parameter_bytes: a tied parameter counts in the layer that uses it first (`Profile.tied`).
        frozen_bytes: the part of `parameter_bytes` that is not trained (``requires_grad`` is False).
        arriving_bytes: bytes kept both by earlier layers and from here on, of which a stage that begins here holds a
            copy.
        leaving_bytes: bytes of its output that neither it nor an earlier layer keeps, and that a stage that ends here
            holds until its backward.
        temporary_bytes: the most that a pass needs beyond what it and earlier layers keep, and its parameters'
            gradients; includes its input and the gradients that pass through.
        gathered_bytes: the part of `temporary_bytes` for sharded weights (docs/meshes.md), for any number of samples.
        backward_bytes: the most that its backward adds to the bytes kept at its start, including its parameters'
            gradients, less what it has released.
        largest_parameter_bytes: of the largest parameter, whose gradient is computed before it is accumulated.
        matrices: its trained weights of two or more dimensions; () if unknown.
        forward_flops, backward_flops: 0 if not counted.
        moved_bytes: bytes read and written by both passes; 0 if not counted.
    """

    DROPPED: ClassVar[frozenset[str]] = frozenset({"half_length_sizes"})

    forward_s: float
    backward_s: float
    output_bytes: int
    parameter_bytes: int
    activation_bytes: int = 0
    forward_spread_s: float = 0.0
    backward_spread_s: float = 0.0
    arriving_bytes: int = 0
    leaving_bytes: int = 0
    temporary_bytes: int = field(default=0, metadata={"json": "working_bytes"})  # files keep the older name
    backward_bytes: int = 0
    largest_parameter_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    moved_bytes: int = 0
    forward_fixed_s: float = 0.0
    backward_fixed_s: float = 0.0
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0
    gathered_bytes: int = 0
    matrices: tuple[Matrices, ...] = ()
    frozen_bytes: int = 0

    def __post_init__(self) -> None:
        _check_not_negative(self)
        if self.frozen_bytes > self.parameter_bytes:
            raise ValueError(f"{self.frozen_bytes} frozen bytes cannot be more than all {self.parameter_bytes}")
        if self.forward_fixed_s > self.forward_s or self.backward_fixed_s > self.backward_s:
            raise ValueError(
                f"the fixed part of {self.forward_s} and {self.backward_s} seconds cannot be greater, found "
                f"{self.forward_fixed_s} and {self.backward_fixed_s}"
            )

    @property
    def trained_bytes(self) -> int:
        return self.parameter_bytes - self.frozen_bytes


@dataclass(frozen=True)
class TiedParameters:
    """Parameters that the same layers use.

    Attributes:
        names: in the user's state dict, one each.
        layers: at least two, in order.
        trained: False if frozen: each stage then has a copy, with nothing to sum.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    parameter_bytes: int
    trained: bool = True


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one dimension of a mesh, in a pass or an update.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or exchange.
        over: the dimension, or several joined by +.
        count: number of collectives.
        size_bytes: their sum; each counts the greater of the bytes that a rank contributes and receives.
        of_weights: they move weights or their gradients, so their bytes do not depend on the samples.
    """

    kind: str
    over: str
    count: int
    size_bytes: int
    of_weights: bool = False

    @classmethod
    def sums(cls, rows: Iterable[Collective]) -> tuple[Collective, ...]:
        """Returns the sum of each kind, in a fixed order."""
        totals: dict[tuple[str, str, bool], list[int]] = {}
        for row in rows:
            total = totals.setdefault((row.kind, row.over, row.of_weights), [0, 0])
            total[0] += row.count
            total[1] += row.size_bytes
        return tuple(
            cls(kind, over, count, size_bytes, weights)
            for (kind, over, weights), (count, size_bytes) in sorted(totals.items())
        )

    def __str__(self) -> str:
        return f"{self.count} {self.kind} over {self.over}, {format_bytes(self.size_bytes)}"


@dataclass(frozen=True)
class StageCollectives:
    """Collectives of a stage's first microbatch and first update, at the first rank of its mesh.

    Attributes:
        measured: "forward", "backward" and "update" -> one of each kind and dimension; a backward includes those of its
            recomputation.
        predicted: the same, of the stage run without data; None if that fails.
        problem: why it fails.
    """

    measured: dict[str, tuple[Collective, ...]]
    predicted: dict[str, tuple[Collective, ...]] | None = None
    problem: str = ""


@dataclass(frozen=True)
class RankProfile:
    """The costs of the first rank of a mesh, with its parts of all tensors; see `Profile`.

    Attributes:
        layout: its rules, and the mesh dimension that shards weights.
        layers: without the seconds of collectives.
        forward, backward: collectives of each layer.
        update: collectives of an update.
    """

    mesh: str
    layout: str
    layers: tuple[LayerProfile, ...]
    forward: tuple[tuple[Collective, ...], ...]
    backward: tuple[tuple[Collective, ...], ...]
    update: tuple[Collective, ...] = ()
    update_s: float = 0.0
    update_fixed_s: float = 0.0
    copy_s: float = 0.0
    optimizer_bytes: int = 0
    update_temporary_bytes: int = field(default=0, metadata={"json": "update_working_bytes"})
    loss_s: float = 0.0
    loss_bytes: int = 0
    loss_temporary_bytes: int = field(default=0, metadata={"json": "loss_working_bytes"})
    tied: tuple[TiedParameters, ...] = ()

    def __post_init__(self) -> None:
        _check_not_negative(self)

    def __str__(self) -> str:
        def describe(column: tuple[tuple[Collective, ...], ...]) -> str:
            totals = Collective.sums(collective for row in column for collective in row)
            return ", ".join(map(str, totals)) or "none"

        passes_s = [sum(getattr(layer, name) for layer in self.layers) for name in ("forward_s", "backward_s")]
        weight_bytes, kept_bytes = (
            sum(getattr(layer, name) for layer in self.layers) for name in ("parameter_bytes", "activation_bytes")
        )
        return (
            f"a rank of {self.mesh} ({self.layout}): forward {format_seconds(passes_s[0])}, backward "
            f"{format_seconds(passes_s[1])}, kept {format_bytes(kept_bytes)}, weights {format_bytes(weight_bytes)}\n"
            f"  collectives, forward: {describe(self.forward)}; backward: {describe(self.backward)}; update: "
            f"{describe((self.update,))}"
        )


@dataclass(frozen=True, repr=False)
class Profile(Tabular, Artifact):
    """Seconds and bytes of every layer of a model, for one minibatch.

    Attributes:
        model: its class.
        layers: in the order of the graph.
        batch: samples in the minibatch.
        input_shapes: shapes of the model's input tensors.
        dtype: the dtype that the layers compute with.
        device: in words (``cpu: EPYC``).
        runs: measured runs, whose median was taken; 0 if nothing was run.
        update_s: seconds of one optimizer step over all parameters, and of one learning-rate step.
        update_fixed_s: the part of `update_s` that every stage takes, whatever its parameters.
        copy_s: seconds of copying all parameters, as an update does if the old version is still needed.
        optimizer: its class, or ''.
        optimizer_bytes: bytes of its state after a step.
        loss_s: seconds of the loss's forward and backward.
        loss_bytes: bytes that autograd keeps from the loss.
        loss_temporary_bytes: temporary bytes of the loss.
        update_temporary_bytes: temporary bytes of a step, beyond weights, gradients and state.
        versions: versions of python, torch and this library.
        notes: what was assumed or not checked.
        tied: parameters that several layers use; in separate stages each has a copy.
        runtime: seconds that the runtime adds on the machine that measured.
        parts: the fixed seconds come from a second measurement, with 1 / parts of the samples.
        ranks: the costs of one rank of each requested mesh.
    """

    FORMAT = 1

    model: str
    graph: LayerGraph
    layers: tuple[LayerProfile, ...]
    batch: int
    input_shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    runs: int = 0
    update_s: float = 0.0
    optimizer: str = ""
    optimizer_bytes: int = 0
    loss_s: float = 0.0
    loss_bytes: int = 0
    loss_temporary_bytes: int = field(default=0, metadata={"json": "loss_working_bytes"})
    update_temporary_bytes: int = field(default=0, metadata={"json": "update_working_bytes"})
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copy_s: float = 0.0
    tied: tuple[TiedParameters, ...] = ()
    runtime: RuntimeCosts = field(default_factory=RuntimeCosts)
    update_fixed_s: float = 0.0
    parts: int = 2
    ranks: tuple[RankProfile, ...] = ()

    @property
    def value_bytes(self) -> int:
        """Bytes of a number, from `dtype`."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) // 8 if bits else 4

    def __post_init__(self) -> None:
        _check_not_negative(self)
        if len(self.layers) != len(self.graph.layers):
            raise ValueError(f"{len(self.graph.layers)} layers but {len(self.layers)} measurements")
        if not 0 <= self.update_fixed_s <= self.update_s:
            raise ValueError(f"update_fixed_s is a part of update_s = {self.update_s}, found {self.update_fixed_s}")
        if self.parts < 2:
            raise ValueError(f"parts must be at least 2, found {self.parts}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, found {self.batch}")
        for tied in self.tied:
            if len(tied.layers) < 2 or not 0 <= min(tied.layers) <= max(tied.layers) < len(self.layers):
                raise ValueError(f"a tied parameter is used by two or more of {len(self.layers)} layers, found {tied}")

    def of_rank(self, rank: RankProfile) -> Profile:
        """Returns the profile of a rank, without the seconds of its collectives."""
        shared = {field.name for field in fields(rank)} & {field.name for field in fields(self)}
        return replace(self, ranks=(), **{name: getattr(rank, name) for name in shared})

    def with_longer_backwards(self, factor: float) -> Profile:
        """Returns the profile of layers whose backwards take this many times as long."""
        if factor == 1:
            return self
        return replace(self, layers=tuple(with_longer_backward(layer, factor) for layer in self.layers))

    def in_parts(self, microbatches: int) -> Profile:
        """Returns the profile for minibatches that are split into this many microbatches.

        A layer that takes less time per sample in a small batch gets the total time of its microbatches, and no fixed
        seconds. Below the smaller measured batch the time per sample counts as constant.
        """
        if all(min(layer.forward_fixed_s, layer.backward_fixed_s) >= 0 for layer in self.layers):
            return self
        parts = min(microbatches, self.parts)

        def join_fixed(whole_s: float, fixed_s: float) -> tuple[float, float]:
            # Each part takes the fixed seconds, and whole_s has them once.
            return (whole_s, fixed_s) if fixed_s >= 0 else (max(0.0, whole_s + (parts - 1) * fixed_s), 0.0)

        layers = []
        for layer in self.layers:
            forward_s, forward_fixed_s = join_fixed(layer.forward_s, layer.forward_fixed_s)
            backward_s, backward_fixed_s = join_fixed(layer.backward_s, layer.backward_fixed_s)
            layers.append(
                replace(
                    layer,
                    forward_s=forward_s,
                    forward_fixed_s=forward_fixed_s,
                    backward_s=backward_s,
                    backward_fixed_s=backward_fixed_s,
                )
            )
        return replace(self, layers=tuple(layers))

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    @property
    def work(self) -> tuple[tuple[int, int], ...]:
        """(flops, bytes moved) of each layer; ((1, 0),), as of a matrix product, if not counted."""
        counted = tuple((c.forward_flops + c.backward_flops, c.moved_bytes) for c in self.layers)
        return counted if self.flops else ((1, 0),)

    @property
    def flops(self) -> int:
        """Floating-point operations of both passes; 0 if not counted."""
        return sum(layer.forward_flops + layer.backward_flops for layer in self.layers)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written; 0 if not counted."""
        return sum(layer.moved_bytes for layer in self.layers)

    @property
    def matrices(self) -> tuple[Matrices, ...]:
        return join_matrices(matrix for layer in self.layers for matrix in layer.matrices)

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def trained_bytes(self) -> int:
        return sum(layer.trained_bytes for layer in self.layers)

    def without_tied_groups(self) -> Profile:
        """Returns the profile for methods that may hold a weight in several stages.

        Groups that no method can separate (`LayerGraph.inseparable`) remain.
        """
        return replace(self, graph=replace(self.graph, ties=self.graph.inseparable))

    def ties_in_words(self) -> str:
        """Says which layers a tied weight keeps together, and how to separate them; '' if none.

        Groups that no method can separate are not listed.
        """
        rows = []
        for group in self.graph.ties:
            if group not in self.graph.inseparable:
                names = [name for tied in self.tied if set(tied.layers) <= set(group) for name in tied.names]
                shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
                layers = " and ".join(repr(self.graph.layers[i].name) for i in group)
                rows.append(f"layers {layers} share {shown or 'a parameter'}")
        if not rows:
            return ""
        return (
            f"{'; '.join(rows)} and stay in one stage, because this method's stages update at different times; to "
            "separate them, untie the weight, or choose a method whose stages all make the same updates: "
            "pipedream_2bw, or a flushing one (1f1b, gpipe)"
        )

    @classmethod
    def of_chain(cls, layers: tuple[LayerProfile, ...], *, batch: int = 1, **rest: object) -> Profile:
        """Returns a profile of a chain of unnamed layers."""
        graph = LayerGraph.chain(tuple(Layer(f"layer{i}", "Layer") for i in range(len(layers))))
        return cls("chain", graph, layers, batch, **rest)  # type: ignore[arg-type]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each layer, for one minibatch."""
        return [
            {"layer": layer.name, "kind": layer.kind} | asdict(cost)
            for layer, cost in zip(self.graph.layers, self.layers, strict=True)
        ]

    def __str__(self) -> str:
        return self.describe()

    def describe(self, most: int | None = None) -> str:
        """Returns the table of all layers, or of the `most` slowest, with the totals and the notes."""
        slowest = sorted(range(len(self.layers)), key=lambda i: -self.layers[i].forward_s - self.layers[i].backward_s)
        shown = sorted(slowest[:most])
        how = f"median of {self.runs} runs" if self.runs else "not run"
        head = f"Profile of {self.model}: batch {self.batch}, {self.dtype}, {self.device}, {how}\n"
        heads = ["layer", "kind", "forward", "backward", "spread", "output", "kept", "weights"]
        cells = [
            [
                layer.name,
                layer.kind,
                *map(format_seconds, (cost.forward_s, cost.backward_s, cost.forward_spread_s + cost.backward_spread_s)),
                *map(format_bytes, (cost.output_bytes, cost.activation_bytes, cost.parameter_bytes)),
            ]
            for layer, cost in ((self.graph.layers[i], self.layers[i]) for i in shown)
        ]
        kept_bytes = sum(cost.activation_bytes for cost in self.layers)
        total = ["total", "", *map(format_seconds, (self.forward_s, self.backward_s)), "", ""]
        total += map(format_bytes, (kept_bytes, self.parameter_bytes))
        rows = [align([heads, *fold(cells), total], "llr")]
        rows.append("kept: by the forward, for the backward; spread: between the quartiles of the runs")
        if len(shown) < len(self.layers):
            rows.append(f"the slowest {most} of {len(self.layers)} layers")
        if self.trained_bytes < self.parameter_bytes:
            rows.append(f"frozen: {format_bytes(self.parameter_bytes - self.trained_bytes)} of the weights")
        if self.optimizer:
            rows.append(
                f"update ({self.optimizer}): {format_seconds(self.update_s)}, state "
                f"{format_bytes(self.optimizer_bytes)}; loss: {format_seconds(self.loss_s)}"
            )
        if self.runtime:
            rows.append(str(self.runtime))
        if self.flops:
            rows.append(f"{format_number(self.flops * 1e-12)} Tflop, {format_bytes(self.moved_bytes)} read and written")
        rows += map(str, self.ranks)
        rows += [f"note: {note}" for note in self.notes]
        return head + "\n".join(rows)


def with_longer_backward(costs: Any, factor: float) -> Any:
    """Returns a layer, or a stage, whose backward takes this many times as long."""
    return replace(costs, backward_s=factor * costs.backward_s, backward_fixed_s=factor * costs.backward_fixed_s)
