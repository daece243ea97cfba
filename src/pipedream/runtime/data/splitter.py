"""From a loader's batch to the microbatches of the first and the last stage.

A batch is adapted to the model's input and the loss's targets (`BatchAdapter`), whose samples are then split.

The batch dimension of a tensor is `BatchDim`: one number for all, or a mapping from an input's name (or its position,
for positional inputs) to its dimension. Inputs that are not named have dimension 0, and those with None have none.

An input may be a list or tuple with an item for each sample, such as a text, or a dict with the boxes of each picture.
Then the list is split, not the tensors in it. The first minibatch decides which lists are. Where the sizes of other
tensors do not show it, the user must: the dimension "items" is that of such a list.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from pipedream.core.errors import PipelineError, WorkerError
from pipedream.runtime.comm.message import ENDS_EPOCH, Content, Message
from pipedream.runtime.comm.values import flatten, map_tensors
from pipedream.runtime.data.reader import Minibatch

AdaptBatch = Callable[[Any], tuple[Any, Any]]
"""Batch -> (inputs, targets): a `BatchAdapter`, or any function."""

BatchDim = int | Mapping[str | int, int | str | None]

Leaf = tuple[Any, int | None, str | int]
"""A tensor, a packed sequence or a list with an item per sample; its batch dimension, and its input's name or place."""

Parts = list[tuple[Message, Message]]
"""The microbatches of a minibatch: input of the first layer, and targets of the loss."""


Flat = tuple[str, tuple[torch.Tensor, ...]]
"""What `values.flatten` returns."""

Place = tuple[Any, ...]
"""Where a list is: the name or position of its input, and the keys, fields and indices that lead to it."""

Lists = dict[Place, int | None]
"""The items of a list when it was first seen; None if one for each sample."""

SINGLE_SAMPLE = "Expected more than 1 value per channel"
"""A text of torch's error for a normalisation over one value."""

SINGLE_ADVICE = (
    "a microbatch has one sample, perhaps of an epoch's last batch: leave it out (DataLoader's drop_last=True)"
)

DENSE = "give it dense: x.to_dense(), or of a nested tensor torch.nested.to_padded_tensor(x, 0.0) and a mask"

ITEMS = "items"
"""The batch dimension of a list with an item for each sample."""

_LEAVES = (torch.Tensor, PackedSequence)
_PLAIN = (str, int, float)  # a list may have very many, which need no look inside


@dataclass(frozen=True)
class BatchAdapter:
    """Maps a batch to (inputs, targets).

    Without functions, the inputs are the first of a pair, else the batch; the targets are the second of a pair for
    torch's own losses, else the batch. A mapping is never a pair.

    Attributes:
        torch_loss: the loss is one of torch's own.
        own_loss: the model computes the loss: its input is the whole batch, a tuple also if the loader yields a list.
        reads_batch: a weight or a metric reads the batch; otherwise there are no targets for a model's own loss.
    """

    inputs: Callable[[Any], Any] | None = None
    targets: Callable[[Any], Any] | None = None
    torch_loss: bool = False
    own_loss: bool = False
    reads_batch: bool = True

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        if self.targets is not None:
            return self.input_of(batch), self.targets(batch)
        if self.own_loss and not self.reads_batch:
            return self.input_of(batch), None
        if not self.torch_loss:
            return self.input_of(batch), batch
        if not _is_pair(batch):
            raise PipelineError(
                "a loss from torch needs batches of the form (inputs, targets), but the loader yielded a "
                f"{type(batch).__name__}; pass inputs=... and targets=... to the pipeline to take them from the batch"
            )
        return self.input_of(batch), batch[1]

    def input_of(self, batch: Any) -> Any:
        if self.inputs is not None:
            return self.inputs(batch)
        if self.own_loss:
            return tuple(batch) if type(batch) is list else batch
        return batch[0] if _is_pair(batch) else batch


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


