"""The first minibatch, in the ways in which it is run to compare them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Self

from torch.utils.data import BatchSampler

from pipedream.runtime.data.splitter import BatchDim, Parts, count_samples, list_sizes


class FirstMinibatch(NamedTuple):
    """The first minibatch, for its comparison with the model.

    Attributes:
        parts: its microbatches that have samples.
        whole: the minibatch as one part.
        pair: the samples of its first two microbatches as one part.
        single: a part of one sample if the last minibatch of an epoch will have one; otherwise none.
    """

    parts: Parts
    whole: Parts
    pair: Parts
    single: Parts

    @classmethod
    def of(cls, parts: Parts, take_first: Callable[[int], Parts], last_share: float) -> Self:
        """Returns the first minibatch from its microbatches.

        Args:
            take_first: returns its first samples, of any number, as one part.
            last_share: samples of the last minibatch of an epoch, as a share of this one's.
        """
        filled = [part for part in parts if part[0].samples]
        sizes = [message.samples for message, _ in filled]
        # A minibatch of one sample that is not split would fail without a pipeline, too.
        ends_single = len(parts) > 1 and 1 in list_sizes(round(sum(sizes) * last_share), len(parts))
        return cls(filled, take_first(sum(sizes)), take_first(sum(sizes[:2])), take_first(1) if ends_single else [])


def find_last_share(loader: Any, batch_dim: BatchDim) -> float:
    """Returns the samples of an epoch's last minibatch, as a share of the first one's; 0 if unknown."""
    with suppress(Exception):
        if isinstance(loader, (list, tuple)):
            return count_samples(loader[-1], batch_dim) / count_samples(loader[0], batch_dim)
        sampler = loader.batch_sampler
        samples, size = len(sampler.sampler), sampler.batch_size
        if type(sampler) is BatchSampler and not sampler.drop_last and samples > size:
            return float(samples % size / size)
    return 0.0
