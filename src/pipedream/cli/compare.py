"""`pipedream compare`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pipedream.cli.options import JSON, MICROBATCHES, RECIPE, SEED, print_json
from pipedream.core.artifact import encode
from pipedream.core.errors import PlanError
from pipedream.core.flags import Panel, option, option_of
from pipedream.core.units import format_rate, parse_rate
from pipedream.options import TrainingOptions

_LEAST_BYTES_PER_S = 1000.0


def compare(
    recipe: str = RECIPE,
    workers: int | None = option(
        None,
        "Workers of each variant; with --mesh ranks.",
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
        "Method to compare with one worker and with what torch offers; data-parallel is this library's, auto the "
        "planner's choice. After a plus, the encoding of its messages or how its replicas are summed: 1f1b+int8, "
        "data-parallel+powersgd:4. Repeatable.",
        metavar="NAME[+MESSAGES|+SUMS]",
        unset="data-parallel, also with powersgd:4 and diloco:30; 1f1b, pipedream and pipedream_2bw, also with "
        "encoded messages; auto",
    ),
    microbatches: int | None = MICROBATCHES,
    mesh: str = option(
        "",
        "Mesh of the ranks of every worker of the methods, e.g. model:2. --workers then counts ranks.",
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
    seed: int = SEED,
    device: str = option_of(TrainingOptions, "device"),
    out: str | None = option(None, "Folder for the run folders.", metavar="DIR", unset="a new one in runs/"),
    as_json: bool = JSON,
) -> None:
    """Train a recipe in several ways, one after the other.

    Compares one worker, torch's DDP (also sharing a minibatch, accumulating 8, in fp16), local SGD, Schedule1F1B, and
    each method: predicted and measured. Writes compare.html, the picture in it as compare.svg, and compare.json.

    \b
    Example:
      pipedream compare examples/digits.py --workers 2 --link 400mbit/s --link 100mbit/s
    """
    from pipedream.training.compare import COMPARED, compare_recipe

    widths, links = _parse_hosts(hosts), [_parse_link(text) for text in link or ()]
    if hosts is not None and not links:
        raise PlanError("--hosts was given without --link; give the rates of the links, or leave it out")
    if workers is None and hosts is not None:
        workers = widths[0] * widths[1]
    if not Path(recipe).is_file():
        raise PlanError(f"the recipe {recipe} does not exist; give the path of a Python file")
    comparison = compare_recipe(
        recipe,
        tuple(schedule or COMPARED),
        TrainingOptions(
            workers=workers,
            microbatches=microbatches,
            epochs=epochs,
            minibatches=minibatches,
            seed=seed,
            device=device,
            out=out,
            mesh=mesh,
            layout=layout,
            shard_weights=shard_weights,
        ),
        links=links,
        widths=widths,
        progress=lambda line: None if as_json else print(line, file=sys.stderr, flush=True),
    )
    if as_json:
        print_json({"verdict": comparison.verdict} | dict(encode(comparison)))
    else:
        print(f"\n{comparison}")


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
        if rate < _LEAST_BYTES_PER_S:
            number = word.strip().rstrip("bBit/s ")
            raise PlanError(f"--link {text}: {word} is {format_rate(rate)}; did you mean {number}mbit/s?")
    return rates
