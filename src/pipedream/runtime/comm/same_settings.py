"""Do all ranks train the same? Their settings are compared as texts, before anything is trained.

What may differ is left out: names of devices and files, texts and objects in the variables of a function, a rank's own
number.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.errors import PlanError
from pipedream.core.user_code import is_users_file, shortened
from pipedream.runtime.comm.process_group import gather_texts

CALL = "their call"
"""Name of the setting that says which call a rank makes."""

SAME_CALLS = (
    "every rank must make the same calls: without a condition on the rank around them; what rank 0 alone needs it is "
    "given alone"
)

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<=cuda):\d+")
_DEEPEST = 5  # functions in functions


def check_same_settings(settings: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Compares each setting among the ranks that have one of its name; every rank calls it.

    Raises PlanError: names what differs, on which ranks.
    """
    if group is None:
        return
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in settings.items()}
    try:
        rows = [dict(json.loads(text)) for text in gather_texts(json.dumps(digests), group)]
    except (TypeError, ValueError):  # a text of another call
        call = settings.get(CALL, "this call")
        raise PlanError(f"another rank did not make the call of this one, {call}; {SAME_CALLS}") from None
    names = dict.fromkeys(name for row in rows for name in row)
    differing = [name for name in names if len({row[name] for row in rows if name in row}) > 1]
    if not differing:
        return
    if CALL in differing:
        differing = [CALL]
    mine = {name: settings[name] for name in differing if name in settings}
    texts = [json.loads(text) for text in gather_texts(json.dumps(mine), group)]
    found = "; ".join(
        _difference(name, [(rank, row[name]) for rank, row in enumerate(texts) if name in row]) for name in differing
    )
    if CALL in differing:
        raise PlanError(f"the ranks differ in {found}; {SAME_CALLS}")
    raise PlanError(
        f"the ranks train with different settings: {found}; every rank must run the same script with the same arguments"
    )


def _difference(name: str, texts: Sequence[tuple[int, str]]) -> str:
    first = texts[0][1]
    other = next(text for _, text in texts if text != first)
    lines = zip_longest(first.splitlines(), other.splitlines(), fillvalue="nothing")
    at = next((i for i, (one, another) in enumerate(lines) if one != another), 0)
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        line = [*text.splitlines(), *["nothing"] * (at + 1)][at]
        ranks.setdefault(shortened(line.strip()), []).append(rank)
    where = "; ".join(f"{line} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}" for line, who in ranks.items())
    return f"{name} ({where})"


def text_of(value: Any) -> str:
    """Returns a text that is equal for equal options, functions and objects of processes that run the same code."""
    return "\n".join(_lines(value, 0))


def _lines(value: Any, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        return
    if isinstance(value, partial):
        yield from _lines(value.func, depth)
        for item in value.args:
            yield from _lines(item, depth + 1)
        yield from _items(value.keywords.items(), depth)
    elif isinstance(value, torch.Tensor):
        known = not value.is_meta and value.numel() <= 1 << 16
        yield f"tensor {tuple(value.shape)} {value.dtype} {_digest(str(value.tolist())) if known else ''}"
    elif isinstance(value, nn.Module):
        yield from describe_model(value).splitlines()
        yield from _items(value.named_buffers(), depth)
    elif isinstance(value, Mapping):
        yield from _items(value.items(), depth)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            yield from _lines(item, depth + 1)
    elif inspect.ismethod(value):
        yield from _lines(value.__func__, depth)
        yield from _numbers(_variables(value.__self__))
    elif inspect.isfunction(value):
        yield from _function(value, depth)
    elif isinstance(value, type):
        yield f"{value.__qualname__} {_source(value)}".rstrip()
    elif callable(value) and not isinstance(value, torch.dtype) and hasattr(value, "__dict__"):
        yield f"{getattr(value, '__qualname__', type(value).__qualname__)} {_source(type(value))}".rstrip()
        yield from _numbers(_variables(value))
    else:
        yield _ADDRESS.sub("", repr(value))


def _items(items: Iterable[tuple[Any, Any]], depth: int) -> Iterator[str]:
    for name, value in items:
        yield f"{name}: {', '.join(_lines(value, depth + 1))}"


def _function(function: Callable[..., Any], depth: int) -> Iterator[str]:
    code = function.__code__
    if not is_users_file(code.co_filename):
        yield function.__qualname__
        return
    yield f"{function.__qualname__}, code {_digest(_code(code))}"
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    globals_read = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    variables = globals_read | closure
    yield from _numbers(variables)
    defaults = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    yield from _items(
        ((name, value) for name, value in defaults.items() if value is not inspect.Parameter.empty), depth
    )
    for name, value in variables.items():
        if inspect.isfunction(value) or isinstance(value, partial):
            yield from (f"{name}: {line}" for line in _lines(value, depth + 1))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _numbers(variables: Mapping[str, Any]) -> Iterator[str]:
    # A function may know its process: its rank, its files, its device.
    for name, value in variables.items():
        if isinstance(value, (bool, int, float, complex)) and "rank" not in name.lower():
            yield f"{name}: {value!r}"


def _variables(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _code(code: CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {[_constant(one) for one in code.co_consts]}"


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _source(kind: type) -> str:
    """Returns a digest of the code of a user's class."""
    functions = [one for one in vars(kind).values() if inspect.isfunction(one)]
    own = sorted(_code(one.__code__) for one in functions if is_users_file(one.__code__.co_filename))
    return f"code {_digest(str(own))}" if own else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def describe_model(model: nn.Module) -> str:
    """Returns its modules with their code and options, and its parameters with shapes."""
    lines = [f"{name or 'model'}: {_own_text(module)}" for name, module in model.named_modules()]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lines += [
        f"{name}: {tuple(tensor.shape)} {tensor.dtype}, trained: {tensor.requires_grad}" for name, tensor in tensors
    ]
    return "\n".join(lines)


def _own_text(module: nn.Module) -> str:
    kind = type(module)
    variables = {name: value for name, value in vars(module).items() if name != "training" and name[0] != "_"}
    texts = [f"{name}: {value!r}" for name, value in variables.items() if isinstance(value, str)]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    own = [] if file is None or is_users_file(file) else texts  # a user's may name files
    options = ", ".join(filter(None, [_ADDRESS.sub("", module.extra_repr()), *_numbers(variables), *own]))
    return f"{kind.__qualname__}({options}) {_source(kind)}".rstrip()


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Returns its class, and the numbers of its groups."""
    groups = [
        f"group {number}: {', '.join(f'{k}={text_of(v)}' for k, v in group.items() if k != 'params')}"
        f" for {len(group['params'])} parameters"
        for number, group in enumerate(optimizer.param_groups)
    ]
    return "\n".join([type(optimizer).__qualname__, *groups])


def describe_data(loader: Any) -> str:
    """Returns a loader's class and sizes, as far as it knows them."""
    parts = [type(loader).__qualname__]
    for name, value in (("batches", loader), ("samples", getattr(loader, "dataset", None))):
        try:
            parts.append(f"{len(value)} {name}")  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, AttributeError):
            continue
    for name in ("batch_size", "drop_last"):
        if hasattr(loader, name):
            parts.append(f"{name}={getattr(loader, name)}")
    sampler = getattr(loader, "sampler", None)
    return ", ".join([*parts, *[type(sampler).__qualname__] * (sampler is not None)])