class Splitter:
    """Splits minibatches into microbatches, each with its header.

    Attributes:
        on_first: called once, with the microbatches of the next minibatch, and a function that returns its first
            samples, of any number, as one part.
        loader: that its minibatches come from.
        planned_samples: those of a minibatch of the plan; a warning says if the next has another number. 1: unknown.
    """

    on_first: Callable[[Parts, Callable[[int], Parts]], None] | None = None
    loader: Any = None
    planned_samples: int = 1

    def __init__(self, batch_dim: BatchDim = 0) -> None:
        self._batch_dim = batch_dim
        self._is_split: dict[tuple[str, str | int, int], bool] = {}
        self._lists: tuple[Lists, Lists] = {}, {}

    def begin(self, per_minibatch: int, base: int) -> None:
        """Begins a stream, with `base` minibatches done before."""
        self._per_minibatch = per_minibatch
        self._base = base

    def split(self, number: int, minibatch: Minibatch) -> Parts:
        """Returns the microbatches of minibatch `number` of the stream."""
        inputs, targets = minibatch.batch
        first = number * self._per_minibatch
        sizes, flat_inputs, flat_targets = split_minibatch(
            inputs, targets, self._per_minibatch, self._batch_dim, self._check_leaves, self._lists
        )
        count = sum(sizes)
        planned, self.planned_samples = self.planned_samples, 1
        if planned not in (1, count):
            warnings.warn(
                f"the loader's batch has {count} samples, but the plan is for {planned}, as many as were profiled; "
                f"its stages, seconds and bytes may not fit: profile and plan with a batch of {count}, or train with "
                f"batches of {planned}",
                stacklevel=2,
            )

        parts: Parts = []
        for part, size in enumerate(sizes):
            header = Message(
                microbatch=first + part,
                content=Content.DATA if size else Content.EMPTY,
                minibatch=self._base + number,
                epoch=minibatch.epoch,
                samples=size,
                flags=ENDS_EPOCH if minibatch.ends_epoch else 0,
                share=size / count,
            )
            pair = header, header
            if size:
                pair = header.with_tensors(*flat_inputs[part]), header.with_tensors(*flat_targets[part])
            parts.append(pair)
        if self.on_first is not None:
            on_first, self.on_first = self.on_first, None
            on_first(parts, partial(self._take_first, inputs, targets, parts[0][0], count))
        return parts

    def _take_first(self, inputs: Any, targets: Any, header: Message, count: int, samples: int) -> Parts:
        """Returns the first of a minibatch's `count` samples as one part, with a header like that of another part."""
        sizes = 1 if samples == count else [samples, count - samples]  # a whole one is not split, and may be sparse
        _, (first_inputs, *_), (first_targets, *_) = split_minibatch(
            inputs, targets, sizes, self._batch_dim, lists=self._lists
        )
        message = replace(header, samples=samples, share=samples / count)
        return [(message.with_tensors(*first_inputs), message.with_tensors(*first_targets))]

    def _check_leaves(self, role: str, leaves: Sequence[Leaf], count: int) -> None:
        """Raises WorkerError for a tensor with a graph, or one that is split in one minibatch and whole in another."""
        counts = Counter[str | int]()
        for leaf, dim, name in leaves:
            if any(getattr(tensor, "grad_fn", None) is not None for tensor in _list_tensors(leaf)):
                raise _make_error(
                    f"the tensor {name!r} of the {role} is part of an autograd graph, to which a pipeline returns no "
                    "gradient",
                    "detach it, or put what computed it into the model",
                )
            is_split = _find_split_dim(leaf, dim, count) is not None
            if is_split and self._per_minibatch > 1 and is_sparse(leaf):
                raise _make_error(f"the tensor {name!r} of the {role} is sparse or nested, and cannot be split", DENSE)
            key = role, name, counts[name]
            counts[name] += 1
            if dim is None or self._per_minibatch == 1 or not isinstance(leaf, _LEAVES):  # lists: `_find_known_leaves`
                continue
            if self._is_split.setdefault(key, is_split) != is_split:
                raise _make_error(
                    f"the tensor {name!r} of the {role}, of shape {tuple(leaf.data.shape)} for {count} samples, "
                    f"{'has' if is_split else 'does not have'} the number of samples in dimension {dim}, unlike "
                    "in earlier minibatches, so it is unclear whether to split it with the samples",
                    f"give batch_dim={{{name!r}: None}} if all samples share it, or the dimension of its samples",
                )


