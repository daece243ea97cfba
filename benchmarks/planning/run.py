"""How long planning takes, and what is proved of the plans. See README.md."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.profile import Collective, LayerProfile, Profile, RankProfile
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.search import MeshSearch
from pipedream.workflows import plan as planning
from pipedream.workflows.methods import score

sys.path.append(str(Path(__file__).parents[1]))
from paper_tables.classic import classic
from paper_tables.graph_txt import GraphText
from scaffold import Environment, format_head, format_row, make_parser, parse_with_profiles

CLASSIC = (
    ("resnet50", (8, 2), (30e9, 3.125e9), "268 s"),
    ("gnmt_large", (4, 4), (12e9, 1.25e9), "no end in 5 minutes"),
    ("gnmt_large", (8, 2), (30e9, 3.125e9), ""),
)
"""Profile, workers and bandwidths of each level, and what the original's program took."""

RATES = (1e9, 1.25e9, 2.5e9, 1e10)

LEVELS = (((4, 4), (12e9, 1.25e9)), ((8, 2), (30e9, 3.125e9)))

LARGE = ("inception_v3", "nasnetamobile", "nasnetalarge", "gnmt_large")


search = partial(planning.plan, strategy="search")


def main() -> None:
    """Prints the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--meshes", action="store_true", help="only the table of meshes, which needs no profiles")
    options = parse_with_profiles(parser, lambda options: not options.meshes)
    if options.meshes:
        table_of_meshes()
        return
    print(Environment().describe() + "\n")
    files = sorted(options.profiles.glob("*.txt"))
    print_classic(options.profiles)
    print_rates(files)
    print_levels([file for file in files if file.stem in LARGE])
    print_chains()
    print_choices(files)


def print_classic(folder: Path) -> None:
    """Prints the seconds of the original's model beside the original's."""
    print(format_head("the classic model | original | here | slowest stage", "lr"))
    for name, widths, rates, original in CLASSIC:
        text = GraphText.load(folder / f"{name}.txt")
        seconds, answer = timed(partial(classic, text, make_cluster(widths, rates)))
        cells = f"{name}, {name_size(widths)}", original, f"{seconds:.2f} s", f"{answer.slowest_stage_s:.9f} s"
        print(format_row(cells))


def print_rates(files: Sequence[Path]) -> None:
    """Prints plans of each profile at several bandwidths."""
    print("\n" + format_head("the pipedream model, 16 workers | layers | planning | config | gap", "lrl"))
    for file in files:
        profile = GraphText.load(file).profile(file.stem)
        took, configs, gaps = [], [], []
        for rate in RATES:
            seconds, plan = timed(partial(search, profile, Cluster.flat(16, rate)))
            took.append(f"{seconds:.1f}")
            configs.append(plan.config)
            gaps.append(gap_of(plan))
        cells = f"{' / '.join(took)} s", ", ".join(configs), " / ".join(gaps)
        print(format_row((file.stem, len(profile.layers), *cells)))
    print(f"\nAt {', '.join(f'{rate:.3g}' for rate in RATES)} bytes/s.\n")


def print_levels(files: Sequence[Path]) -> None:
    """Prints plans of large profiles for clusters of two levels."""
    print(format_head("two levels | workers | planning | config | gap", "llrl"))
    for file in files:
        profile = GraphText.load(file).profile(file.stem)
        for widths, rates in LEVELS:
            seconds, plan = timed(partial(search, profile, make_cluster(widths, rates)))
            print(format_row((file.stem, name_size(widths), f"{seconds:.1f} s", plan.config, gap_of(plan))))
    print()


def print_chains() -> None:
    """Prints how long it takes to plan chains of hundreds of layers, and to simulate the plans."""
    titles = "a chain | workers | planning | gap | repeats after | simulate | slowest stage | simulated"
    print(format_head(titles, "llrlr"))
    for layers, widths in ((200, (64,)), (1000, (8, 16, 8))):
        seconds, plan = timed(partial(search, chain(layers), make_cluster(widths, (150e9, 12.5e9, 1.25e9))))
        score_s, result = timed(partial(score, plan))
        periods = (f"{period_s * 1e3:.2f} ms" for period_s in (plan.slowest_stage_s, result.period_s))
        cells = f"{seconds:.1f} s", gap_of(plan), plan.placement.cycle, f"{score_s:.1f} s", *periods
        print(format_row((f"{layers} layers", name_size(widths), *cells)))


def print_choices(files: Sequence[Path]) -> None:
    """Prints what it costs and gains to choose among plans by simulation."""
    print("\n" + format_head("choosing by simulation | workers | search | simulate | ratio | faster", "lr"))
    profiles = {file.stem: GraphText.load(file).profile(file.stem) for file in files}
    cases = [(name, profile, Cluster.flat(16, 1.25e9, 1e-4)) for name, profile in profiles.items()]
    cases += [(name, profiles[name], make_cluster(*levels)) for name in LARGE if name in profiles for levels in LEVELS]
    for name, profile, cluster in [*cases, ("96 layers", chain(96), Cluster.flat(64, 1.25e9, 1e-4))]:
        before_s, before = timed(partial(search, profile, cluster))
        after_s, after = timed(partial(planning.plan, profile, cluster))
        times = score(before).period_s / score(after).period_s
        cells = f"{before_s:.2f} s", f"{after_s:.2f} s", f"{after_s / before_s:.1f}", f"{times:.2f} times"
        print(format_row((name, name_size([level.width for level in cluster.levels]), *cells)))


def make_cluster(widths: Sequence[int], rates: Sequence[float]) -> Cluster:
    """Returns a cluster with these widths and bandwidths of its levels."""
    return Cluster(tuple(Level(width, rate) for width, rate in zip(widths, rates, strict=False)))


def name_size(widths: Sequence[int]) -> str:
    """Returns widths as text, such as 8x2."""
    return "x".join(map(str, widths))


def table_of_meshes() -> None:
    """Prints how long plans with meshes take."""
    titles = "96 layers on 64 ranks | search with meshes | gap | none and each single mesh as well | simulate | ratio"
    print(format_head(titles, "lr"))
    profile = on_meshes(96)
    machines = Cluster((Level(8, 50e9, 1e-5), Level(8, 5e9, 2e-5)))
    meshes = [Mesh(), *(Mesh(rank.mesh) for rank in profile.ranks)]
    for name, cluster in (("flat", Cluster.flat(64, 5e9, 1e-5)), ("8x8", machines)):
        for memory_bytes in (None, 4_000_000_000, 7_000_000_000):
            limited = replace(cluster, memory_bytes=memory_bytes)
            alone_s, plan = timed(lambda cluster=limited: MeshSearch.of(profile, cluster, meshes).best("any"))  # type: ignore[misc]
            search_s, _ = timed(partial(search, profile, limited, mesh="auto"))
            whole_s, _ = timed(partial(planning.plan, profile, limited, mesh="auto"))
            size = "" if memory_bytes is None else f", {memory_bytes / 1e9:.0f} GB a rank"
            cells = f"{alone_s:.1f} s", gap_of(plan), f"{search_s:.1f} s", f"{whole_s:.1f} s"
            print(format_row((f"{name}{size}", *cells, f"{whole_s / search_s:.1f}")), flush=True)


def on_meshes(count: int) -> Profile:
    """Returns a made-up transformer, and a rank of nine meshes whose collectives are those of Megatron's layers."""
    texts = ("data:2", "model:2", "data:4", "model:4", "data:2,model:2", "data:8", "model:8", "data:2,model:4",
             "data:4,model:2")  # fmt: skip

    def layers(mesh: Mesh) -> tuple[LayerProfile, ...]:
        data, model = (mesh.dimensions.get(name, 1) for name in ("data", "model"))
        share = (1 + 0.03 * (mesh.size - 1)) / mesh.size  # small parts are less efficient
        return tuple(
            LayerProfile(
                1e-3 * (1 + 0.2 * (i % 5)) * share,
                2e-3 * (1 + 0.2 * (i % 5)) * share,
                int(8e6 / data),
                int(50e6 / model),
                int(40e6 * (0.3 + 0.7 / model) / data),
                temporary_bytes=int(20e6 / data),
            )
            for i in range(count)
        )

    def rank(text: str) -> RankProfile:
        mesh = Mesh(text)
        data, model = (mesh.dimensions.get(name, 1) for name in ("data", "model"))
        sums = (Collective("all-reduce", "model", 1, int(8e6 / data)),) if model > 1 else ()
        weights = sum(layer.parameter_bytes for layer in layers(mesh))
        update = (Collective("all-reduce", "data", count, weights, of_weights=True),) if data > 1 else ()
        options = {"update_s": 0.02 / model, "optimizer_bytes": 2 * weights}
        return RankProfile(
            text, "batch:data,d_ff:model", layers(mesh), (sums,) * count, (sums,) * count, update, **options
        )

    whole = layers(Mesh())
    weights = 2 * sum(layer.parameter_bytes for layer in whole)
    return Profile.of_chain(whole, batch=256, update_s=0.02, optimizer_bytes=weights, ranks=tuple(map(rank, texts)))


def gap_of(plan: Plan) -> str:
    """Returns how far a plan is at most from the fastest."""
    if not plan.bound_s:
        return "not known"
    return "0" if plan.bound_s >= plan.slowest_stage_s else f"{plan.slowest_stage_s / plan.bound_s - 1:.2%}"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the processor's seconds, which other work changes less, and the result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def chain(count: int) -> Profile:
    """Returns a chain of unlike layers."""
    draw = random.Random(0)
    layers = []
    for _ in range(count):
        seconds = draw.lognormvariate(-6, 0.7)
        layers.append(LayerProfile(seconds, 2 * seconds, draw.randrange(10**5, 10**7), draw.randrange(10**5, 10**8)))
    return Profile.of_chain(tuple(layers))


if __name__ == "__main__":
    main()
