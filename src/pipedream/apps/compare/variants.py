"""The RecipeComparison: runs of one recipe, in several ways and over links of given rates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from pipedream.core.artifact import NOT_STORED
from pipedream.core.tabular import align
from pipedream.core.units import LinkSpeed, describe_slowness, format_bytes, format_number, format_seconds

ONE_WORKER, DDP = "one worker", "DDP"
_OWN_LINKS = "this machine's own links"
_FEW_UPDATES = 100
"""A mean over a tenth of fewer training losses depends on their minibatches."""


@dataclass(frozen=True)
class Variant:
    """One way to train over one link, with the figures of its run folder; unknown ones are None.

    Attributes:
        link, latency_s: bytes/s of the link, and seconds of one way; None for this machine's own links.
        plan: replica counts of the stages, and the depth; '' for one of torch's.
        samples_per_s: None if all workers ran in one process.
        predicted_per_s: samples per second by simulation; None for torch's.
        samples_per_update: over all workers.
        bytes_per_sample: bytes that all workers sent, from their start to their end, per trained sample.
        bubble: share of time in which workers did not compute; None for torch's.
        peak_bytes: peak of tensors, on the fullest worker.
        why: why it did not run, or not to its end; else ''.
        slowness: how many times longer work took, for other work on the cores; 1 on free cores.
        approximation: of the gradients, such as 'sums=powersgd:4'.
        losses: (samples trained, loss) of each minibatch.
        test_losses: the same of each evaluation.
    """

    name: str
    link: float | None = None
    folder: str = ""
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
    slowness: float = 1.0
    approximation: str = ""
    losses: tuple[tuple[int, float], ...] = field(default=(), metadata=NOT_STORED)
    test_losses: tuple[tuple[int, float], ...] = field(default=(), metadata=NOT_STORED)
    latency_s: float = 0.0

    @property
    def speed(self) -> LinkSpeed | None:
        return None if self.link is None else LinkSpeed(self.link, self.latency_s)

    @property
    def loss_curve(self) -> list[tuple[float, float]]:
        """(seconds, loss) of each minibatch, at the measured or predicted rate."""
        return self.in_seconds(self.losses)

    def in_seconds(self, losses: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
        """Returns (seconds, loss) of each (samples, loss)."""
        rate = self.samples_per_s or self.predicted_per_s or math.inf
        return [(samples / rate, loss) for samples, loss in losses]


@dataclass(frozen=True)
class RecipeComparison:
    """Runs of one recipe.

    Attributes:
        variants: those over the same link follow each other.
        settings: what was asked for.
        delayed: all workers of a run are in one process, and its losses show what stale gradients cost; the first run
            flushes, so it trains as one worker does.
        finished: all runs have ended.
        notes: those of the profile.
    """

    recipe: str
    workers: int
    variants: tuple[Variant, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    delayed: bool = False
    finished: bool = True
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        workers = f"{self.workers} {'stages in one process' if self.delayed else 'workers'}"
        return f"{self.recipe}, {workers}"

    @property
    def links(self) -> dict[LinkSpeed | None, list[Variant]]:
        """The variants over each link."""
        links = dict.fromkeys(variant.speed for variant in self.variants)
        return {link: [variant for variant in self.variants if variant.speed == link] for link in links}

    def compare_with(self, name: str, variant: Variant) -> float | None:
        """Returns a variant's samples per second over those of the variant of this name, over the same link."""
        others = (other.samples_per_s for other in self.links[variant.speed] if other.name == name)
        other = next(others, None)
        return None if not other or variant.samples_per_s is None else variant.samples_per_s / other

    def average_losses(self, variant: Variant) -> list[tuple[float, float]]:
        """Returns (seconds, moving average of the loss), over a tenth of the first run's minibatches."""
        curve = variant.loss_curve
        window = max(1, min(len(self.variants[0].losses) // 10, len(curve)))
        sums = list(accumulate((loss for _, loss in curve), initial=0.0))
        means = [(after - before) / window for before, after in zip(sums, sums[window:], strict=False)]
        return [(seconds, mean) for (seconds, _), mean in zip(curve[window - 1 :], means, strict=True)]

    def reach_reference(self, variant: Variant) -> float | None:
        """Returns the seconds until a run reaches the first run's last test loss; None if it never does.

        Without evaluations it is the mean of training losses, of which a single one depends on its minibatch.
        """
        first = self.variants[0]
        if first.test_losses:
            means, reference = variant.in_seconds(variant.test_losses), first.in_seconds(first.test_losses)[-1:]
        else:
            means, reference = self.average_losses(variant), self.average_losses(first)[-1:]
        return next((seconds for seconds, mean in means if reference and mean <= reference[0][1]), None)

    @property
    def verdict(self) -> str:
        """One sentence: what is fastest over which link, or predicted to be the first at the first run's loss."""
        if not self.finished:
            return "Not all runs have finished: the same command, with this folder as --out, continues."
        text = self._judge_losses() if self.delayed else "; ".join(map(self._judge_link, self.links))
        return f"{text[:1].upper()}{text[1:]}."

    @property
    def _judged(self) -> str:
        return "test loss" if self.variants[0].test_losses else "loss"

    def _judge_losses(self) -> str:
        seconds = {variant.name: s for variant in self.variants if (s := self.reach_reference(variant)) is not None}
        if not seconds:
            return "nothing was trained"
        best, reference = min(seconds, key=seconds.__getitem__), self.variants[0].name
        updates = len(self.variants[0].losses)
        if not self.variants[0].test_losses and updates < _FEW_UPDATES:
            return f"{updates} updates without an evaluation do not decide; train more, or give the recipe test data"
        loss = f"its own {self._judged}" if best == reference else f"the {self._judged} of {reference}"
        text = f"{at_link(self.variants[0].speed)}, {best} is predicted to be the first at {loss}"
        also = "" if best == reference else f"; {reference} takes {format_seconds(seconds[reference])}"
        return f"on {self.workers} workers {text}, after {format_seconds(seconds[best])}{also}"

    def _judge_link(self, link: LinkSpeed | None) -> str:
        """Names the fastest variant over a link, and the fastest other one if it approximates gradients."""
        ran = sorted((v for v in self.links[link] if v.samples_per_s), key=lambda v: -(v.samples_per_s or 0.0))
        if not ran:
            return f"{at_link(link)} nothing ran"
        if len(ran) == 1 < len(self.links[link]):
            return f"{at_link(link)} only {self._praise(ran[0])} ran"
        text = f"{at_link(link)} {self._praise(ran[0])} is the fastest"
        exact = next((variant for variant in ran if not variant.approximation), ran[0])
        return text if exact is ran[0] else f"{text}, without approximation {self._praise(exact)}"

    def _praise(self, variant: Variant) -> str:
        """Returns a variant's name, and how much faster it is than one worker and DDP."""
        ratios = {name: self.compare_with(name, variant) for name in (ONE_WORKER, DDP) if name != variant.name}
        words = [f"{format_ratio(ratio)} times {name}" for name, ratio in ratios.items() if ratio]
        return f"{variant.name} ({', '.join(words)})" if words else variant.name

    def table(self) -> list[tuple[str, ...]]:
        """Returns heads, and a row for each run; '-' where unknown. A column without figures is left out."""
        columns: dict[str, list[str]] = {}

        def add(head: str, figure: Callable[[Variant], Any], words: Callable[[Any], str] = format_number) -> None:
            values = map(figure, self.variants)
            columns[head] = ["-" if value in (None, "") else words(value) for value in values]

        add("over", lambda variant: variant.speed or _OWN_LINKS, str)
        add("variant", lambda variant: variant.name, str)
        add("plan", lambda variant: variant.plan, str)
        for name in dict.fromkeys(name for variant in self.variants for name in variant.metrics):
            add(f"test {name}", partial(lambda name, variant: variant.metrics.get(name), name))
        add("samples/s", lambda variant: variant.samples_per_s)
        add("predicted", lambda variant: variant.predicted_per_s)
        for name in (ONE_WORKER, DDP):
            add(f"of {name}", partial(self.compare_with, name), "{:.2f}".format)
        add("samples/update", lambda variant: variant.samples_per_update)
        add("bytes/sample", lambda variant: variant.bytes_per_sample, format_bytes)
        add("bubble", lambda variant: variant.bubble, "{:.1%}".format)
        add("peak", lambda variant: variant.peak_bytes, format_bytes)
        add("s to target", lambda variant: variant.seconds_to_target)
        add("updates", lambda variant: len(variant.losses) or None)
        add("loss", lambda variant: next((mean for _, mean in self.average_losses(variant)[-1:]), None))
        if self.delayed:
            add(f"s to {self.variants[0].name}'s {self._judged}", self.reach_reference)
        filled = ([head, *cells] for head, cells in columns.items() if set(cells) != {"-"})
        return list(zip(*filled, strict=True))

    def reasons(self) -> tuple[str, ...]:
        """Explains why runs have no figures."""
        reasons = (f"{variant.name} has no figures: {variant.why}" for variant in self.variants if variant.why)
        return tuple(dict.fromkeys(reasons))

    def doubts(self) -> tuple[str, ...]:
        """Explains why figures may be wrong."""
        worst = max(self.variants, key=lambda variant: variant.slowness, default=Variant(""))
        busy = describe_slowness(worst.slowness, "a worker's")
        text = f"speeds may be wrong: {busy} in {worst.name} {at_link(worst.speed)}; compare again on free cores"
        return (*self.notes, text) if busy else self.notes

    def __str__(self) -> str:
        notes = [f"note: {reason}" for reason in (*self.reasons(), *self.doubts())]
        return "\n".join([self.heading, align(self.table(), "lllr"), "", *notes, self.verdict])


def at_link(link: LinkSpeed | None) -> str:
    """Returns a link with its preposition: at 400 Mbit/s."""
    return f"{'over' if link is None else 'at'} {link or _OWN_LINKS}"


def format_ratio(ratio: float) -> str:
    """Returns a ratio, never rounded up.

    >>> format_ratio(4.28), format_ratio(0.478)
    ('4.2', '0.47')
    """
    digits = 1 if ratio >= 1 else 2
    return f"{math.floor(ratio * 10**digits + 1e-9) / 10**digits:.{digits}f}"
