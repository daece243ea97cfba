"""What a comparison runs: methods over links."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipedream.apps.training.options import TrainingOptions
from pipedream.core.errors import PlanError
from pipedream.core.flags import number, option, option_of
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.units import LinkSpeed, format_rate, parse_link
from pipedream.plan_request import PlanRequest

_MIN_BYTES_PER_S, _USUAL_BYTES_PER_S, _LATENCY_S = 1000.0, 1.25e9, 1e-4  # latency: of a message


def _read_links(texts: Sequence[str]) -> tuple[LinkSpeed, ...]:
    """Reads --link."""
    links = []
    for text in texts:
        try:
            links.append(parse_link(text))
        except ValueError as error:
            raise PlanError(f"--link {text}: {error}") from None
        if links[-1].bytes_per_s < _MIN_BYTES_PER_S:
            number, plus, latency = text.partition("+")
            meant = f"{number.strip().rstrip('bBit/s ')}mbit/s{plus}{latency}"
            raise PlanError(f"--link {text} is {format_rate(links[-1].bytes_per_s)}; did you mean {meant}?")
    return tuple(links)


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Options of a comparison. Raises a PlanError if they exclude each other."""

    workers: int | None = number(
        None, "Workers of each variant; the stages of --emulate-delay.", unset="2, or 4 stages"
    )
    links: tuple[LinkSpeed, ...] = option(
        (),
        "Run over links of this rate, by network namespaces, and with this latency one way: 400mbit/s or "
        "25mbit/s+50ms. Repeatable.",
        "--link",
        metavar="RATE[+LATENCY]",
        unset="this machine's own links",
        kind=list[str],
        read=_read_links,
    )
    schedules: tuple[str, ...] = option(
        (),
        "Method to compare with one worker: torch is all that torch offers, data-parallel this library's, auto the "
        "planner's choice. After a plus, the encoding of its messages or how its replicas are summed: 1f1b+int8, "
        "data-parallel+powersgd:4; with --emulate-delay a compensation: pipedream+spike. Repeatable.",
        "--schedule",
        metavar="NAME[+MESSAGES|+SUMS|+COMPENSATION]",
        unset="torch; data-parallel, also with powersgd:4 and diloco:30; 1f1b, pipedream and pipedream_2bw, also with "
        "encoded messages; auto",
        kind=list[str],
        read=tuple,
    )
    emulate_delay: bool = option(
        False,
        "Train by each method in this process with its stale gradients, and compare losses against the seconds "
        "predicted over --link.",
    )
    microbatches: int | None = option_of(PlanRequest, "microbatches")
    epochs: int = option_of(TrainingOptions, "epochs", default=1, unset=None, panel=None)
    minibatches: int | None = option_of(TrainingOptions, "minibatches", panel=None)
    seconds: float | None = option(
        None,
        "Train each variant for about this long after its warm-up, in place of --epochs and --minibatches.",
        metavar="S",
        least=0.0,
    )
    seed: int = option(0, "Random seed.")
    device: str = option_of(TrainingOptions, "device")

    def __post_init__(self) -> None:
        if self.seconds is not None and (self.emulate_delay or self.minibatches is not None):
            other = "--emulate-delay" if self.emulate_delay else f"--minibatches {self.minibatches}"
            raise PlanError(f"--seconds {self.seconds:g} was given with {other}; leave one out")
        if self.emulate_delay and len(self.links) > 1:
            raise PlanError(
                f"{len(self.links)} links were given with --emulate-delay, which predicts seconds over one; give one"
            )

    @property
    def worker_count(self) -> int:
        return self.workers or (4 if self.emulate_delay else 2)

    @property
    def compared_links(self) -> tuple[LinkSpeed | None, ...]:
        """None for this machine's own links."""
        return self.links or (LinkSpeed(_USUAL_BYTES_PER_S) if self.emulate_delay else None,)

    def make_cluster(self, link: LinkSpeed) -> Cluster:
        """Returns the workers, joined by such links."""
        latency_s = link.latency_s or _LATENCY_S
        return Cluster.flat(self.worker_count, bandwidth_bytes_per_s=link.bytes_per_s, latency_s=latency_s)
