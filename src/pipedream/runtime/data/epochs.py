"""The numbers that samplers and data sets get by ``set_epoch``."""

from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

NUMBERS: Any = WeakIdKeyDictionary()
"""Loader -> the number set last, and how much it is above the pipeline's."""


def list_counting(loader: Any) -> list[Any]:
    """Returns those of the samplers and the loader that have ``set_epoch``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler, loader]
    return [part for part in {id(part): part for part in parts}.values() if hasattr(part, "set_epoch")]


def count_above(loader: Any) -> int:
    """Returns how much the loader's number is above the pipeline's."""
    return int(NUMBERS[loader][1]) if list_counting(loader) else 0


def follow_epoch(loader: Any, first: int, skip: int, saved: int) -> None:
    """Lets a stream's epochs, from `first` on, count from where the user's own ``set_epoch`` has begun, 1 for instance.

    Args:
        skip: minibatches that were read of the first epoch.
    """
    if parts := list_counting(loader):
        number = next((part.epoch for part in parts if type(getattr(part, "epoch", None)) is int), 0)
        last, above = NUMBERS.get(loader, (None, saved))
        if number > first if last is None else number != last and not skip:  # some count by themselves
            above = number - first
        NUMBERS[loader] = number, above


def set_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` of the loader and its samplers."""
    for part in list_counting(loader):
        above = NUMBERS[loader][1]
        part.set_epoch(epoch + above)
        NUMBERS[loader] = epoch + above, above
