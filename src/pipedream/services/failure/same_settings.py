"""Compares the settings of all ranks, as texts, before training.

The texts leave out what may differ: names of devices and files, texts and objects in a function's variables, a rank's
number.
"""

import hashlib
import inspect
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
from pipedream.core.user_code import elide_middle, is_users_file
from pipedream.runtime.comm.process_group import gather_json
from pipedream.runtime.unguarded import CALL

SAME_CALLS = (
    "every rank must make the same calls: without a condition on the rank around them; what rank 0 alone needs it is "
    "given alone"
)

# An object's address, and the number of a rank's own device.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<=cuda):\d+")
_MAX_DEPTH = 5  # functions in functions


def check_same_settings(settings: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Compares each setting among the ranks that have one of its name; every rank calls it.

    Raises PlanError: names what differs, on which ranks.
    """
    if group is None:
        return
    # Digests first: texts may be long, and seldom differ.
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in settings.items()}
    try:
        rows = [dict(row) for row in gather_json(digests, group)]
    except (TypeError, ValueError):  # another call's text was received
        call = settings.get(CALL, "this call")
        raise PlanError(f"another rank did not make the call of this one, {call}; {SAME_CALLS}") from None
    names = dict.fromkeys(name for row in rows for name in row)
    differing = [name for name in names if len({row[name] for row in rows if name in row}) > 1]
    if not differing:
        return
    if CALL in differing:  # other settings differ because the calls do
        differing = [CALL]
    own_texts = {name: settings[name] for name in differing if name in settings}
    texts = gather_json(own_texts, group)
    differences = "; ".join(
        _describe_difference(name, [(rank, row[name]) for rank, row in enumerate(texts) if name in row])
        for name in differing
    )
    if CALL in differing:
        raise PlanError(f"the ranks differ in {differences}; {SAME_CALLS}")
    raise PlanError(
        f"the ranks train with different settings: {differences}; every rank must run the same script with "
        "the same arguments"
    )


def _describe_difference(name: str, texts: Sequence[tuple[int, str]]) -> str:
    first = texts[0][1]
    other = next(text for _, text in texts if text != first)
    lines = zip_longest(first.splitlines(), other.splitlines(), fillvalue="nothing")
    number = next((i for i, (line, other_line) in enumerate(lines) if line != other_line), 0)
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        line = [*text.splitlines(), *["nothing"] * (number + 1)][number]
        ranks.setdefault(elide_middle(line.strip()), []).append(rank)
    where = "; ".join(f"{line} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}" for line, who in ranks.items())
    return f"{name} ({where})"


def describe_value(value: Any) -> str:
    """Returns a text that is equal for equal options, functions and objects in processes that run the same code."""
    return "\n".join(_describe(value, 0))


def _describe(value: Any, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, partial):
        yield from _describe(value.func, depth)
        for item in value.args:
            yield from _describe(item, depth + 1)
        yield from _describe_items(value.keywords.items(), depth)
    elif isinstance(value, torch.Tensor):
        is_small = not value.is_meta and value.numel() <= 1 << 16
        yield f"tensor {tuple(value.shape)} {value.dtype} {_compute_digest(str(value.tolist())) if is_small else ''}"
    elif isinstance(value, nn.Module):
        yield from describe_model(value).splitlines()
        yield from _describe_items(value.named_buffers(), depth)
    elif isinstance(value, Mapping):
        yield from _describe_items(value.items(), depth)
    elif isinstance(value, (list, tuple, set, frozenset)):
        # A set's own order differs from process to process, as the hashes of texts do.
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            yield from _describe(item, depth + 1)
    elif inspect.ismethod(value):
        yield from _describe(value.__func__, depth)
        yield from _describe_numbers(_read_variables(value.__self__))
    elif inspect.isfunction(value):
        yield from _describe_function(value, depth)
    elif isinstance(value, type):
        yield f"{value.__qualname__} {_describe_source(value)}".rstrip()
    elif callable(value) and hasattr(value, "__dict__"):
        yield f"{getattr(value, '__qualname__', type(value).__qualname__)} {_describe_source(type(value))}".rstrip()
        yield from _describe_numbers(_read_variables(value))
    else:
        yield _ADDRESS.sub("", repr(value))


def _describe_items(items: Iterable[tuple[Any, Any]], depth: int) -> Iterator[str]:
    for name, value in items:
        yield f"{name}: {', '.join(_describe(value, depth + 1))}"


def _describe_function(function: Callable[..., Any], depth: int) -> Iterator[str]:
    code = function.__code__
    if not is_users_file(code.co_filename):  # a library's name says enough
        yield function.__qualname__
        return
    yield f"{function.__qualname__}, code {_compute_digest(_describe_code(code))}"
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    globals_read = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    variables = globals_read | closure
    yield from _describe_numbers(variables)
    defaults = {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}
    yield from _describe_items(
        ((name, value) for name, value in defaults.items() if value is not inspect.Parameter.empty), depth
    )
    for name, value in variables.items():
        if inspect.isfunction(value) or isinstance(value, partial):
            yield from (f"{name}: {line}" for line in _describe(value, depth + 1))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # empty: its variable has no value yet
        return False


def _describe_numbers(variables: Mapping[str, Any]) -> Iterator[str]:
    # Only numbers: a function's other variables may depend on its process, such as files and devices.
    for name, value in variables.items():
        if isinstance(value, (bool, int, float, complex)) and "rank" not in name.lower():
            yield f"{name}: {value!r}"


def _read_variables(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _describe_code(code: CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {[_describe_constant(constant) for constant in code.co_consts]}"


def _describe_constant(value: Any) -> str:
    if isinstance(value, CodeType):  # its repr has an address
        return _describe_code(value)
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _describe_source(kind: type) -> str:
    """Returns a digest of the code of a user's class."""
    # Unwrapped, because the first instance of an optimizer wraps the `step` of its class.
    functions = [inspect.unwrap(member) for member in vars(kind).values() if inspect.isfunction(member)]
    codes = sorted(
        _describe_code(function.__code__) for function in functions if is_users_file(function.__code__.co_filename)
    )
    return f"code {_compute_digest(str(codes))}" if codes else ""


def _compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def describe_model(model: nn.Module) -> str:
    """Returns a text with the model's modules, their code and options, and its parameters with shapes."""
    lines = [f"{name or 'model'}: {_describe_module(module)}" for name, module in model.named_modules()]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lines += [
        f"{name}: {tuple(tensor.shape)} {tensor.dtype}, trained: {tensor.requires_grad}" for name, tensor in tensors
    ]
    return "\n".join(lines)


def _describe_module(module: nn.Module) -> str:
    kind = type(module)
    variables = {name: value for name, value in vars(module).items() if name != "training" and name[0] != "_"}
    texts = [f"{name}: {value!r}" for name, value in variables.items() if isinstance(value, str)]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    public_texts = [] if file is None or is_users_file(file) else texts  # a user's texts may be names of files
    options = ", ".join(
        filter(None, [_ADDRESS.sub("", module.extra_repr()), *_describe_numbers(variables), *public_texts])
    )
    return f"{kind.__qualname__}({options}) {_describe_source(kind)}".rstrip()


def describe_setting(value: Any) -> str:
    """Returns a text that is equal for equal texts, optimizers and loaders of all ranks."""
    if isinstance(value, str):
        return value
    return describe_optimizer(value) if isinstance(value, torch.optim.Optimizer) else describe_data(value)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Returns a text with the optimizer's class and the options of its groups."""
    groups = [
        f"group {number}: {', '.join(f'{k}={describe_value(v)}' for k, v in group.items() if k != 'params')}"
        f" for {len(group['params'])} parameters"
        for number, group in enumerate(optimizer.param_groups)
    ]
    return "\n".join([type(optimizer).__qualname__, *groups])


def describe_data(loader: Any) -> str:
    """Returns a text with a loader's class and its known sizes."""
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
