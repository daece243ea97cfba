"""`pipedream layout`."""

from dataclasses import replace

from pipedream.apps.cli.options import JSON, SEED, check_flags, print_json, read_memory
from pipedream.core import units
from pipedream.core.errors import PlanError
from pipedream.core.flags import argument, number, option
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layouts.description.operators import DescribedStep, Operators
from pipedream.extensions.meshes.layouts.report import (
    compare_layouts,
    compare_partitions,
    format_layouts,
    format_partitions,
)
from pipedream.extensions.meshes.layouts.search.partition import check_request

_BY_NAME = "By name, with --mesh"
_BY_HALVES = "By halves, with --ranks"


def layout(
    step: str = argument("RECIPE|OPERATORS", "Python file that defines recipe(), or the JSON of pipedream.Operators."),
    mesh: str | None = option(
        None, "Mesh of ranks, e.g. data:4,model:2.", metavar="NAME:RANKS[,...]", unset="none", panel=_BY_NAME
    ),
    objective: str = option(
        "memory", "Quantity to minimize: peak memory per rank, or step time.", metavar="memory|time", panel=_BY_NAME
    ),
    memory: str | None = option(
        None, "Memory of a rank, e.g. 16GB.", metavar="BYTES", unset="no limit", panel=_BY_NAME
    ),
    operations_per_s: float | None = option(
        None, "Operations of a rank per second, for --objective time.", metavar="N", panel=_BY_NAME
    ),
    bandwidth: list[str] | None = option(
        None,
        "What a rank sends per second, e.g. 10Gbit/s, for --objective time; one value, or one for each dimension of "
        "the mesh.",
        metavar="B [B ...]",
        panel=_BY_NAME,
    ),
    fixed: str | None = option(None, "Names that are not sharded.", metavar="NAME[,...]", unset="none", panel=_BY_NAME),
    ranks: int | None = option(None, "Number of ranks, a power of two.", unset="none", panel=_BY_HALVES),
    method: str = option(
        "recursive",
        "Search: recursive as published, joint, or a baseline: equal, all-row, spartan, no-reduction, data, model.",
        metavar="NAME",
        panel=_BY_HALVES,
    ),
    batch: str | None = option(
        None,
        "Index of the samples, for the method data.",
        metavar="INDEX",
        unset="a recipe's samples",
        panel=_BY_HALVES,
    ),
    no_replicate: bool = option(False, "No tensor is whole on both sides of a cut, as in the paper.", panel=_BY_HALVES),
    element_bytes: int | None = number(None, "Bytes of an element of all tensors.", unset="a recipe's own, or 4"),
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """Choose how a step's tensors are sharded over ranks.

    With --mesh, chooses which tensor dimensions each mesh dimension shards. With --ranks, divides all tensors by
    halves, as Tofu does, and compares its methods. The step is that of a recipe, forward, backward and update, or
    operators as text in JSON whose lines share the names of their indices (docs/partition.md).

    \b
    Examples:
      pipedream layout examples/resnet_digits.py --mesh data:2,model:2
      pipedream layout examples/resnet_digits.py --ranks 4
    """
    if (mesh is None) == (ranks is None):
        raise PlanError("give either --mesh, as in data:2,model:2, or --ranks N")
    if ranks is not None:
        check_flags(
            ranks=ranks, objective=objective, memory=memory, operations_per_s=operations_per_s, bandwidth=bandwidth,
            fixed=fixed,
        )  # fmt: skip
        check_request(ranks, method)  # before a recipe is loaded
        described = _load_step(step, element_bytes, seed)
        comparison = compare_partitions(described, ranks, method, batch=batch or "", replicate=not no_replicate)
        print_json(comparison) if as_json else print(format_partitions(comparison))
        return
    check_flags(mesh=mesh, method=method, batch=batch, no_replicate=no_replicate)
    rank_mesh = Mesh(mesh or "")
    rates = _parse_rates(rank_mesh, [word for text in bandwidth or [] for word in text.split(",")])
    _check_rates(objective, operations_per_s, rates)
    limit = read_memory(memory)
    report = compare_layouts(
        _load_step(step, element_bytes, seed),
        rank_mesh,
        objective,
        [name.strip() for name in (fixed or "").split(",") if name.strip()],
        memory_bytes=limit,
        operations_per_s=operations_per_s,
        bytes_per_s=rates,
    )
    print_json(report) if as_json else print(format_layouts(report))


def _load_step(path: str, element_bytes: int | None, seed: int) -> DescribedStep:
    """Describes a recipe's step, or reads operators."""
    if path.endswith(".py"):
        described = _describe_recipe(path, seed)
        if element_bytes is None:
            return described
    else:
        described = DescribedStep(Operators.load(path), {})
    return replace(described, element_bytes=dict.fromkeys(described.operators.tensors, element_bytes or 4))


def _describe_recipe(path: str, seed: int) -> DescribedStep:
    """Describes the step of a recipe's first training batch, with loss and optimizer.

    The batch goes to the model's device, which may be 'meta'.
    """
    from pipedream.apps.training.job import make_batch_loss, make_model_input
    from pipedream.apps.training.recipe import blaming, load_recipe
    from pipedream.extensions.meshes.layouts.tracing.trace import describe_step
    from pipedream.runtime.comm.values import to_device

    recipe = load_recipe(path, seed=seed)
    device = next((parameter.device for parameter in recipe.model.parameters()), None)
    batch = recipe.first_batch()
    loss = make_batch_loss(recipe, batch, device)
    with blaming("the recipe failed while its step was described on its first batch"):
        sample = make_model_input(recipe, batch)
        sample = sample if device is None else to_device(sample, device)
        batch_dim = recipe.batch_dim if isinstance(recipe.batch_dim, int) else 0
        return describe_step(recipe.model, sample, loss=loss, optimizer=recipe.optimizer, batch_dim=batch_dim)


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
