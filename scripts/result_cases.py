"""What `check_results.py` computes: small models trained with each method and option, and plans.

It knows the library by its public names alone. No seconds are measured: profiles are of a device that is not there.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from scaffold import find_published

PUBLISHED = "published/"
WIDTH, CLASSES, WORDS = 64, 8, 16

Entry = dict[str, str]
"""Column -> text."""


class Branches(nn.Module):
    """Two branches, one of which reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WORDS, WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.left, self.right = (nn.ModuleList(make_blocks(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        left = right = self.stem(x)
        for left_block, right_block in zip(self.left, self.right, strict=True):
            left, right = left_block(left), right_block(left + right)
        return self.head(torch.cat([left, right], 1))


class Tied(nn.Module):
    """A transformer with dropout, whose two blocks have a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, CLASSES)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 32, 0.1, batch_first=True) for _ in range(2))
        self.blocks[1].linear1.weight = self.blocks[0].linear1.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def make_blocks(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def make_chain() -> nn.Module:
    return nn.Sequential(nn.Linear(WORDS, WIDTH), *make_blocks(4), nn.Linear(WIDTH, CLASSES))


def make_norms() -> nn.Module:
    inner = [nn.Sequential(nn.Conv2d(n, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for n in (1, 4, 4)]
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *inner, nn.Flatten(), nn.Linear(4 * WORDS, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": make_chain,
    "branches": Branches,
    "tied": Tied,
    "norms": make_norms,
}


def make_model(name: str) -> nn.Module:
    """Returns a model whose weights are drawn in double precision: in single, processors round them differently."""
    torch.set_default_dtype(torch.float64)
    try:
        return MODELS[name]()
    finally:
        torch.set_default_dtype(torch.float32)


def make_batches(model: str) -> list[tuple[Tensor, Tensor]]:
    """Returns an epoch of three minibatches, the last one smaller."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.rand(44, WORDS, dtype=torch.float64, generator=draw)
    if model == "tied":
        inputs = (inputs[:, :4] * WORDS).long()
    return list(zip(inputs.split(16), torch.randint(CLASSES, (44,), generator=draw).split(16), strict=True))


def make_optimizer(named: list[tuple[str, nn.Parameter]], name: str = "SGD") -> torch.optim.Optimizer:
    options = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01, "eps": 1e-4}}
    return getattr(torch.optim, name)(named, **options[name])


@cache
def profile_model(model: str) -> pipedream.Profile:
    """Returns the model's profile, computed from a datasheet."""
    return pipedream.profile(
        make_model(model),
        make_batches(model)[0][0],
        loss=lambda output: output.square().mean(),
        optimizer=make_optimizer,
        device="meta",
        as_device="A100-80GB",
    )


PLANNED = ("messages", "sums", "recompute", "optimizer_state", "in_flight", "update_delay")
"""Options of `pipedream.plan`; others are those of `pipedream.Pipeline`."""
SUMS = ("bfloat16", "powersgd:2", "every:2", "diloco:2")
REPLICATED: tuple[dict[str, Any], ...] = (*({"sums": sums} for sums in SUMS), {"update_delay": 1})
COMPENSATIONS = ("spike", "nesterov", "velocity_prediction", "error_feedback", "t1:4", "gap_aware")
CHOICES: tuple[dict[str, Any], ...] = (
    {"messages": "int8"},
    {"messages": "bfloat16"},
    {"recompute": "always"},
    {"optimizer_state": "host"},
    {"optimizer": "AdamW"},
    {"optimizer": "AdamW", "compensation": "basis_rotation:2"},
    *({"compensation": text} for text in COMPENSATIONS),
    {"in_flight": "full"},
    {"clip": "local"},
    {"ema": 0.9},
)
MORE_CHOICES: tuple[dict[str, Any], ...] = (
    {"clip": "global"},
    {"clip": "delayed_global"},
    {"scheduler": "StepLR"},
    {"phases": "1f1b/4:2,pipedream:3,pipedream_2bw/4"},
)
VARIANTS = (
    "paci[backward_rule=stash]",
    "paci[backward_rule=recompute]",
    "pipelined_backprop[backward_rule=recompute]",
    "spectrain[by=difference]",
    "xpipe[by=difference]",
    "pb_lwp[scale=2]",
    "pipemare[decay=0.5]",
    "timeprest_interpolated[share=0.5]",
    "basis_rotation[geometry=one_sided,estimate=first_moment]",
    "roundpipe[delay=1]",
    "roundpipe[forwards=2]",
)
THOROUGH = ("1f1b", "pipedream", "pipedream_2bw")
"""Methods with all choices and models."""
MESHES = ("model:2", "data:2", "data:2/model:2", "zero3")
LAYOUT_NAMES = {"1.0.weight": "d_ff d_model", "1.0.bias": "d_ff", "2.0.weight": "d_model d_ff"}


@dataclass(frozen=True)
class Case:
    """A training run. The shape is replica counts, or names the method's own placement on two workers."""

    method: str
    model: str
    shape: str
    options: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1

    @property
    def name(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        where = "one_process" if self.processes == 1 else "processes"
        return "/".join([where, self.method, self.model, self.shape, options]).rstrip("/")

    def plan(self) -> pipedream.Plan:
        """Plans with 4 microbatches if the method takes them, else with its own number."""
        request: dict[str, Any] = {name: self.options[name] for name in PLANNED if name in self.options}
        workers = 2
        if self.shape[0].isdigit():
            request["shape"], workers = self.shape, sum(map(int, self.shape.split("-")))
        request |= {"cluster": pipedream.Cluster.flat(workers, 1e8, 1e-5, device="A100-80GB"), "schedule": self.method}
        try:
            plan = pipedream.plan(profile_model(self.model), microbatches=4, **request)
        except pipedream.PipelineError:
            plan = pipedream.plan(profile_model(self.model), **request)
        mesh = self.options.get("mesh", "")
        return plan.with_mesh(mesh.replace("zero3", "data:2")) if mesh else plan

    def pipeline(self, plan: pipedream.Plan) -> pipedream.Pipeline:
        options = {name: value for name, value in self.options.items() if name not in (*PLANNED, "optimizer", "mesh")}
        if "clip" in options:
            options["clip_grad_norm"] = 0.1
        if "mesh" in self.options:
            at_rest = "data" if self.options["mesh"] == "zero3" else ""
            names = LAYOUT_NAMES if self.model == "chain" else {}
            options["layout"] = pipedream.Layout("batch:data,d_ff:model", names=names, shard_weights=at_rest)
        if "scheduler" in options:
            options["scheduler"] = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
        optimizer = "AdamW" if "basis_rotation" in self.method else self.options.get("optimizer", "SGD")
        return pipedream.Pipeline(
            make_model(self.model),
            plan,
            loss=F.cross_entropy,
            optimizer=partial(make_optimizer, name=optimizer),
            check=False,
            stuck_after_s=0,
            **options,
        )


def list_cases() -> Iterator[Case]:
    """Yields all training runs; a method or a model may refuse what is asked."""
    methods = [*pipedream.schedules.METHODS]
    layouts = {method: pipedream.schedules.stage_order_of(method) for method in (*methods, *VARIANTS)}
    placed = {name: "placed" if layout.replicas == 1 else "bidirectional" for name, layout in layouts.items() if layout}
    for method, model in product(layouts, MODELS):
        straight, replicated = placed.get(method, "1-1-1"), [] if method in placed else ["2-1"]
        yield from (Case(method, model, shape) for shape in (straight, *replicated))
        if (model == "chain" and method in methods) or method in THOROUGH:
            is_stale = method == "1f1b" or not pipedream.schedules.properties_of(method).flushes
            choices = [choice for choice in CHOICES if is_stale or "compensation" not in choice]
            yield from (Case(method, model, straight, choice) for choice in choices)
            yield from (Case(method, model, shape, choice) for shape in replicated for choice in REPLICATED)
        if method in THOROUGH:
            yield from (Case(method, model, straight, choice) for choice in MORE_CHOICES)
    for number, method in enumerate(methods):
        yield Case(method, [*MODELS][(number + 1) % len(MODELS)], placed.get(method, "1-1"), processes=2)
    for method in THOROUGH:
        yield from (Case(method, "chain", "1-1", choice, 2) for choice in CHOICES + MORE_CHOICES)
        yield from (Case(method, "chain", "2", choice, 2) for choice in REPLICATED)
        yield from (Case(method, "chain", "1-1", {"mesh": mesh}, 4) for mesh in MESHES)
        yield Case(method, "norms", "1-1", {"mesh": "data:2"}, 4)
        yield from (Case(method, model, "2-2", processes=4) for model in MODELS)


def train(case: Case, folder: Path) -> Entry:
    """Trains, evaluates, trains and saves. Every rank calls it; the entry is rank 0's."""
    batches, plan = make_batches(case.model), case.plan()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):  # after the plan, whose profile may draw
        seed(7)
    with case.pipeline(plan) as pipeline:
        losses = [done.loss for done in pipeline.train(batches)]
        losses += pipeline.evaluate(batches).values()
        losses += [done.loss for done in pipeline.train(batches)]
        state = pipeline.state_dict()
        if "ema" in case.options:
            state |= {f"ema/{name}": tensor for name, tensor in pipeline.state_dict(ema=True).items()}
        saved = Path(pipeline.save(folder / case.name.replace("/", " ")))
    if pipeline.rank:
        return {}
    manifest = json.loads((saved / "checkpoint.json").read_text(encoding="utf-8"))
    shutil.rmtree(saved.parent)
    files = {"tensors": manifest.pop("tensors"), "files": manifest.pop("files")}
    return {
        "weights": describe_numbers(torch.cat([state[name].double().flatten() for name in sorted(state)])),
        "losses": describe_numbers(torch.tensor(losses, dtype=torch.float64)),
        "saved": digest(files),
        "manifest": digest(manifest, "plan", "software", "crc32", "norm_square"),
        "program": digest(json.loads(pipeline.program.to_json()), "plan"),
        **describe_plan(pipeline.plan),
    }


def plan_random(seed: int, _folder: Path) -> Entry:
    """Plans for a random profile, which may be no chain, and a random cluster."""
    draw = random.Random(seed)
    count, width = draw.randint(3, 12), draw.choice([1, 1, 2])
    edges = {(max(0, j - draw.randint(1, width)), j) for j in range(1, count) for _ in range(2)}
    layers = [
        {
            "forward_s": (forward_s := draw.choice([0.0, 0.1, 0.2, 0.7, 1.0])),
            "backward_s": 2 * forward_s,
            "output_bytes": draw.choice([0, 10, 20, 50]),
            "parameter_bytes": draw.choice([0, 10, 40, 90]),
            "activation_bytes": draw.choice([0, 10, 30, 80]),
        }
        for _ in range(count)
    ]
    graph = {"layers": [{"name": f"l{i}", "kind": "Layer"} for i in range(count)], "edges": sorted(edges)}
    profile = {"artifact": "Profile", "format": 1, "model": "random", "graph": graph, "layers": layers, "batch": 16}
    profile |= {"runtime": draw.choice([{}, {"op_s": 0.01, "message_s": 0.02, "update_s": 0.03}])}
    profile |= {"update_s": draw.choice([0.0, 0.3]), "optimizer_bytes": draw.choice([0, 100])}
    levels = [{"width": draw.choice([2, 3, 4]), "bandwidth_bytes_per_s": draw.choice([50.0, 200.0, 1e4])}]
    if draw.random() < 0.5:
        levels += [{"width": 2, "bandwidth_bytes_per_s": 40.0, "latency_s": 0.01}]
    cluster = {"artifact": "Cluster", "format": 1, "levels": levels, "memory_bytes": draw.choice([None, 3000, 1500])}
    plan = pipedream.plan(
        pipedream.Profile.from_json(json.dumps(profile)),
        pipedream.Cluster.from_json(json.dumps(cluster)),
        schedule=draw.choice(["pipedream", "1f1b", "pipedream_2bw", "gpipe", "auto"]),
        shape=draw.choice(["any", "pipeline", "straight"]),
        recompute=draw.choice(["never", "auto"]),
        in_flight=draw.choice(["noam", "full", "auto"]),
        strategy=draw.choice(["simulate", "simulate", "search"]),
        messages=draw.choice([None, None, "int8"]),
        sums=draw.choice(["full", "full", "bfloat16", "every:4"]),
    )
    return describe_plan(plan)


def find_published_profiles() -> list[Path]:
    """Returns the files that were published with the original PipeDream, where this machine has them."""
    folder = find_published()
    return sorted(folder.glob("*.txt")) if folder else []


COMMANDS = {
    "four": "--workers 4 --bandwidth 1e9 --memory 16GB",
    "machines": "--workers 2 2 --bandwidth 1e10 1e9 --strategy search --schedule 1f1b --microbatches 4",
}
"""Arguments of `pipedream plan`."""
CONVERTER = Path(__file__).parents[1] / "benchmarks" / "paper_tables" / "graph_txt.py"


def plan_published(file: Path, name: str, folder: Path) -> Entry:
    """Plans by the command, for minibatches of 64."""
    profile, output = folder / f"{file.stem}.{name}.profile.json", folder / f"{file.stem}.{name}.json"
    converter = (sys.executable, str(CONVERTER), str(file), "-o", str(profile), "--batch", "64")
    subprocess.run(converter, check=True, capture_output=True)
    command = (sys.executable, "-m", "pipedream", "plan", str(profile), *COMMANDS[name].split(), "--json")
    text = subprocess.run([*command, "-o", str(output)], check=True, capture_output=True, text=True).stdout
    answer = json.loads(text)
    return describe_plan(pipedream.Plan.load(output), answer["simulated_s"] or answer["slowest_stage_s"])


def profile_alone(model: str, _folder: Path) -> Entry:
    return {"profile": digest(json.loads(profile_model(model).to_json()), "versions", "notes")}


def describe_plan(plan: pipedream.Plan, makespan_s: float | None = None) -> Entry:
    """Describes a plan, simulated unless its seconds are given."""
    memory = [max(plan.worker_bytes.values())]
    if makespan_s is None:
        timeline = pipedream.simulate(plan)
        makespan_s, memory = timeline.makespan_s, [*memory, max(timeline.peak_bytes)]
    seconds = f"{makespan_s:.12g}"
    return {
        # No case encodes evaluations or differences, and the table is older than these choices.
        "plan": digest(json.loads(plan.to_json()), "note", "evaluations", "deltas"),
        "makespan": seconds,
        "memory": "/".join(map(str, memory)),
    }


def digest(value: Any, *without: str) -> str:
    """Returns a digest of JSON values without some keys, with numbers of 12 digits."""

    def simplify(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: simplify(inner) for key, inner in item.items() if key not in without}
        if isinstance(item, list):
            return [simplify(inner) for inner in item]
        return f"{item:.12g}" if isinstance(item, float) else item

    return hashlib.sha256(json.dumps(simplify(value), sort_keys=True).encode()).hexdigest()[:12]


def describe_numbers(numbers: Tensor) -> str:
    """Returns a digest of the bits, the norm, and the projection on a fixed direction."""
    bits = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:12]
    projection = numbers @ torch.arange(len(numbers), dtype=torch.float64).cos()
    return f"{bits}:{numbers.norm():.10g}:{projection:.10g}"


Work = Callable[[Path], Entry]
"""Computes an entry, given a folder for its files."""


def list_work() -> dict[str, Work]:
    """Returns what single processes compute, by name."""
    work: dict[str, Work] = {
        f"{PUBLISHED}{file.stem}/{name}": partial(plan_published, file, name)
        for file, name in product(find_published_profiles(), COMMANDS)
    }
    work |= {f"profile/{model}": partial(profile_alone, model) for model in MODELS}
    work |= {f"random/{seed:02d}": partial(plan_random, seed) for seed in range(50)}
    return work | {case.name: partial(train, case) for case in list_cases() if case.processes == 1}
