"""The Stage: consecutive layers of a plan, with predicted seconds and bytes; and weights that several stages hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pipedream.core.hardware.cluster import MAX_WORKERS, Cluster
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.cost import SumLink
from pipedream.core.plan.memory import StageMemory, StageSizes, part_bytes
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.ranks import Mesh


@dataclass(frozen=True)
class Stage:
    """Consecutive layers, run by one worker or replicated over several.

    Seconds and bytes are of one rank of a worker, for one minibatch or microbatch (`Plan.unit`).

    Attributes:
        first, last: the layers first <= i < last.
        update_s: seconds of the optimizer's step and `copy_s`.
        copy_s: seconds of copying the weights, if the old version is still needed.
        output_bytes: bytes of the value that it sends on.
        activation_bytes: bytes kept between its forward and its backward.
        temporary_bytes: temporary bytes of a pass.
        peak_bytes: predicted peak under the plan's schedule; 0 if unknown.
        names: the layers' names.
        forward_fixed_s, backward_fixed_s: the part that every microbatch takes, whatever its size.
        forward_launch_s, backward_launch_s: seconds that the host needs to launch a pass on a GPU (`LayerProfile`).
        recompute: only its input is kept, and the backward repeats the forward.
        offload: its activations wait elsewhere (`Choices.activations`).
        gathered_bytes: the part of `temporary_bytes` for sharded weights, for any number of samples.
        freed_before_peak_bytes, largest_parameter_bytes, update_temporary_bytes: see `StageSizes`; the first for a
            minibatch.
        memory: the peak by kinds of bytes.
        mesh: the ranks of each worker (`core.plan.ranks.Mesh`); '' for one.
        matrices: its trained weights of two or more dimensions; () if unknown.
        frozen_bytes: the part of `parameter_bytes` that is not trained.
        layout: the rules that shard tensors over the mesh (`pipedream.Layout`); '' for none.
    """

    first: int
    last: int
    replicas: int = 1
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    output_bytes: int = 0
    activation_bytes: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    peak_bytes: int = 0
    names: tuple[str, ...] = ()
    recompute: bool = False
    offload: bool = False
    temporary_bytes: int = field(default=0, metadata={"json": "working_bytes"})
    freed_before_peak_bytes: int = field(default=0, metadata={"json": "relief_bytes"})
    largest_parameter_bytes: int = 0
    update_temporary_bytes: int = field(default=0, metadata={"json": "update_working_bytes"})
    memory: StageMemory = field(default_factory=StageMemory)
    forward_fixed_s: float = 0.0
    backward_fixed_s: float = 0.0
    copy_s: float = 0.0
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0
    mesh: str = ""
    layout: str = ""
    gathered_bytes: int = 0
    matrices: tuple[Matrices, ...] = ()
    frozen_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Mesh(self.mesh).text)
        if not 0 <= self.first < self.last:
            raise ValueError(f"a stage needs layers first < last, found {self.first} and {self.last}")
        if not 1 <= self.replicas <= MAX_WORKERS:
            raise ValueError(f"a stage needs between 1 and {MAX_WORKERS} workers, found {self.replicas}")
        if self.offload and self.recompute:
            raise ValueError("a stage that recomputes has no activations to offload, found both")
        sizes = ("output_bytes", "activation_bytes", "temporary_bytes", "parameter_bytes", "trained_bytes")
        passes = ("forward_s", "backward_s", "forward_fixed_s", "backward_fixed_s")
        for name in (*passes, "forward_launch_s", "backward_launch_s", "update_s", "copy_s", *sizes):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative, found {getattr(self, name)}")

    def sizes(
        self, parts: int = 1, received_bytes: int = 0, *, samples: int = 1, is_last: bool = False, kept: int = 0
    ) -> StageSizes:
        """Returns the bytes of the largest of `parts` microbatches in a unit of `samples` samples.

        `kept` is `MemoryTerms.kept_samples`.
        """

        def part(whole_bytes: int) -> int:
            return int(part_bytes(whole_bytes, parts, samples))

        sent_bytes = 0 if is_last else self.output_bytes
        return StageSizes(
            parameter_bytes=self.parameter_bytes,
            optimizer_bytes=self.optimizer_bytes,
            activation_bytes=part(self.activation_bytes),
            input_bytes=part(received_bytes),
            received_bytes=part(received_bytes),
            sent_bytes=part(sent_bytes),
            kept_bytes=kept * (received_bytes + sent_bytes) // samples,
            temporary_bytes=part(self.temporary_bytes - self.gathered_bytes) + self.gathered_bytes,
            freed_before_peak_bytes=part(self.freed_before_peak_bytes),
            largest_parameter_bytes=self.largest_parameter_bytes,
            update_temporary_bytes=self.update_temporary_bytes,
            frozen_bytes=self.frozen_bytes,
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes on a GPU only while its passes run; 0 unless the GPU has copies of its weights."""
        memory = self.memory
        is_copied = memory.weight_bytes > self.parameter_bytes
        return is_copied * (memory.weight_bytes + memory.gradient_bytes + memory.temporary_bytes)

    @property
    def trained_bytes(self) -> int:
        return self.parameter_bytes - self.frozen_bytes

    def split_s(self, microbatches: int) -> tuple[float, float]:
        """Returns the seconds of both passes of one of m equal microbatches: fixed + (all - fixed) / m."""
        return (
            self.forward_fixed_s + (self.forward_s - self.forward_fixed_s) / microbatches,
            self.backward_fixed_s + (self.backward_s - self.backward_fixed_s) / microbatches,
        )

    @property
    def fixed_s(self) -> float:
        """Seconds of a microbatch's passes, with a repeated forward, that do not depend on its size."""
        return self.backward_fixed_s + self.forward_fixed_s * (1 + self.recompute)

    @property
    def launch_s(self) -> float:
        return self.forward_launch_s + self.backward_launch_s

    @property
    def redone_s(self) -> float:
        """Seconds of the backward, with a repeated forward if the stage recomputes."""
        return self.backward_s + (self.forward_s if self.recompute else 0.0)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.redone_s + self.update_s


