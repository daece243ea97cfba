"""A little pipeline that saves."""

import torch
import zoo
from cases import make_pipeline

import pipedream as pd
from pipedream.services.checkpoint import folders, stores


def pipeline(animal: zoo.Animal, counts: tuple[int, ...] = (1, 1)) -> pd.Pipeline:
    """Returns a pipeline that flushes, so that it is drained at the end of each epoch of five minibatches."""
    return make_pipeline(animal, counts, schedule="gpipe", microbatches=3)


def save(
    folder: stores.Folder, counts: tuple[int, ...] = (1, 1), epochs: int = 4, keep: int | None = None
) -> list[stores.CheckpointStore]:
    """Trains and saves after each epoch, every other time in the background; returns what there is then."""
    run(folder, counts, epochs, keep)
    return folders.list_checkpoints(folder)


def run(
    folder: stores.Folder,
    counts: tuple[int, ...] = (1, 1),
    epochs: int = 4,
    keep: int | None = None,
    resume: stores.Folder | None = None,
) -> dict[str, torch.Tensor]:
    """Trains from the start, or from a checkpoint, to `epochs` in all, and saves as `save`; returns the weights."""
    animal = zoo.make("mlp")
    with pipeline(animal, counts) as trained:
        if resume is not None:
            trained.load(str(resume))
        for done in trained.train(animal.batches, epochs=epochs - trained.position[0]):
            if done.ends_epoch:
                trained.save(str(folder), keep=keep, wait=done.epoch % 2 == 0)
        return trained.state_dict()


def load(folder: stores.Folder) -> tuple[int, int]:
    """Loads the newest checkpoint into a new pipeline; returns the position."""
    with pipeline(zoo.make("mlp")) as loaded:
        return loaded.load(str(folder))


def names(folder: stores.Folder) -> list[str]:
    """Returns the names of all that is in a folder."""
    return stores.open_store(str(folder)).list_names()


def read(checkpoint: stores.CheckpointStore, file: str) -> bytes:
    """Returns what is in a file of a checkpoint."""
    with checkpoint.open(file) as opened:
        return opened.read()


def write(checkpoint: stores.CheckpointStore, file: str, data: bytes) -> None:
    """Writes a file of a checkpoint that is there already."""
    with checkpoint.create(file) as opened:
        opened.write(data)
