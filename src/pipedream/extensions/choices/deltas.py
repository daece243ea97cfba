"""deltas: of samples that were seen before, activations travel as differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pipedream.core.door import is_file
from pipedream.core.errors import PlanError
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.choice import Choice, Shapes
from pipedream.core.plan.codec import CODECS, list_encodings
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes

_WORK = 5.0
"""Seconds of differences over those of an encoding like theirs: what is sent is decoded, too, and copied at both ends
(int3 over int4, of 130 to 400 kB, one core of an x86 server)."""


@dataclass(frozen=True)
class Deltas(Choice):
    """The encoding of differences, and how many samples both ends of a cut keep.

    AQ-SGD (arXiv 2206.01299). The first visit of a sample travels in the encoding of `messages`.

    Attributes:
        encoding: '' for none.
        value_bits: bits of a value that is not encoded.
    """

    approximates: ClassVar[bool] = True
    option = "deltas"
    help = (
        "Encoding of activations as differences to those of a sample's last visit, and the number of samples, such as "
        "int3:5000. For data that are seen in several epochs, alike each time."
    )
    exclusions = """
deltas | recompute=always|auto mesh
    it needs stages on one rank each, which run a forward once
deltas | shape:has_replicas
    a sample would come to another replica in the next epoch
deltas | allow_approximate
    it tries encodings and sums itself, beside the exact answer
"""
    encoding: str = ""
    samples: int = 0
    value_bits: int = 32

    def __post_init__(self) -> None:
        if self.encoding and not ((is_file(self.encoding) or CODECS.has(self.encoding)) and self.samples > 0):
            raise PlanError(_describe_refusal(f"{self.encoding}:{self.samples}"))

    @classmethod
    def list_texts(cls) -> str:
        return "ENCODING:SAMPLES"

    @classmethod
    def read(cls, text: Any) -> Self:
        """Reads ``"int3:5000"``; '' or 'none' chooses nothing. Raises a `PlanError`."""
        if isinstance(text, cls):
            return text
        if text in ("", "none", None):
            return cls()
        encoding, _, count = str(text).rpartition(":")
        if not (encoding and count.isdecimal()):
            raise PlanError(_describe_refusal(text))
        choice = cls(encoding, int(count))
        if is_file(encoding):
            CODECS.open_file(encoding)
        return choice

    def check_opened(self) -> None:
        if self:
            CODECS.find(self.encoding)

    def of_values(self, bits: int) -> Self:
        return replace(self, value_bits=bits)

    def check_replicas(self, replicas: Sequence[int]) -> None:
        if self and max(replicas) > 1:
            raise PlanError(
                f"deltas={self} was asked for, but a stage has {max(replicas)} replicas, and a sample would come to "
                "another one in the next epoch; plan a straight pipeline, or leave deltas out"
            )

    def check(self, plan: Any, programs: Sequence[Any], options: Any, shapes: Shapes) -> None:
        if not self:
            return
        for program in programs:
            stages, elsewhere = program.plan.stages, program.placement.runs_backward_elsewhere
            if any(stage.recompute or elsewhere(s) for s, stage in enumerate(stages)):
                raise PlanError(
                    f"deltas={self} was asked for with {program.name!r}, but a stage repeats its forward, when what a "
                    "sample's last visit left is gone; choose another method, recompute='never', or leave deltas out"
                )
        if plan.ranks > plan.workers:
            raise PlanError(f"deltas={self} was asked for, but meshes send parts of samples; leave one of them out")
        if options.batch_dim != 0:
            raise PlanError(f"deltas={self} was asked for with batch_dim={options.batch_dim}; give batches by rows")

    def check_machine(
        self, stages: Sequence[Stage], free_bytes: int, versions: Sequence[int] | None, gradient_sets: int
    ) -> int:
        need_bytes = sum(stage.memory.moved_bytes for stage in stages if not stage.offload)
        if need_bytes > free_bytes:
            raise PlanError(
                f"deltas={self} was asked for, which keeps {format_bytes(need_bytes)} of samples on a machine; "
                f"{format_bytes(free_bytes)} are free there; leave deltas out, or cut where less is sent"
            )
        return free_bytes - need_bytes

    def on_replicas(self, replicas: Sequence[int]) -> Self:
        return self if len(replicas) > 1 else replace(self, encoding="", samples=0)

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return "none" if self and not on_gpus else ""

    def add_terms(self, terms: Terms, weights: Any, value_bytes: float) -> Terms:
        if not self:
            return terms
        share = min(1.0, CODECS.find(self.encoding).bits / self.value_bits)
        memory = terms.memory._replace(kept_samples=self.samples)
        return terms._replace(message_shares=(share, terms.message_shares[1]), memory=memory)

    def add_costs(self, runtime: RuntimeCosts) -> RuntimeCosts:
        if not self:
            return runtime
        like = CODECS.find(self.encoding).costs_like or self.encoding
        added_s = _WORK * runtime.encodings_s_per_byte.get(like, 0.0) / 2  # the mean of an activation and its gradient
        return replace(runtime, encoding_s_per_byte=runtime.encoding_s_per_byte + added_s)

    def describe(self, plan: Any) -> Iterator[str]:
        if self:
            sizes = ", ".join(map(format_bytes, self._list_kept_bytes(plan)))
            yield f"deltas: {self}, from a sample's second visit on (approximate); each end of a cut keeps {sizes}"

    def _list_kept_bytes(self, plan: Any) -> list[int]:
        """Returns the bytes that each end of each cut keeps in the memory of its machine."""
        return [self.samples * stage.output_bytes // plan.batch for stage in plan.stages[:-1]]

    def __bool__(self) -> bool:
        return bool(self.encoding)

    def __str__(self) -> str:
        return f"{self.encoding}:{self.samples}" if self else "none"


def _describe_refusal(text: Any) -> str:
    return (
        f"deltas={text!r} was asked for; give ENCODING:SAMPLES, such as int3:5000: one of "
        f"{', '.join(list_encodings())}, and how many samples the data have"
    )


CHOICES = (Deltas(),)
