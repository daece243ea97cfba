"""Damages a checkpoint many times, and counts what comes of it. See README.md."""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import nn

import pipedream
from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError
from pipedream.services.checkpoint import folders, pieces, stores

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import format_table, make_parser

KINDS = ("flipped bit", "zeroed range", "truncation")
OUTCOMES = ("refused", "exact", "wrong")


def saved(folder: Path) -> Path:
    """Returns a checkpoint of a small model, with AdamW, a schedule and an average of the weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    batches = [(torch.randn(8, 32), torch.randint(4, (8,))) for _ in range(6)]
    profile = pipedream.profile(nn.Sequential(*layers), batches[0][0], loss=None, runs=1)
    with pipedream.Pipeline(
        nn.Sequential(*layers),
        pipedream.plan(profile, pipedream.Cluster.flat(2), cuts=[3]),
        schedule="1f1b",
        microbatches=2,
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20),
        ema=0.9,
    ) as pipeline:
        for _ in pipeline.train(batches):
            pass
        return pipeline.save(folder)


def read(path: Path) -> tuple[Checkpoint, dict[str, bytes]]:
    """Reads all of a checkpoint."""
    checkpoint = stores.open_store(path)
    manifest = folders.read_manifest(checkpoint)
    tensors = pieces.read_tensors(checkpoint, manifest, manifest.tensors)
    return manifest, {name: bytes(t.reshape(-1).view(torch.uint8).numpy()) for name, t in tensors.items()}


def damaged(data: bytes, kind: str, rng: random.Random) -> bytes:
    """Returns a file with one damage that changes it."""
    while True:
        changed = bytearray(data)
        at = rng.randrange(len(changed))
        if kind == "flipped bit":
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == "zeroed range":
            end = min(len(changed), at + rng.choice((1, 16, 512, 4096)))
            changed[at:end] = bytes(end - at)
        else:
            del changed[at:]
        if changed != data:
            return bytes(changed)


def trials(path: Path, count: int, seed: int = 0) -> Counter[tuple[str, str, str]]:
    """Makes `count` damages of each kind to each file; returns (file, kind, outcome) -> number."""
    expected, rng = read(path), random.Random(seed)
    counts: Counter[tuple[str, str, str]] = Counter()
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for kind in KINDS:
            for _ in range(count):
                file.write_bytes(damaged(data, kind, rng))
                try:
                    outcome = "exact" if read(path) == expected else "wrong"
                except ArtifactError:
                    outcome = "refused"
                counts[file.name, kind, outcome] += 1
        file.write_bytes(data)
    return counts


def table(counts: Counter[tuple[str, str, str]]) -> str:
    """Returns the counts, one row for each file and kind."""
    kinds = dict.fromkeys((file, kind) for file, kind, _ in counts)
    rows = [[f"`{f}`", kind, *(f"{counts[f, kind, outcome]:,}" for outcome in OUTCOMES)] for f, kind in kinds]
    return format_table("file | damage | refused | exact | wrong", "llr", rows)


def main() -> None:
    """Makes the trials and prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=2_000, help="of each kind, for each file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(table(trials(saved(Path(scratch)), options.trials)))


if __name__ == "__main__":
    main()