@dataclass(frozen=True)
class TiedWeights:
    """Weights that several stages hold, e.g. an embedding and an output layer that share a matrix.

    Each holder has its own copy, gradient and optimizer state; the first of `stages` counts them in the norm. At an
    update the holders sum their gradients, so that the copies stay equal.

    Attributes:
        names: in the user's state dict.
        stages: at least two, in order.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    parameter_bytes: int = 0

    def among(self, stages: Collection[int]) -> TiedWeights:
        """Returns the same weights with the holders in `stages` only."""
        return TiedWeights(self.names, tuple(stage for stage in self.stages if stage in stages), self.parameter_bytes)

    def ranks(self, placement: Placement) -> tuple[int, ...]:
        """Returns the ranks with a holder, in order."""
        return tuple(sorted({rank for stage in self.stages for rank in placement.ranks[stage]}))

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names[:3])) + (", ..." if len(self.names) > 3 else "")
        return f"{names} (stages {', '.join(map(str, self.stages))})"


def sum_peaks(stages: Sequence[Stage]) -> int:
    """Returns the peak bytes of a worker with these stages; a GPU copies the weights of one stage at a time."""
    slots_bytes = sorted(stage.slot_bytes for stage in stages)
    return sum(stage.peak_bytes for stage in stages) - sum(slots_bytes[:-1])


def least_sum_s(cluster: Cluster, parameter_bytes: int) -> float:
    """Returns the least seconds of a sum over holders of a weight: two holders, on the cluster's fastest links.

    The planner adds them to the update of each holder, as work at speed 1; only a whole plan knows the other holders.
    """
    rates, latencies = zip(*(cluster.sum_link(level) for level in range(len(cluster.levels))), strict=True)
    link = SumLink(max(rates), min(latencies), cluster.all_reduce)
    return float(link.all_reduce_s(parameter_bytes, 2)) * min(cluster.speeds)
