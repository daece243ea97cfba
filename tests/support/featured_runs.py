"""Trains a model of `models` with the features of a pipeline, in one process or as one rank of several."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from models import CASES
from split_training import Trained, batches_of, make_optimizer, model_of

import pipedream as pd


@dataclass(frozen=True)
class Feature:
    """Features that a run uses.

    Attributes:
        config: workers of each stage.
        chunks: stages per worker.
        dropout: as the model has it.
        saves: in the middle, and continues from there on another plan.
        options: further arguments of `pipedream.Pipeline`.
    """

    schedule: str = "1f1b"
    microbatches: int = 2
    config: tuple[int, ...] = (1, 1)
    chunks: int = 1
    recompute: bool = False
    dropout: bool = False
    saves: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        return sum(self.config) // self.chunks


FLUSHING = {
    "interleaved": Feature("interleaved_1f1b", 4, (1, 1, 1, 1), chunks=2),
    "zero bubble": Feature("zb_h1", 4),
    "recompute": Feature(recompute=True),
    "recompute split": Feature("zb_h1", 4, recompute=True),
    "replicas": Feature("1f1b", 4, (2, 1)),
    "loss scale": Feature(options={"grad_scaler": 1024.0}),
    "another plan": Feature(saves=True),
}
"""With the numbers of a plain loop."""

FEATURES = FLUSHING | {
    "2bw": Feature("pipedream_2bw", 4, (1, 1)),
    "2bw recompute": Feature("pipedream_2bw", 4, recompute=True),
    "2bw replicas": Feature("pipedream_2bw", 4, (2, 1)),
    "pipedream": Feature("pipedream", 1, (1, 1)),
    "average": Feature(options={"ema": 0.9}),
    "clip": Feature(options={"clip_grad_norm": 0.1}),
    "autocast": Feature(options={"autocast": torch.bfloat16}),
    "autocast recompute": Feature(options={"autocast": torch.bfloat16}, recompute=True, dropout=True),
    "dropout": Feature("zb_h1", 4, dropout=True, recompute=True),
    "phases": Feature(options={"phases": "gpipe/2:2,pipedream_2bw/2"}),
}


def plan_of(profile: pd.Profile, feature: Feature, shift: int = 0) -> pd.Plan:
    """Returns the plan of a feature, cut evenly, `shift` layers later."""
    count, stages = len(profile.graph.layers), len(feature.config)
    cuts = tuple(i * count // stages + shift for i in range(1, stages)) if feature.chunks == 1 else None
    plan = pd.plan(
        profile,
        pd.Cluster.local(feature.workers),
        schedule=feature.schedule,
        microbatches=feature.microbatches if feature.microbatches > 1 else None,
        cuts=cuts,
        shape=feature.config if feature.chunks == 1 else "any",
        chunks=feature.chunks if feature.chunks > 1 else None,
    )
    return replace(plan, stages=tuple(replace(stage, recompute=feature.recompute) for stage in plan.stages))


def run(name: str, profile: pd.Profile, feature: Feature, folder: Path) -> Trained:
    """Trains in this process alone, or as one rank of a process group; the folder is for a checkpoint."""
    case = CASES[name]
    batches, losses = batches_of(case), []
    options = {"schedule": None if "phases" in feature.options else feature.schedule} | feature.options

    def pipeline_of(shift: int) -> pd.Pipeline:
        model, plan = model_of(case, dropout=feature.dropout), plan_of(profile, feature, shift)
        return pd.Pipeline(model, plan, loss=case.loss, optimizer=make_optimizer, seed=3, **options)

    if feature.saves:
        with pipeline_of(0) as pipeline:
            for done in pipeline.train(batches):
                losses.append(done.loss)
                if done.number == 1:
                    break
            pipeline.save(folder)
    with pipeline_of(1) as pipeline:
        if feature.saves:
            pipeline.load(folder)
        losses += [done.loss for done in pipeline.train(batches)]
        evaluated, predicted = pipeline.evaluate(batches)["loss"], list(pipeline.predict(batches))
        state = pipeline.state_dict()
        if "ema" in options:
            state |= {f"average {name}": value for name, value in pipeline.state_dict(ema=True).items()}
    return Trained(losses, state, evaluated, predicted)


def run_all(name: str, profile: str, chosen: dict[str, Feature], folder: Path) -> dict[str, Trained]:
    """Trains once for each feature."""
    read = pd.Profile.from_json(profile)
    return {word: run(name, read, feature, folder / word) for word, feature in chosen.items()}
