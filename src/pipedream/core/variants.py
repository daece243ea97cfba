"""The RecipeComparison: one recipe trained in several ways over links of given rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipedream.core.display import align
from pipedream.core.units import format_bytes, format_number

ONE_WORKER, DDP = "one worker", "DDP"
ACCUMULATED = 8
"""Minibatches that each worker accumulates before its gradients are summed, in accumulating variants."""
SHARED, ACCUMULATING = "DDP, minibatch shared", f"DDP, accumulating {ACCUMULATED}"
HALF, HALF_ACCUMULATING = "DDP, fp16", f"DDP, fp16, accumulating {ACCUMULATED}"
LOCAL_SGD = f"local SGD, every {ACCUMULATED}"
TORCH = (DDP, SHARED, ACCUMULATING, HALF, HALF_ACCUMULATING, LOCAL_SGD, "torch Schedule1F1B")
"""Torch's own ways to train on several workers."""
_TIMES_DDP = " as many samples per second as DDP"


@dataclass(frozen=True)
class Variant:
    """One way to train, with its results; unknown figures are None.

    Attributes:
        plan: replica counts of the stages, and the depth; '' for one of torch's.
        predicted_per_s: samples per second by simulation.
        samples_per_update: over all workers.
        bytes_per_sample: bytes that all workers sent, with evaluations and the packets' headers, per trained sample.
        bubble: share of time in which workers did not compute; for torch's variants, all time beyond the profiled
            seconds.
        peak_bytes: peak of tensors, on the fullest worker.
        seconds_to_target: None if it was not reached.
        metrics: metrics of the last evaluation.
        why: why it did not run; else ''.
        approximation: of the gradients, such as 'sums=powersgd:4'.
    """

    name: str
    workers: int
    plan: str = ""
    samples_per_s: float | None = None
    predicted_per_s: float | None = None
    samples_per_update: int | None = None
    bytes_per_sample: float | None = None
    bubble: float | None = None
    peak_bytes: int | None = None
    seconds_to_target: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    why: str = ""
    approximation: str = ""


@dataclass(frozen=True)
class OverLink:
    """All variants over one link.

    Attributes:
        bytes_per_s: speed of each level of the network, innermost first; () for this machine's own links.
    """

    bytes_per_s: tuple[float, ...]
    variants: tuple[Variant, ...]

    @property
    def link(self) -> str:
        """The rates in words."""
        return ", ".join(map(format_link, self.bytes_per_s)) or "this machine's own links"

    def fastest(self, *, exact: bool = False) -> Variant | None:
        """Returns the variant with most samples per second; with `exact`, of those with exact gradients."""
        ran = [v for v in self.variants if v.samples_per_s and not (exact and v.approximation)]
        return max(ran, key=lambda variant: variant.samples_per_s or 0.0, default=None)

    def compare_with(self, name: str, variant: Variant) -> float | None:
        """Returns a variant's samples per second over those of the variant of this name."""
        other = next((other.samples_per_s for other in self.variants if other.name == name), None)
        return None if not other or variant.samples_per_s is None else variant.samples_per_s / other

    def verdict(self) -> str:
        """Recommends a variant for this link, and an exact one if the first is approximate."""
        where, best, exact = f"over {self.link}", self.fastest(), self.fastest(exact=True)
        if best is None:
            return f"{where} nothing ran"
        text = f"{where} {self._recommend(best)}"
        if best.approximation and exact is not None:
            text += f" (approximate: {best.approximation}); with exact gradients {self._recommend(exact)}"
        return text

    def _recommend(self, best: Variant) -> str:
        if best.name == ONE_WORKER:
            return "one worker alone is the fastest"
        alone = self.compare_with(ONE_WORKER, best)
        gain = "" if alone is None else f", {format_ratio(alone)} times as fast as one worker"
        if best.name.startswith(DDP):
            return f"use {best.name}{gain}"
        if (ratio := self.compare_with(DDP, best)) is None:
            return f"{best.name} is the fastest{gain}"
        return f"{best.name} trains {format_ratio(ratio)} times{_TIMES_DDP}{gain}"


