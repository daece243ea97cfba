"""PipeDream's claim: speed, bytes and time to accuracy beside data parallelism, over slow links. See README.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import accuracy
import curve
import limited
import sizes
import workers
from scaffold import Environment, make_parser, stop_if

from pipedream.core.units import parse_rate
from pipedream.slow_links import why_not

PARTS = {
    "curve": curve, "sleeping": curve, "sizes": sizes, "accuracy": accuracy, "limited": limited, "workers": workers
}  # fmt: skip
"""Each has `measure` and `tables`, and may have `pictures`."""
KEYS = {"curve": ("model", "rho", "variant"), "sleeping": ("model", "rho", "variant"), "sizes": sizes.KEY}
"""Part -> the fields that identify a row, for parts that can be measured again point by point."""


def main() -> None:
    options = _parse_options()
    file = options.out / "rows.json"
    parts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    names = [name for name in PARTS if not options.only or name in options.only]
    if not options.again:
        stop_if(why_not(), "speedup")
        for name in names:
            save = partial(_save, file, parts, name, partial(Environment().describe, f"size {options.size}"))
            log = partial(print, file=sys.stderr, flush=True)
            how: dict[str, Any] = {} if name in ("limited", "workers") else {"keep": save}
            if name in KEYS:
                how |= {"models": options.models, "only": options.variants, "rounds": options.rounds}
            if name == "curve":
                how |= {"rhos": options.rhos}
            elif name == "sleeping":
                is_full = options.size == "full"
                how |= {"sleep": True, "links": options.links or (curve.LINKS if is_full else curve.LINKS[2:3])}
                how |= {"only": options.variants or (curve.RIVALRY if is_full else ())}
            elif name == "sizes":
                how |= {"links": options.links}
            elif name == "accuracy":
                how |= {"tasks": options.tasks, "links": options.links, "variants": options.variants}
                how |= {"seeds": options.seeds, "rates": options.rates, "profiles": options.out}
                how |= {"earlier": parts.get(name, {}).get("rows", ())}
            save(PARTS[name].measure(options.size, log, **how))
    for name in names:
        if name in parts:
            print(f"## {name}\n\n{parts[name]['environment']}\n\n{PARTS[name].tables(parts[name]['rows'])}\n")
            for picture, svg in getattr(PARTS[name], "pictures", lambda rows: {})(parts[name]["rows"]).items():
                (options.out / ("sleeping_" * (name == "sleeping") + picture)).write_text(svg)


def _parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=("test", "short", "full"), default="short")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="parts to run; all by default")
    parser.add_argument(
        "--models",
        nargs="+",
        default=(),
        help="of the curve or of the sizes; other rows of rows.json are kept, those of the accuracy not measured again",
    )
    parser.add_argument("--rhos", nargs="+", type=float, default=(), help="of the curve")
    parser.add_argument("--variants", nargs="+", default=(), help="rows of the parts of --only")
    parser.add_argument("--tasks", nargs="+", choices=list(accuracy.TASKS), default=(), help="of the accuracy")
    parser.add_argument("--seeds", type=int, help="of the accuracy: how many")
    parser.add_argument("--rates", nargs="+", type=float, default=(), help="of the accuracy: factors that are tried")
    parser.add_argument(
        "--links",
        nargs="+",
        type=parse_rate,
        default=(),
        help="of the accuracy, the sizes or of sleeping, e.g. 100mbit/s",
    )
    parser.add_argument("--rounds", type=int, help="of the curve and the sizes")
    parser.add_argument("--again", action="store_true", help="only print and draw what rows.json has")
    parser.add_argument("--out", type=Path, default=Path("build/speedup"), help="folder of rows.json and the pictures")
    options = parser.parse_args()
    for part in options.only or PARTS:
        listed: dict[str, Any] = {"models": sizes.SIZED if part == "sizes" else curve.MODELS}
        listed["variants"] = accuracy.VARIANTS if part == "accuracy" else curve.BY_NAME
        for option, names in listed.items():
            if wrong := [name for name in getattr(options, option) if name not in names]:
                parser.error(f"--{option}: {part} has no {wrong[0]!r}, but {', '.join(names)}; choose parts by --only")
    return options


def _save(
    file: Path, measured: dict[str, Any], name: str, describe: Callable[[], str], rows: list[dict[str, Any]]
) -> None:
    """Writes the rows of a part; it keeps those of points and variants that were not measured again, see `KEYS`."""
    if name in KEYS and name in measured:
        make_key = itemgetter(*KEYS[name])
        new = set(map(make_key, rows))
        rows = [row for row in measured[name]["rows"] if make_key(row) not in new] + rows
    measured[name] = {"environment": describe(), "rows": rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for part, part_rows in measured.items():
        lines = ",\n".join(map(json.dumps, part_rows["rows"]))
        parts.append(
            f'{json.dumps(part)}: {{"environment": {json.dumps(part_rows["environment"])}, "rows": [\n{lines}\n]}}'
        )
    file.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
