"""Encodes values as messages: tensors in containers, with numbers, texts and the like. Nothing is pickled.

A value is taken apart into its tensors and a JSON text of its structure. A node of that text is a plain value, or a
list that begins with a tag:

    t  tensor        index                                 u, l, d  tuple, list, dict (keys, then values)
    m  meta tensor   shape, dtype, requires_grad, strides  c        another container: class, content, attributes
    e  enum          class, name                           =        the item of the same name in the content

Classes are sent by name. The receiver makes only containers of them, without running their code: named tuples,
dataclasses, subclasses of tuple, list, dict and UserDict (such as the outputs and batches of Hugging Face).

A tensor on the meta device stands for one that is not sent: it has no payload.
"""

import base64
import importlib
import json
import sys
import zlib
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from operator import itemgetter
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_PLAIN = frozenset({type(None), bool, int, float, str})
_CONTAINERS = (tuple, list, dict, UserDict)
_MAX_CACHED_CHARACTERS = 1 << 14  # characters of a structure whose builder is kept
_TO_PLAIN: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)

Build = Callable[[Sequence[torch.Tensor]], Any]


def _name_torch_object(value: Any) -> str:
    return str(value).removeprefix("torch.")


_DTYPE_NAMES = {dtype: _name_torch_object(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _find_in_torch(name: str) -> Any:
    member = getattr(torch, name)
    if not isinstance(member, (torch.dtype, torch.layout, torch.memory_format)):
        raise TypeError(f"a message names torch.{name}, which is neither a dtype, a layout nor a memory format")
    return member


# Type -> its tag, the function to its numbers and texts, and the function from them.
_ATOMS: dict[type, tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    torch.Size: ("size", list, lambda *sizes: torch.Size(sizes)),
    torch.dtype: ("torch", lambda value: [_name_torch_object(value)], _find_in_torch),
    torch.layout: ("torch", lambda value: [_name_torch_object(value)], _find_in_torch),
    torch.memory_format: ("torch", lambda value: [_name_torch_object(value)], _find_in_torch),
    torch.device: ("device", lambda value: [str(value)], torch.device),
    complex: ("complex", lambda value: [value.real, value.imag], complex),
    range: ("range", lambda value: [value.start, value.stop, value.step], range),
    EllipsisType: ("...", lambda value: [], lambda: ...),
    bytes: ("bytes", lambda value: [base64.b64encode(value).decode("ascii")], base64.b64decode),
}
_MAKE_ATOM = {tag: make for tag, _, make in _ATOMS.values()}


class _OpaqueError(Exception):
    pass


def flatten(value: Any, *, opaque_as_none: bool = False) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Returns the text of the structure, empty for a single tensor, and the tensors in a fixed order, each once.

    Args:
        opaque_as_none: objects that cannot be sent, such as a cache of keys and values, become None.

    Raises:
        TypeError: an object cannot be sent; the error names its type and its place in the value.
    """
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return "", (value,)
    nodes = _Nodes(opaque_as_none)
    try:
        node = nodes.encode(value)
    except _OpaqueError:
        raise TypeError(_explain_refusal(value)) from None
    return _ENCODER.encode(node), tuple(nodes.tensors)


def unflatten(structure: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns the value that `flatten` took."""
    if not structure:
        return tensors[0]
    if len(structure) > _MAX_CACHED_CHARACTERS:
        return _make_builder(json.loads(structure))(tensors)
    return _build_cached(structure)(tensors)


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors in a value, without those on the meta device."""
    return flatten(value, opaque_as_none=True)[1]


def compute_crc32(tensor: torch.Tensor) -> int:
    """Returns the checksum of a tensor on the CPU."""
    head = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    plain = tensor.resolve_conj().resolve_neg().reshape(-1)
    return zlib.crc32(plain.contiguous().view(torch.uint8).numpy().data, head)


def map_tensors(
    value: Any,
    function: Callable[[Any], Any],
    leaves: type | tuple[type, ...] = torch.Tensor,
    replaced: Mapping[int, Any] | None = None,
) -> Any:
    """Returns a copy of a value with `function` applied to each tensor; other objects stay the same objects.

    Args:
        leaves: types that the function is applied to.
        replaced: id of a tensor or container -> its replacement.
    """
    return _map_item(value, function, leaves if isinstance(leaves, tuple) else (leaves,), dict(replaced or {}))


def _map_item(item: Any, function: Callable[[Any], Any], leaves: tuple[type, ...], replaced: dict[int, Any]) -> Any:
    # Not nested in `map_tensors`: a closure that calls itself is a cycle, which would keep its tensors in memory.
    if type(item) in _PLAIN:
        return item
    if id(item) in replaced:
        return replaced[id(item)]
    if isinstance(item, leaves):
        replaced[id(item)] = function(item)
        return replaced[id(item)]
    kind = type(item)
    if kind is tuple or kind is list:
        return kind([_map_item(part, function, leaves, replaced) for part in item])
    if kind is dict or (_list_fields(kind) is None and isinstance(item, Mapping)):
        return {key: _map_item(part, function, leaves, replaced) for key, part in item.items()}
    if _list_fields(kind) is None:
        return item
    content, attributes = _split_container(item)
    items, new = content if isinstance(content, dict) else {}, _map_item(content, function, leaves, replaced)
    new_attributes = {
        name: new[name] if part is not None and items.get(name) is part else _map_item(part, function, leaves, replaced)
        for name, part in attributes.items()
    }
    return _assemble_container(kind, new, new_attributes)


def to_device(value: Any, device: torch.device) -> Any:
    """Moves the tensors of a value; those on the meta device stay there, and a PackedSequence's sizes on the CPU.

    The host does not wait for a GPU, which copies tensors from pinned memory while it computes. A tensor that was
    pinned before must not be written until it is copied.
    """
    if isinstance(value, torch.Tensor):
        return _move_leaf(value, device)
    return map_tensors(value, lambda leaf: _move_leaf(leaf, device), (torch.Tensor, PackedSequence))


def _move_leaf(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, PackedSequence):
        data, sizes, *orders = leaf
        fields = _move_leaf(data, device), sizes, *[_move_leaf(order, device) for order in orders]
        # Not by its class, which inspects the tensors: a recorded call may have something else in their place.
        return tuple.__new__(type(leaf), fields)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    source = leaf.device
    if source == device or source.type == "meta":
        return leaf
    if device.type == "cuda" and source.type == "cpu" and not leaf.requires_grad:
        return _copy_to_gpu(leaf, device)
    return leaf.to(device, non_blocking=True)


def _copy_to_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies from pinned memory: from pageable memory the host would wait for everything in the stream.

    The host runs ahead of the GPU, so a separate stream copies while earlier microbatches are computed.
    """
    stream, compute = _make_copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copy = tensor.pin_memory().to(device, non_blocking=True)
    compute.wait_stream(stream)
    copy.record_stream(compute)  # otherwise its memory may be used again for a copy as soon as it is dropped
    return copy


@cache
def _make_copy_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


# -- containers of other classes --------------------------------------------------------------------


def _read_fields(kind: type) -> tuple[str, ...] | None:
    """Returns the fields of a dataclass, () for another container, None for other types."""
    if kind in _ATOMS or issubclass(kind, nn.Module):
        return None
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return () if issubclass(kind, _CONTAINERS) else None


_list_fields: Callable[[type], tuple[str, ...] | None] = cache(_read_fields)


def _split_container(item: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a container's content as a tuple, list or dict, or None; and its attributes."""
    content: Any = None
    if isinstance(item, tuple):
        content = tuple.__getitem__(item, slice(None))
    elif isinstance(item, list):
        content = list.__getitem__(item, slice(None))
    elif isinstance(item, OrderedDict):
        content = dict(OrderedDict.items(item))
    elif isinstance(item, dict):
        content = dict(dict.items(item))
    elif isinstance(item, UserDict):
        content = item.data
    names = _list_fields(type(item))
    if names:
        return content, {name: getattr(item, name) for name in names if hasattr(item, name)}
    attributes = getattr(item, "__dict__", {})
    return content, {
        name: part for name, part in attributes.items() if not (name == "data" and isinstance(item, UserDict))
    }


def _assemble_container(kind: type, content: Any, attributes: Mapping[str, Any]) -> Any:
    """Makes a container from its parts; does not run the class's own code."""
    container: Any
    if issubclass(kind, tuple):
        # A type from C, such as torch.return_types.max, has no other way.
        container = kind(content) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, content)
    elif issubclass(kind, list):
        container = list.__new__(kind)
        list.extend(container, content)
    elif issubclass(kind, dict):
        base = next(base for base in kind.__mro__ if base in (OrderedDict, defaultdict, dict))
        container = base.__new__(kind)
        for key, part in content.items():
            base.__setitem__(container, key, part)
    else:
        container = object.__new__(kind)
        if issubclass(kind, UserDict):
            object.__setattr__(container, "data", content)
    for name, part in attributes.items():
        object.__setattr__(container, name, part)
    return container


@cache
def _list_sent_classes() -> dict[str, type]:
    """Returns the classes that this process has sent, by name, to find those made in functions."""
    return {}


def _name_class(kind: type) -> str:
    """Returns "module:qualname", by which the receiver finds a class.

    A class made in a function cannot be found by that name; it gets a number too, and only its sending process finds
    it.
    """
    name, classes = f"{kind.__module__}:{kind.__qualname__}", _list_sent_classes()
    if _import_item(name) is not kind:
        name += f"#{sum(other.split('#')[0] == name for other in classes)}"
    elif name in classes:  # defined again, as in a notebook
        _build_cached.cache_clear()
    classes[name] = kind
    return name


_find_name: Callable[[type], str] = cache(_name_class)


def _import_item(name: str) -> Any:
    module, _, path = name.partition(":")
    item: Any = sys.modules.get(module)
    if item is None:
        try:
            item = importlib.import_module(module)
        except ImportError:
            return None
    for part in path.split("."):
        item = getattr(item, part, None)
    return item


def _find_class(name: str, is_allowed: Callable[[type], bool]) -> type:
    kind = _list_sent_classes().get(name) or _import_item(name)
    if not isinstance(kind, type):
        raise TypeError(
            f"a value of class {name} was received, which this process does not find by that name; define the class at "
            "the top of a module that every process imports"
        )
    if not is_allowed(kind):
        raise TypeError(f"a value of class {name} was received, which is not a container; nothing else is made")
    return kind


# -- from a value to the nodes of its structure -----------------------------------------------------


class _Nodes:
    """Makes the nodes of one value, and collects its tensors."""

    def __init__(self, opaque_as_none: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self._indices: dict[int, int] = {}
        self._opaque_as_none = opaque_as_none

    def encode(self, item: Any) -> Any:
        kind = type(item)
        if kind in _PLAIN:
            return item
        if isinstance(item, torch.Tensor):
            return self._encode_tensor(item)
        if kind is tuple:
            return ["u", *[self.encode(part) for part in item]]
        if kind is list:
            return ["l", *[self.encode(part) for part in item]]
        if kind is dict:
            return self._encode_dict(item)
        if kind in _ATOMS:
            tag, take_apart, _ = _ATOMS[kind]
            return [tag, *take_apart(item)]
        if kind is slice:
            return ["slice", self.encode(item.start), self.encode(item.stop), self.encode(item.step)]
        if isinstance(item, Enum):
            return ["e", _find_name(kind), item.name] if item.name in kind.__members__ else self._refuse_opaque()
        if isinstance(item, np.generic):
            return self.encode(item.item())
        for plain, convert in _TO_PLAIN.items():
            if isinstance(item, plain):
                return convert(item)
        if _list_fields(kind) is not None:
            return self._encode_container(item)
        return self._encode_dict(dict(item)) if isinstance(item, Mapping) else self._refuse_opaque()

    def _encode_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_meta:
            node: list[Any] = ["m", tensor.shape, _DTYPE_NAMES[tensor.dtype], tensor.requires_grad]
            if not tensor.is_contiguous():
                node.append(tensor.stride())
            return node
        index = self._indices.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return ["t", index]

    def _encode_dict(self, item: Mapping[Any, Any], drops_opaque: bool = False) -> Any:
        keys = [key if type(key) is str else self._encode_key(key) for key in item]
        nodes = [self.encode(part) for part in item.values()]
        if drops_opaque and self._opaque_as_none:
            pairs = zip(keys, nodes, item.values(), strict=True)
            sendable = [(key, node) for key, node, part in pairs if part is None or node is not None]
            keys, nodes = [key for key, _ in sendable], [node for _, node in sendable]
        return ["d", keys, *nodes]

    def _encode_key(self, key: Any) -> Any:
        if not _is_key(key):
            raise _OpaqueError
        return self.encode(key)

    def _encode_container(self, item: Any) -> Any:
        kind = type(item)
        content, attributes = _split_container(item)
        names = _list_fields(kind) or ()
        # Fields of a ModelOutput that are None are not among its items.
        content_node = self._encode_dict(content, bool(names)) if isinstance(content, dict) else self.encode(content)
        node = ["c", _find_name(kind), content_node, list(attributes)]
        items = content if isinstance(content, dict) else {}
        for name, part in attributes.items():
            if part is not None and items.get(name) is part:
                node.append(["="])
            else:
                node.append(self.encode(part) if name in names else self._encode_extra(part))
        return node

    def _encode_extra(self, item: Any) -> Any:
        """Encodes an attribute that is not data, such as a tokenizer's notes on a batch; None if it cannot be sent."""
        old_setting, self._opaque_as_none = self._opaque_as_none, False
        try:
            return self.encode(item)
        except _OpaqueError:
            return None
        finally:
            self._opaque_as_none = old_setting

    def _refuse_opaque(self) -> None:
        if not self._opaque_as_none:
            raise _OpaqueError


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return key is None or isinstance(key, (bool, int, float, str, bytes, Enum, np.generic))


def _explain_refusal(value: Any) -> str:
    where, item = next(_find_opaque(value, "value"))
    kind = type(item).__name__
    advice = (
        "return tensors in tuples, lists, dicts or dataclasses, or cut elsewhere; of a batch, take only what is "
        "needed, with inputs=... and targets=..."
    )
    if "Cache" in kind:
        advice = "switch caches off, as with use_cache=False in Hugging Face, or cut elsewhere"
    elif where.endswith(" key"):
        advice = "use numbers, texts, None, or tuples of these as keys"
    return f"{where} is a {kind}, which cannot be sent between stages; {advice}"


def _find_opaque(item: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yields (where, item) of what `_Nodes` has refused, by a slower search."""
    kind = type(item)
    content: Any = None
    attributes: dict[str, Any] = {}
    names = _list_fields(kind)
    if names is not None:
        content, attributes = _split_container(item)
        attributes = {name: part for name, part in attributes.items() if name in names}
        if hasattr(kind, "_fields"):
            attributes, content = dict(zip(kind._fields, content, strict=False)), None
    elif isinstance(item, Mapping):
        content = dict(item)
    elif kind is slice:
        content = (item.start, item.stop, item.step)
    else:
        try:
            _Nodes(False).encode(item)
        except _OpaqueError:
            yield where, item
    for name, part in attributes.items():
        yield from _find_opaque(part, f"{where}.{name}")
    if isinstance(content, Mapping):
        for key, part in content.items():
            if not _is_key(key):
                yield f"{where}: a key", key
            yield from _find_opaque(part, f"{where}[{key!r}]")
    else:
        for i, part in enumerate(content or ()):
            yield from _find_opaque(part, f"{where}[{i}]")


# -- from the nodes to a value ----------------------------------------------------------------------


@lru_cache(maxsize=256)
def _build_cached(structure: str) -> Build:
    return _make_builder(json.loads(structure))


def _make_builder(node: Any) -> Build:
    """Returns the function from the tensors to a new value."""
    if not isinstance(node, list):
        return lambda tensors: node
    tag, *rest = node
    if tag == "t":
        return itemgetter(rest[0])
    if tag == "m":
        return _make_meta_builder(*rest)
    if tag == "d":
        keys = [_make_builder(key)(()) for key in rest[0]]
        pairs = list(zip(keys, map(_make_builder, rest[1:]), strict=True))
        return lambda tensors: {key: build(tensors) for key, build in pairs}
    if tag == "c":
        return _make_container_builder(*rest)
    if tag == "e":
        member = _find_class(rest[0], lambda kind: issubclass(kind, Enum)).__members__[rest[1]]  # type: ignore[attr-defined]
        return lambda tensors: member
    if tag in _MAKE_ATOM:
        atom = _MAKE_ATOM[tag](*rest)
        return lambda tensors: atom
    parts = list(map(_make_builder, rest))
    if tag == "l":
        return lambda tensors: [build(tensors) for build in parts]
    if tag == "u":
        return lambda tensors: tuple([build(tensors) for build in parts])
    assert tag == "slice", f"unknown tag {tag!r}"
    return lambda tensors: slice(*[build(tensors) for build in parts])


def _make_meta_builder(
    shape: list[int], dtype_name: str, requires_grad: bool, strides: list[int] | None = None
) -> Build:
    dtype = _find_in_torch(dtype_name)
    if strides is None:
        strides = list(torch.empty(shape, device="meta").stride())
    return lambda tensors: torch.empty_strided(shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad)


def _make_container_builder(name: str, content: Any, names: list[str], *nodes: Any) -> Build:
    kind, build_content = _find_class(name, lambda kind: _list_fields(kind) is not None), _make_builder(content)
    attributes = [
        (attribute, None if node == ["="] else _make_builder(node))
        for attribute, node in zip(names, nodes, strict=True)
    ]

    def build(tensors: Sequence[torch.Tensor]) -> Any:
        new_content = build_content(tensors)
        if issubclass(kind, PackedSequence):
            # Recurrent layers need the sizes on the CPU. (While a model is recorded, they are not a tensor.)
            sizes = new_content[1]
            if isinstance(sizes, torch.Tensor) and not sizes.is_meta:
                sizes = sizes.cpu()
            new_content = (new_content[0], sizes, *new_content[2:])
        new_attributes = {
            attribute: new_content.get(attribute) if build_part is None else build_part(tensors)
            for attribute, build_part in attributes
        }
        return _assemble_container(kind, new_content, new_attributes)

    return build