def is_sparse(leaf: Any) -> bool:
    """Returns whether a leaf is a sparse or nested tensor."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_nested or "sparse" in str(leaf.layout))


def count_samples(inputs: Any, batch_dim: BatchDim = 0) -> int:
    """Returns the number of samples of a model's input.

    For keyword arguments, which have no order, it is the most frequent size of their tensors, the first of equally
    frequent ones; otherwise the size of the first tensor with the batch dimension; 1 if none has it.
    """
    return _find_leaves(inputs, batch_dim)[1]


def known_samples(inputs: Any, batch_dim: BatchDim = 0, targets: Any = None) -> int | None:
    """Returns the number of samples; None if no tensor has the batch dimension."""
    return _find_known_leaves(inputs, batch_dim, targets=targets)[1]


def split_minibatch(
    inputs: Any,
    targets: Any,
    parts: int | Sequence[int],
    batch_dim: BatchDim = 0,
    check: Callable[[str, Sequence[Leaf], int], None] | None = None,
    lists: tuple[Lists, Lists] | None = None,
) -> tuple[list[int], list[Flat], list[Flat]]:
    """Returns the number of samples of each part, and its inputs and targets, flattened.

    A tensor that is in both is split once.

    Args:
        parts: their number, or their sizes.
        check: called with a role, its tensors, and the number of samples.
        lists: those of inputs and of targets that were seen before; new ones are added.
    """
    # Where nothing is split, minibatches cannot contradict each other.
    input_lists, target_lists = ({}, {}) if lists is None or parts == 1 else lists
    splits = parts != 1
    leaves, count = _find_leaves(inputs, batch_dim, input_lists, targets, splits)
    whole_ids = {id(leaf) for leaf, *_ in leaves}
    target_leaves, _ = _find_known_leaves(targets, batch_dim, target_lists, count, splits=splits, whole_ids=whole_ids)
    if check is not None:
        check("inputs", leaves, count)
        check("targets", [leaf for leaf in target_leaves if id(leaf[0]) not in whole_ids], count)
    if parts == 1:
        return [count], [flatten(inputs)], [flatten(targets)]
    split = _Split(count, parts)
    return split.sizes, split.flatten_parts(inputs, leaves), split.flatten_parts(targets, target_leaves)


def split_batch(value: Any, count: int, parts: int | Sequence[int], batch_dim: BatchDim = 0) -> list[Any]:
    """Splits `count` samples into microbatches as equal as possible, larger ones first; the last may be empty.

    A tensor is split if its size along the batch dimension is `count`, or along dimension 0 if it has no such dimension
    (such as lengths); everything else goes to each microbatch.

    Args:
        parts: their number, or their sizes.
    """
    if parts == 1:
        return [value]
    return _Split(count, parts).list_parts(value, _find_known_leaves(value, batch_dim, count=count)[0])


def list_sizes(count: int, parts: int) -> list[int]:
    """Returns the samples of each microbatch of a minibatch."""
    return [count // parts + (part < count % parts) for part in range(parts)]


class _Split:
    """Splits values of one minibatch; a tensor that occurs twice is split once."""

    def __init__(self, count: int, parts: int | Sequence[int]) -> None:
        self.sizes = list_sizes(count, parts) if isinstance(parts, int) else list(parts)
        self._count = count
        self._pieces: dict[int, Sequence[Any]] = {}

    def list_parts(self, value: Any, leaves: Iterable[Leaf]) -> list[Any]:
        self._split_all(leaves)

        def part(index: int) -> Any:
            pieces = {key: parts[index] for key, parts in self._pieces.items()}
            return map_tensors(value, lambda leaf: leaf, replaced=pieces)

        return [part(index) for index in range(len(self.sizes))]

    def flatten_parts(self, value: Any, leaves: Sequence[Leaf]) -> list[Flat]:
        # Items of a list, and the shape of a meta tensor, are in the structure.
        if any(not isinstance(leaf, torch.Tensor) or leaf.is_meta for leaf, *_ in leaves):
            return [flatten(part) for part in self.list_parts(value, leaves)]
        # All parts have the structure of the whole.
        self._split_all(leaves)
        structure, tensors = flatten(value)
        whole = len(self.sizes)
        pieces = [self._pieces.get(id(tensor)) or [tensor] * whole for tensor in tensors]
        return [(structure, tensors) for tensors in zip(*pieces, strict=True)] or [(structure, ())] * whole

    def _split_all(self, leaves: Iterable[Leaf]) -> None:
        for leaf, dim, _ in leaves:
            if id(leaf) not in self._pieces:
                self._pieces[id(leaf)] = self._split(leaf, _find_split_dim(leaf, dim, self._count))

    def _split(self, leaf: Any, dim: int | None) -> Sequence[Any]:
        if dim is None:
            return [leaf] * len(self.sizes)
        if not isinstance(leaf, torch.Tensor):
            return _split_items(leaf, self.sizes)
        # A first layer may work in place: `data`, because autograd counts changes of all views of a tensor together.
        parts: Sequence[torch.Tensor] = torch.split(leaf, self.sizes, dim)
        return [part.data for part in parts]


def _find_leaves(
    inputs: Any, batch_dim: BatchDim, lists: Lists | None = None, targets: Any = None, splits: bool = False
) -> tuple[list[Leaf], int]:
    """Returns what is to be split, and the number of samples. Raises a WorkerError if there are none."""
    leaves, count = _find_known_leaves(inputs, batch_dim, lists, targets=targets, splits=splits)
    if not leaves:
        raise _make_error("the batch holds no tensor", "let the loader yield tensors")
    if count == 0:
        raise _make_error("the batch holds no sample", "let the loader leave out empty batches")
    return leaves, 1 if count is None else count


def _find_known_leaves(
    value: Any,
    batch_dim: BatchDim,
    lists: Lists | None = None,
    count: int | None = None,
    *,
    targets: Any = None,
    splits: bool = False,
    whole_ids: Container[int] = (),
) -> tuple[list[Leaf], int | None]:
    """Returns what is to be split, and the number of samples if it is known, or was given.

    Args:
        lists: those seen before; new ones are added.
        targets: of which sizes may show how many samples a list of tensors has.
        splits: a list that may have an item for each sample or not raises a WorkerError.
        whole_ids: of tensors that hold all samples.
    """
    inputs: Mapping[Any, Any] = {0: value}
    if isinstance(value, Mapping):
        inputs = value
    elif isinstance(value, tuple) and not isinstance(value, PackedSequence):
        inputs = inputs if _is_tuple_of_samples(value, count) else dict(enumerate(value))
    named_dims = {} if isinstance(batch_dim, int) else batch_dim
    has_items = {name for name in inputs if named_dims.get(name, 0) == ITEMS}
    dims = _choose_dims(inputs, batch_dim)
    before: Lists = {} if lists is None else lists

    def list_leaves(without: Iterable[int]) -> list[Leaf]:
        return [(leaf, dims[name], name) for name, item in inputs.items() for leaf in _list_tensors(item, without)]

    def find_lists(is_wanted: Callable[[Place, Sequence[Any]], bool]) -> list[tuple[Place, Sequence[Any]]]:
        names = [name for name in inputs if dims[name] == 0 or not named_dims]
        return [pair for name in names for pair in _find_lists(inputs[name], (name,), is_wanted)]

    def holds_samples(place: Place, items: Sequence[Any]) -> bool:
        return place[0] not in named_dims and (_holds_dicts(items) or _holds_tensors(items) or _is_ragged(items))

    is_given = count is not None
    if count is None:
        named = [items for _, items in find_lists(lambda place, _: place[0] in has_items)]
        lists_here = [] if named else find_lists(holds_samples)
        count = len(named[0]) if named else _count_by_lists(value, lists_here, list_leaves, before, dims, targets)

    def is_split(place: Place, items: Sequence[Any]) -> bool:
        fits = len(items) == count
        if place[0] in has_items and (fits or not is_given):
            if not fits:
                raise _make_miscounted_error(place, len(items), count)
            return True
        if place[0] in named_dims:
            return fits and not _list_tensors(items)  # if there are tensors, the dimension is theirs
        if fits and before.get(place, 0) is None:
            return True
        is_of_samples = fits and _is_of_samples(items, count, dims[place[0]])
        is_whole = (isinstance(batch_dim, int) and batch_dim != 0) or any(
            id(leaf) in whole_ids for leaf in _list_tensors(items)
        )
        if splits and fits and not is_of_samples and not is_whole and place not in before:
            raise _make_ambiguous_error(place, items)
        first = before.setdefault(place, None if is_of_samples else len(items))
        # It was split and does not fit now; or it was shared, had another length, and fits now.
        if first is None if not is_of_samples else first not in (None, len(items)):
            raise _make_unclear_error(place, len(items), count, first)
        return first is None  # else a shared list, which may have as many items as a smaller minibatch has samples

    split = {id(items): (place[0], items) for place, items in find_lists(is_split)}
    return [*list_leaves(split), *((items, 0, name) for name, items in split.values())], count


def _choose_dims(inputs: Mapping[Any, Any], batch_dim: BatchDim) -> dict[Any, int | None]:
    """Returns name -> dimension of the samples in an input's tensors."""
    if isinstance(batch_dim, int):
        return dict.fromkeys(inputs, batch_dim)
    dims = {name: batch_dim.get(name, 0) for name in inputs}
    return {name: 0 if isinstance(dim, str) else dim for name, dim in dims.items()}


