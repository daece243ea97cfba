"""`pipedream layout`."""

from __future__ import annotations

from pipedream.cli.options import JSON, SEED, print_json, read_memory
from pipedream.cli.partition import ELEMENT_BYTES, STEP, load_step
from pipedream.core import units
from pipedream.core.errors import PlanError
from pipedream.core.flags import option
from pipedream.core.plan.mesh import Mesh
from pipedream.layouts import compare_layouts, format_layouts

_RATES = "Rates, for --objective time"


def layout(
    step: str = STEP,
    mesh: str = option(..., "Mesh of ranks, e.g. data:4,model:2.", metavar="NAME:RANKS[,...]"),
    objective: str = option(
        "memory", "Quantity to minimize: peak memory per rank, or step time.", metavar="memory|time"
    ),
    memory: str | None = option(None, "Memory of a rank, e.g. 16GB.", metavar="BYTES", unset="no limit"),
    operations_per_s: float | None = option(None, "Operations of a rank per second.", metavar="N", panel=_RATES),
    bandwidth: list[str] | None = option(
        None,
        "What a rank sends per second, e.g. 10Gbit/s; one value, or one for each dimension of the mesh.",
        metavar="B [B ...]",
        panel=_RATES,
    ),
    fixed: str | None = option(None, "Names that are not sharded.", metavar="NAME[,...]", unset="none"),
    element_bytes: int | None = ELEMENT_BYTES,
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """Choose which tensor dimensions each mesh dimension shards.

    The step is that of a recipe, forward, backward and update, or operators as text in JSON whose lines share the names
    of their indices (docs/partition.md).

    \b
    Example:
      pipedream layout examples/resnet_digits.py --mesh data:2,model:2
    """
    ranks = Mesh(mesh)
    rates = _parse_rates(ranks, [word for text in bandwidth or [] for word in text.split(",")])
    _check_rates(objective, operations_per_s, rates)
    limit = read_memory(memory)
    report = compare_layouts(
        load_step(step, element_bytes, seed),
        ranks,
        objective,
        [name.strip() for name in (fixed or "").split(",") if name.strip()],
        memory_bytes=limit,
        operations_per_s=operations_per_s,
        bytes_per_s=rates,
    )
    print_json(report) if as_json else print(format_layouts(report))


def _check_rates(objective: str, operations_per_s: float | None, rates: dict[str, float] | None) -> None:
    options = {"--operations-per-s": operations_per_s, "--bandwidth": rates}
    missing = [name for name, value in options.items() if value is None]
    if objective == "time" and missing:
        raise PlanError(f"--objective time was asked for without {' and '.join(missing)}; give both rates of a rank")
    if objective == "memory" and len(missing) < len(options):
        extra = " and ".join(name for name in options if name not in missing)
        raise PlanError(f"{extra} was given, but has no effect on the least memory; add --objective time, or remove it")


def _parse_rates(mesh: Mesh, words: list[str]) -> dict[str, float] | None:
    if not words:
        return None
    if len(words) not in (1, len(mesh.dimensions)):
        raise PlanError(
            f"--bandwidth has {len(words)} values, but the mesh {mesh} has {len(mesh.dimensions)} dimensions; give one "
            "value, or one for each"
        )
    try:
        rates = [units.parse_rate(word) for word in words]
    except ValueError as error:
        raise PlanError(str(error)) from None
    return dict(zip(mesh.dimensions, rates * (len(mesh.dimensions) if len(rates) == 1 else 1), strict=True))