@dataclass(frozen=True)
class RecipeComparison:
    """One recipe trained in several ways.

    Attributes:
        target: (metric, value), or None.
        notes: remarks on the figures.
        emulated: several workers waited instead of computing.
    """

    recipe: str
    workers: int
    target: tuple[str, float] | None
    links: tuple[OverLink, ...]
    notes: tuple[str, ...] = ()
    emulated: bool = False

    @property
    def workers_text(self) -> str:
        return f"{self.workers} {'emulated ' if self.emulated else ''}workers"

    @property
    def verdict(self) -> str:
        """One sentence: what to use over which link."""
        text = "; ".join(link.verdict() for link in self.links)
        first, times_ddp, rest = text.partition(_TIMES_DDP)
        text = ("with emulated workers " if self.emulated else "") + first + times_ddp + rest.replace(_TIMES_DDP, "")
        return f"{text[:1].upper()}{text[1:]}."

    @property
    def heads(self) -> tuple[str, ...]:
        """The columns of `row`."""
        names = dict.fromkeys(name for link in self.links for variant in link.variants for name in variant.metrics)
        return (
            "variant", "plan", "samples/s", "predicted", "of one worker", "of DDP", "samples/update", "bytes/sample",
            "bubble", "peak", "s to target", *names,
        )  # fmt: skip

    def row(self, link: OverLink, variant: Variant) -> tuple[str, ...]:
        """Returns a variant's figures in words, one for each of `heads`; '-' where unknown."""
        shares = [link.compare_with(name, variant) for name in (ONE_WORKER, DDP)]
        return (
            variant.name,
            variant.plan or "-",
            format_number(variant.samples_per_s),
            format_number(variant.predicted_per_s),
            *("-" if share is None else f"{share:.2f}" for share in shares),
            format_number(variant.samples_per_update),
            "-" if variant.bytes_per_sample is None else format_bytes(variant.bytes_per_sample),
            "-" if variant.bubble is None else f"{variant.bubble:.1%}",
            "-" if variant.peak_bytes is None else format_bytes(variant.peak_bytes),
            format_number(variant.seconds_to_target),
            *(format_number(variant.metrics.get(name)) for name in self.heads[11:]),
        )

    def reasons(self) -> tuple[str, ...]:
        """Explains each figure that is missing on purpose, and lists the notes."""
        reasons = [
            f"{variant.name} did not run: {variant.why}"
            for link in self.links
            for variant in link.variants
            if variant.why
        ]
        if self.target is None:
            reasons.append('no seconds to a target: the recipe has none; give it one, as in target=("accuracy", 0.97)')
        return (*dict.fromkeys(reasons), *self.notes)

    def __str__(self) -> str:
        parts = []
        for link in self.links:
            rows = [self.heads, *(self.row(link, variant) for variant in link.variants)]
            parts.append(f"{self.recipe}, {self.workers_text}, over {link.link}\n{align(rows, 'llr')}")
        notes = [f"note: {reason}" for reason in self.reasons()]
        return "\n\n".join([*parts, "\n".join([*notes, self.verdict])])


def format_link(bytes_per_s: float) -> str:
    """Returns a rate in bits, as networks are sold.

    >>> format_link(50e6), format_link(1.25e9)
    ('400 Mbit/s', '10 Gbit/s')
    """
    bits = 8 * bytes_per_s
    for name, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {name}" if bits < 1000 * size else f"{bits / size:.0f} {name}"
    return f"{bits:.3g} bit/s"


def format_ratio(ratio: float) -> str:
    """Returns a ratio, never rounded up.

    >>> format_ratio(4.28), format_ratio(0.478)
    ('4.2', '0.47')
    """
    digits = 1 if ratio >= 1 else 2
    return f"{math.floor(ratio * 10**digits + 1e-9) / 10**digits:.{digits}f}"
