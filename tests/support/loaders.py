"""Loaders of all kinds, and what a plain loop over them gives."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Numbers(Dataset[int]):
    """Gives its indices, and notes which were loaded."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.loaded.append(int(index))
        return int(index)


class Shuffled:
    """A batch sampler of the user's own: draws at once, from all three generators, and may use its list again."""

    def __init__(self, size: int, uses_again: bool) -> None:
        self.size, self.uses_again = size, uses_again

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(self.size).tolist()
        random.shuffle(order)
        shift = int(torch.randint(self.size, ()))
        return self._batches([(i + shift) % self.size for i in order])

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in order:
            batch.append(index)
            if random.random() < 0.4:
                yield batch
                if self.uses_again:
                    batch.clear()
                else:
                    batch = []
        yield [*batch, 0]


class DrawnAnew:
    """So many minibatches, which only the pipeline holds."""

    def __init__(self, count: int, draw: Callable[[], Any]) -> None:
        self.count, self.draw = count, draw

    def __iter__(self) -> Iterator[Any]:
        return (self.draw() for _ in range(self.count))

    def __len__(self) -> int:
        return self.count


class Epochs:
    """A sampler whose order depends on its epoch alone, which `set_epoch` gives."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert self.epoch >= 0
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return self.size


class Drawn(Epochs):
    """A sampler that draws from python's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.size), self.size))


class Subclass(DataLoader[int]):
    def __init__(self, text: str) -> None:
        super().__init__(Numbers(), batch_size=len(text), shuffle=True)


class Stream(IterableDataset[Any]):
    def __init__(self, size: int = 23, take: Callable[[int], Any] = int) -> None:
        self.size, self.take = size, take

    def __iter__(self) -> Iterator[Any]:
        rest = list(range(self.size))
        while rest:
            yield self.take(rest.pop(int(torch.randint(len(rest), ())) if random.random() < 0.5 else 0))


class Plain:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(23).split(4))


class Late:
    """An iterable that draws only from its third epoch on, and not in its first minibatches."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(5):
            if self.epoch == 2 and number > 1:
                yield torch.tensor([random.randrange(99), np.random.randint(99), int(torch.randint(99, ()))])
            else:
                yield torch.tensor([number])


class Stateful:
    """Has a state, as a StatefulDataLoader; read to its end, it begins anew only when it is asked again."""

    def __init__(self, size: int = 23, batch: int = 4, take: Callable[[torch.Tensor], Any] = torch.clone) -> None:
        self.size, self.batch, self.take = size, batch, take
        self.order = torch.empty(0, dtype=torch.int64)
        self.at = self.read = 0
        self.restored = False

    def __iter__(self) -> Iterator[Any]:
        if not self.restored:
            self.order, self.at = torch.randperm(self.size), 0
        self.restored = False
        while self.at < self.size:
            self.at += self.batch
            self.read += 1
            yield self.take(self.order[self.at - self.batch : self.at])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": (self.at, b"x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, (self.at, mark) = state["order"], state["at"]
        assert mark == b"x"
        self.restored = True


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "a generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator()),
    "a sampler's generator": lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(range(23), generator=generator())),
    "with replacement": lambda: DataLoader(
        Numbers(), 4, sampler=RandomSampler(range(23), True, 90, generator=generator()), generator=generator()
    ),
    "drop_last": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "no batches": lambda: DataLoader(Numbers(9), batch_size=None, shuffle=True),
    "weighted": lambda: DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 30)),
    "a subset": lambda: DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(3, 20), generator())),
    "own batches": lambda: DataLoader(Numbers(), batch_sampler=Shuffled(23, True)),
    "own batches, loaded ahead": lambda: DataLoader(Numbers(), batch_sampler=Shuffled(23, False), num_workers=2),
    "own sampler": lambda: DataLoader(Numbers(), 4, sampler=Drawn(23)),
    "set_epoch": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(Epochs(23), 4, False)),
    "loaded ahead": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, prefetch_factor=3),
    "a generator, loaded ahead": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2, generator=generator()),
    "persistent": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True),
    "a subclass": lambda: Subclass("four"),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "iterable, loaded ahead": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
    "plain": Plain,
    "late": Late,
    "stateful": Stateful,
}
ITERABLE = ("iterable", "iterable, loaded ahead", "plain", "late", "stateful")
SHARDED = [name for name in LOADERS if name not in ITERABLE]
WITH_PROCESSES = ("own batches, loaded ahead", "loaded ahead", "a generator, loaded ahead", "persistent")


def noise() -> None:
    torch.rand(3), random.random(), np.random.rand(2)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def plain_loop(loader: Any, epochs: int) -> list[list[list[int]]]:
    """Returns the batches of each epoch as a loop in a script gets them where nothing else draws."""
    seed_all(5)
    epochs_batches = []
    for epoch in range(epochs):
        for part in (loader, getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        epochs_batches.append([listed(batch) for batch in loader])
    return epochs_batches


def listed(batch: Any) -> list[int]:
    numbers: list[int] = torch.as_tensor(batch).reshape(-1).tolist()
    return numbers