def _is_tuple_of_samples(value: tuple[Any, ...], count: int | None) -> bool:
    """Returns whether targets are a tuple with an item for each sample, rather than of one for each kind of target."""
    if type(value) is not tuple or len(value) != count or not value:
        return False
    lists = [item for item in value if isinstance(item, (list, tuple, *_LEAVES))]
    sizes = {len(item) if isinstance(item, (list, tuple)) else _find_size(item, 0) for item in lists}
    return _holds_dicts(value) or count not in sizes


def _count_by_lists(
    value: Any,
    lists: Sequence[tuple[Place, Sequence[Any]]],
    list_leaves: Callable[[Iterable[int]], list[Leaf]],
    before: Lists,
    dims: Mapping[Any, int | None],
    targets: Any,
) -> int | None:
    """Returns the number of samples of an input with these lists of tensors.

    Tensors of one sample each say nothing about the number of samples, but others do. So a list's length counts if
    another tensor has it as its size, and the size of its tensors if another one has it, too.
    """
    certain = [items for place, items in lists if before.get(place, 0) is None or _holds_dicts(items)]
    certain_ids = set(map(id, certain))
    unknown = [(place, items) for place, items in lists if place not in before and id(items) not in certain_ids]
    outside = list_leaves({*certain_ids, *(id(items) for _, items in unknown)})
    if certain or not unknown:
        count = _known_count(value, outside)
        return len(certain[0]) if count is None and certain else count
    known_sizes = {_find_size(leaf, dim) for leaf, dim, _ in outside} | _list_target_sizes(targets, value)
    candidates = {
        size
        for place, items in unknown
        for size in (len(items), *(_find_size(leaf, dims[place[0]]) for leaf in _list_tensors(items)))
        if size is not None and size in known_sizes
    }
    if not candidates and known_sizes - {None, 1}:
        return _known_count(value, outside)  # all samples share the lists
    if len(candidates) != 1:
        raise _make_ambiguous_error(*unknown[0])
    return candidates.pop()


