"""`pipedream compare`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path

from pipedream.cli.options import JSON, MICROBATCHES, RECIPE, SEED, check_flags, print_json, read_profile
from pipedream.core.artifact import encode
from pipedream.core.errors import PlanError
from pipedream.core.flags import Panel, option, option_of
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.units import format_rate, parse_rate
from pipedream.core.variants import format_link
from pipedream.options import TrainingOptions
from pipedream.workflows.exclusions import as_flag

_MIN_BYTES_PER_S, _USUAL_BYTES_PER_S, _LATENCY_S = 1000.0, 1.25e9, 1e-4
_DELAY = "Losses with stale gradients"


def compare(
    recipe: str = RECIPE,
    workers: int | None = option(
        None,
        "Workers of each variant; with --mesh, ranks.",
        metavar="N",
        least=1,
        unset="2, or as many as --hosts; two meshes",
    ),
    link: list[str] | None = option(
        None,
        "Run over links of this rate, e.g. 400mbit/s, by network namespaces; repeatable. With --hosts a rate within a "
        "host and one between hosts: 10gbit/s,400mbit/s.",
        metavar="RATE[,RATE]",
        unset="this machine's own links",
    ),
    hosts: str | None = option(
        None, "Hosts, and the workers on each, e.g. 2x2.", metavar="HxW", unset="one worker each"
    ),
    schedule: list[str] | None = option(
        None,
        "Method to compare with one worker: torch is all that torch offers, data-parallel this library's, auto the "
        "planner's choice. After a plus, the encoding of its messages or how its replicas are summed: 1f1b+int8, "
        "data-parallel+powersgd:4; with --emulate-delay a compensation: pipedream+spike. Repeatable.",
        metavar="NAME[+MESSAGES|+SUMS|+COMPENSATION]",
        unset="torch; data-parallel, also with powersgd:4 and diloco:30; 1f1b, pipedream and pipedream_2bw, also with "
        "encoded messages; auto",
    ),
    emulate_delay: bool = option(
        False,
        "Train by each method in this process with its stale gradients, in turns, and compare losses against updates "
        "and against the seconds predicted over --link. The same command with --out continues.",
        panel=_DELAY,
    ),
    stages: int | None = option(
        None, "Stages, each on a worker.", metavar="N", least=2, unset="as many as --hosts, or 4", panel=_DELAY
    ),
    profile: Path | None = option(
        None, "Profile to predict seconds from.", metavar="FILE", unset="measured here", panel=_DELAY
    ),
    checkpoint_every: int | None = option(
        None, "Minibatches between checkpoints.", metavar="N", least=1, unset="at each evaluation", panel=_DELAY
    ),
    microbatches: int | None = MICROBATCHES,
    mesh: str = option(
        "",
        "Mesh of the ranks of every worker of the methods, e.g. model:2. With a mesh, --workers counts ranks.",
        metavar="NAME:RANKS[,...]",
        unset="one rank",
        panel=Panel.MESH,
    ),
    layout: str | None = option_of(TrainingOptions, "layout"),
    shard_weights: str | None = option_of(TrainingOptions, "shard_weights"),
    epochs: int = option(1, "Epochs of each variant.", metavar="N", least=1),
    minibatches: int | None = option(
        None, "Stop each variant after this many minibatches.", metavar="N", least=1, unset="no limit"
    ),
    seconds: float | None = option(
        None,
        "Train each variant for about this long after its warm-up, in place of --epochs and --minibatches.",
        metavar="S",
        least=0.0,
    ),
    seed: int = SEED,
    device: str = option_of(TrainingOptions, "device"),
    out: str | None = option(None, "Folder for the run folders.", metavar="DIR", unset="a new one in runs/"),
    as_json: bool = JSON,
) -> None:
    """Train a recipe in several ways, one after the other.

    Compares one worker, torch's DDP (also sharing a minibatch, accumulating 8, in fp16), local SGD, Schedule1F1B, and
    each method: predicted and measured. Writes compare.html, the picture in it as compare.svg, and compare.json.

    \b
    Examples:
      pipedream compare examples/digits.py --workers 2 --link 400mbit/s --link 100mbit/s
      pipedream compare examples/digits.py --emulate-delay --stages 8 --epochs 5 --out delays
    """
    check_flags(emulate_delay=emulate_delay, workers=workers, mesh=mesh, layout=layout, shard_weights=shard_weights)
    widths, links = _parse_hosts(hosts), [_parse_link(text) for text in link or ()]
    flags = {"stages": stages, "profile": profile, "checkpoint_every": checkpoint_every}
    if not emulate_delay and (flag := next((as_flag(*pair) for pair in flags.items() if pair[1] is not None), "")):
        raise PlanError(f"{flag} was given without --emulate-delay; add it, or leave {flag} out")
    if seconds is not None and (emulate_delay or minibatches is not None):
        other = "--emulate-delay" if emulate_delay else f"--minibatches {minibatches}"
        raise PlanError(f"--seconds {seconds:g} was given with {other}; leave one out")
    if hosts is not None and not links:
        raise PlanError("--hosts was given without --link; give the rates of the links, or leave it out")
    if workers is None and hosts is not None:
        workers = widths[0] * widths[1]
    if not Path(recipe).is_file():
        raise PlanError(f"the recipe {recipe} does not exist; give the path of a Python file")
    options = TrainingOptions(
        workers=workers,
        microbatches=microbatches,
        epochs=epochs,
        minibatches=minibatches,
        checkpoint_every=checkpoint_every,
        seed=seed,
        device=device,
        out=out,
        mesh=mesh,
        layout=layout,
        shard_weights=shard_weights,
    )
    report = (lambda line: None) if as_json else partial(print, file=sys.stderr, flush=True)
    from pipedream.training.compare import COMPARED, compare_recipe, name_folder

    if emulate_delay:
        from pipedream.training.compare_delays import compare_delays

        cluster = _make_cluster(widths or (stages or 4,), links or [(_USUAL_BYTES_PER_S,)], stages)
        delays = compare_delays(
            recipe,
            schedule or (),
            options,
            cluster,
            name_folder(recipe, options.out, may_be_used=True),
            link=", ".join(format_link(level.bandwidth_bytes_per_s) for level in cluster.levels),
            profile=None if profile is None else read_profile(profile),
            progress=report,
        )
        print_json({"verdict": delays.verdict, "methods": delays.rows()}) if as_json else print(f"\n{delays}")
        return
    compared = tuple(schedule or COMPARED)
    comparison = compare_recipe(recipe, compared, options, links=links, widths=widths, seconds=seconds, progress=report)
    print_json({"verdict": comparison.verdict} | dict(encode(comparison))) if as_json else print(f"\n{comparison}")


def _make_cluster(widths: tuple[int, ...], links: Sequence[tuple[float, ...]], stages: int | None) -> Cluster:
    """Returns a worker for each stage, over the only link."""
    if len(links) > 1:
        raise PlanError(
            f"{len(links)} links were given with --emulate-delay, which predicts seconds over one; give one"
        )
    (rates,) = links
    if len(rates) != len(widths) or (stages or prod(widths)) != prod(widths):
        raise PlanError(
            f"{stages or prod(widths)} stages on {prod(widths)} workers, {len(rates)} rates of {len(widths)} levels of "
            "the network were asked for; give a worker for each stage, and a rate for each level"
        )
    return Cluster(tuple(Level(width, rate, _LATENCY_S) for width, rate in zip(widths, rates, strict=True)))


def _parse_hosts(hosts: str | None) -> tuple[int, ...]:
    """Reads --hosts: workers of a host, hosts."""
    if hosts is None:
        return ()
    match = re.fullmatch(r"0*([1-9]\d{0,3})x0*([1-9]\d{0,3})", hosts)
    if match is None:
        raise PlanError(f"--hosts {hosts} was asked for; write hosts and the workers on each, as in 2x2")
    return int(match[2]), int(match[1])


def _parse_link(text: str) -> tuple[float, ...]:
    """Reads --link: bytes/s of each level."""
    try:
        rates = tuple(parse_rate(word) for word in text.split(","))
    except ValueError as error:
        raise PlanError(f"--link {text}: {error}") from None
    for word, rate in zip(text.split(","), rates, strict=True):
        if rate < _MIN_BYTES_PER_S:
            number = word.strip().rstrip("bBit/s ")
            raise PlanError(f"--link {text}: {word} is {format_rate(rate)}; did you mean {number}mbit/s?")
    return rates