def _list_target_sizes(targets: Any, inputs: Any) -> set[int | None]:
    """Returns the sizes of tensors that may hold all samples, and the lengths of what may have an item for each."""

    def holds_samples(_: Place, items: Sequence[Any]) -> bool:
        if type(items) is list and _holds_tensors(items):
            return True
        return _holds_dicts(items) or (_is_ragged(items) and type(items[0]) not in (list, tuple))

    lists = [items for _, items in _find_lists(targets, (), holds_samples)]
    sizes = {_find_size(leaf, 0) for leaf in _list_tensors(targets, map(id, lists))}
    is_batch = not {id(leaf) for leaf in _list_tensors(inputs)}.isdisjoint(map(id, _list_tensors(targets)))
    if type(targets) is tuple and not is_batch:
        sizes.add(len(targets))
    return sizes | {len(items) for items in lists if _holds_dicts(items)}


def _find_lists(
    value: Any, place: Place, is_wanted: Callable[[Place, Sequence[Any]], bool]
) -> Iterator[tuple[Place, Sequence[Any]]]:
    """Yields wanted lists and tuples, with their places, that are not in wanted ones themselves."""
    if isinstance(value, _LEAVES):
        return
    if type(value) in (list, tuple) and value and is_wanted(place, value):
        yield place, value
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    for key, part in parts:
        if type(part) not in _PLAIN:
            yield from _find_lists(part, (*place, key), is_wanted)


def _holds_dicts(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Mapping) for item in items)


def _holds_tensors(items: Sequence[Any]) -> bool:
    return all(isinstance(item, torch.Tensor) and item.ndim for item in items)


def _is_ragged(items: Sequence[Any]) -> bool:
    """Returns whether items of one type hold tensors of different sizes."""
    if type(items[0]) in _PLAIN or len(set(map(type, items))) > 1:
        return False
    return len({tuple(_find_size(leaf, 0) for leaf in _list_tensors(item)) for item in items}) > 1


def _is_of_samples(items: Sequence[Any], count: int | None, dim: int | None) -> bool:
    """Returns whether a list of as many items as samples has one for each, rather than tensors of all samples."""
    tensors = [leaf for leaf in _list_tensors(items) if _find_size(leaf, 0) is not None]
    of_all = [count in (_find_size(leaf, 0), _find_size(leaf, dim)) for leaf in tensors]
    return _holds_dicts(items) or not any(of_all) or (not all(of_all) and _is_ragged(items))


def _make_unclear_error(place: Place, items: int, count: int | None, first: int | None) -> WorkerError:
    earlier = "an item for each sample" if first is None else f"{first} items"
    return _make_error(
        f"the list {_describe_place(place)} has {items} items for {count} samples, and had {earlier} before: split it "
        "or not?",
        f"give batch_dim={{{place[0]!r}: None}} if all samples share it, or {ITEMS!r} if it has one for each sample",
    )


def _make_miscounted_error(place: Place, items: int, count: int | None) -> WorkerError:
    return _make_error(
        f"the list {_describe_place(place)} has {items} items for {count} samples, but is said to have one for each",
        f"let the loader give as many, or batch_dim={{{place[0]!r}: None}} if all samples share it",
    )


def _make_ambiguous_error(place: Place, items: Sequence[Any]) -> WorkerError:
    return _make_error(
        f"the list {_describe_place(place)} of {len(items)} items with tensors may have one for each sample, or not",
        f"give batch_dim={{{place[0]!r}: {ITEMS!r}}} if it has; the samples' dimension in its tensors, such as 0, if "
        "not; None if all samples share it",
    )


def _describe_place(place: Place) -> str:
    return "".join([repr(place[0]), *(f"[{key!r}]" for key in place[1:])])


def _make_error(problem: str, advice: str) -> WorkerError:
    return WorkerError(0, "the loader", problem, advice)


def _known_count(inputs: Any, leaves: Iterable[Leaf]) -> int | None:
    sizes = [size for leaf, dim, _ in leaves if (size := _find_size(leaf, dim)) is not None]
    if not sizes:
        return None
    return max(sizes, key=sizes.count) if isinstance(inputs, Mapping) else sizes[0]


def _list_tensors(value: Any, skipped: Iterable[int] = ()) -> list[Any]:
    """Lists the tensors and packed sequences in a value, but not in containers whose ids are `skipped`."""
    if isinstance(value, _LEAVES):
        return [value]
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_tensors(value, note, _LEAVES, dict.fromkeys(skipped))
    return leaves


def _find_size(leaf: Any, dim: int | None) -> int | None:
    if dim is None:
        return None
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if not isinstance(leaf, torch.Tensor):
        return len(leaf)
    return leaf.size(dim) if -leaf.ndim <= dim < leaf.ndim else None


def _find_split_dim(leaf: Any, dim: int | None, count: int) -> int | None:
    if dim is None:
        return None
    size = _find_size(leaf, dim)
    if size is None and isinstance(leaf, torch.Tensor) and leaf.ndim:
        dim, size = 0, leaf.shape[0]
    return dim if size == count else None


def _split_items(items: Any, sizes: Sequence[int]) -> list[Any]:
    """Splits a list, or a packed sequence; a part of that without samples, which is not run, is None."""
    samples = unpack_sequence(items) if isinstance(items, PackedSequence) else items
    parts = [samples[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if not isinstance(items, PackedSequence):
        return parts
    return [pack_sequence(part, enforce_sorted=items.sorted_indices is None) if part else None for part in parts]
