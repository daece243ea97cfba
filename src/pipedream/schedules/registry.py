"""Finds a method by its name, and builds its schedule.

The path of a user's file of methods works wherever a method's name does. Such a file ends like those of the library:
``METHODS = (kit.Method(two_by_two),)``.

Options of a method are the keyword-only parameters of its builder: keyword arguments in Python, brackets after the name
in text. Annotations determine how text is read: ``str``, ``int``, ``float``, ``bool`` (true, false), a tuple of one of
these (``horizons=3/2/1``), or None (``none``).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pipedream.core.door import run_file
from pipedream.core.errors import PipelineError, ScheduleError
from pipedream.core.extensions import import_methods
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.method_text import name_and_options
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.user_code import with_place
from pipedream.schedules.files import is_schedule_file, load_schedule
from pipedream.schedules.kit.method import Method, StageOrder

_SCALARS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "none"}


def options_of(method: Method) -> dict[str, inspect.Parameter]:
    """Returns the options of a method, with evaluated annotations."""
    try:
        parameters = inspect.signature(method.build, eval_str=True).parameters
    except NameError as error:
        raise ScheduleError(
            f"the annotations of method {method.name!r} cannot be evaluated ({error}); import that name in its file"
        ) from None
    return {
        name: parameter for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def read_options(name: str, method: Method, texts: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a method that differ from their defaults, in the order of its signature.

    Args:
        texts: options after the name.
        values: keyword arguments.

    Raises:
        ScheduleError: there is no such option, it is given twice, or its value has the wrong type.
    """
    if not texts and not values:
        return {}  # a user's builder may be any callable, even one without a signature
    parameters = options_of(method)
    for option in (*texts, *values):
        if option not in parameters:
            has = f"it has {', '.join(parameters)}" if parameters else "it has none"
            raise ScheduleError(f"schedule {name!r}: method {method.name!r} has no option {option!r}; {has}")
        if option in texts and option in values:
            raise ScheduleError(
                f"schedule {name!r}: option {option} is given in the name and as a keyword argument; give it once"
            )
    options = {}
    for option, parameter in parameters.items():
        if option in texts:
            options[option] = _parse_option(name, parameter, texts[option])
        elif option in values:
            options[option] = _check_option(name, parameter, values[option])
    return {option: value for option, value in options.items() if value != parameters[option].default}


def format_options(values: Mapping[str, Any]) -> str:
    """Returns options as text, with brackets; '' for no options."""
    return f"[{','.join(f'{option}={_format_value(value)}' for option, value in values.items())}]" if values else ""


def _parse_option(name: str, option: inspect.Parameter, text: str) -> Any:
    kinds = _list_kinds(name, option)
    if NoneType in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        item_type = _find_item_type(kind)
        parse = _SCALARS.get(item_type or kind)
        if parse is None:
            continue
        try:
            return tuple(map(parse, text.split("/"))) if item_type else parse(text)
        except (ValueError, KeyError):
            continue
    raise ScheduleError(
        f"schedule {name!r}: option {option.name} is of type {_format_type(option)}, found {text!r}; give "
        f"{_describe_kinds(kinds)}"
    )


def _check_option(name: str, option: inspect.Parameter, value: Any) -> Any:
    """Returns an option's value, which needs a text form for plans and checkpoints."""
    text = _format_value(value)
    try:
        _, ((_, option_text),) = name_and_options(f"name[{option.name}={text}]")
    except (ScheduleError, ValueError):
        raise ScheduleError(
            f"schedule {name!r}: option {option.name} = {value!r} cannot be written as text, in which plans and "
            "checkpoints name it; give a number, or a word without commas and brackets"
        ) from None
    parsed = _parse_option(name, option, option_text)
    if parsed != value:
        raise ScheduleError(
            f"schedule {name!r}: option {option.name} is of type {_format_type(option)}, found {value!r}; give "
            f"{_describe_kinds(_list_kinds(name, option))}"
        )
    return parsed


def _list_kinds(name: str, option: inspect.Parameter) -> tuple[Any, ...]:
    annotation = option.annotation
    if annotation is inspect.Parameter.empty:
        raise ScheduleError(
            f"schedule {name!r}: option {option.name} has no annotation, so its type is unknown; add one in the "
            "method's file, e.g. share: float = 0.5"
        )
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _find_item_type(kind: Any) -> Any:
    items = get_args(kind)
    return items[0] if get_origin(kind) is tuple and items[1:] == (...,) else None


def _format_type(option: inspect.Parameter) -> str:
    return inspect.formatannotation(option.annotation)


def _describe_kinds(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        item = _find_item_type(kind)
        if item in _SCALARS:
            words.append(f"{'numbers' if item in (int, float) else 'values'} separated by /")
        elif kind in _WORDS:
            words.append(_WORDS[kind])
        elif kind is str:
            words.append("a word")
    return " or ".join(words) or "it a default and leave it out: this type has no text form"


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "/".join(map(_format_value, value))
    return f"{value!r}".removesuffix(".0") if isinstance(value, float) else str(value)


def is_method_file(name: str) -> bool:
    """Returns whether a method's name is ``FILE.py``, or ``FILE.py:NAME``, one of several methods."""
    return _split_name(name)[0].lower().endswith(".py")


def load_method(name: str) -> Method:
    """Returns the method of a file; raises ScheduleError if the file fails or does not declare this one method."""
    path, method_name = _split_name(name)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ScheduleError(
            f"the schedule {path} cannot be read ({error}); give a file that declares METHODS"
        ) from None
    methods = _run_file(path, text)
    chosen = [method for method in methods if method_name in ("", method.name)]
    if len(chosen) != 1:
        names = ", ".join(method.name for method in methods) or "none"
        raise ScheduleError(
            f"the schedule {name} should be one method, {path} declares {names}; end it with METHODS = (Method(...),), "
            "and name one of several as FILE.py:NAME"
        )
    return chosen[0]


def _build_by(method: Method, name: str, plan: Plan, microbatches: int | None, options: Mapping[str, Any]) -> Schedule:
    """Returns the schedule that a user's method builds; its errors, and its order's, are reported as the file's."""
    make: Callable[..., Any] = method.build
    with _blaming(name):
        built = make(plan, microbatches, **options)
    if not isinstance(built, Schedule):
        raise ScheduleError(f"the schedule {name} returned {built!r}, not a Schedule; fix the file")

    def order(rank: int) -> Iterator[Op]:
        with _blaming(name):
            for op in built.order(rank):
                if not isinstance(op, Op):
                    raise ScheduleError(f"the schedule {name} yielded {op!r} in its order, not an Op; fix the file")
                yield op

    return replace(built, order=order)


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        raise ScheduleError(f"the schedule {name} failed with {with_place(error)}; fix the file") from error


def _split_name(name: str) -> tuple[str, str]:
    path, mark, method_name = name.rpartition(":")
    return (path, method_name) if mark and path.lower().endswith(".py") else (name, "")


def _run_file(path: str, text: bytes) -> tuple[Method, ...]:
    """Returns the methods that a file declares."""
    methods = getattr(run_file(path, text, "schedule", ScheduleError), "METHODS", ())
    if not isinstance(methods, tuple) or not all(isinstance(method, Method) for method in methods):
        raise ScheduleError(f"METHODS of {path} must be a tuple of Method, found {methods!r}")
    return methods


def _collect_methods() -> dict[str, Method]:
    """Returns the methods of all files, those of older papers first."""
    methods = [method for module in import_methods() for method in getattr(module, "METHODS", ())]
    return {method.name: method for method in sorted(methods, key=lambda method: (method.since, method.name))}


METHODS = _collect_methods()

Build = Callable[[Plan, int | None], Schedule]

SCHEDULES: dict[str, Build] = {name: method.build for name, method in METHODS.items() if not method.compensates}
"""Methods with an order of their own."""

COMPENSATED: dict[str, Build] = {name: method.build for name, method in METHODS.items() if method.compensates}
"""Methods that add a compensation to another method."""

STAGE_ORDERS = {name: method.stage_order for name, method in METHODS.items() if method.stage_order is not None}
"""Methods with several stages per worker -> which worker gets which stage."""

ALIASES = {alias: name for name, method in METHODS.items() for alias in method.aliases}


def build(name: str, plan: Plan, microbatches: int | None = None, **options: Any) -> Schedule:
    """Returns a method's schedule for a plan, e.g. ``build("pb_lwp", plan, by="difference", scale=2)``.

    Args:
        name: in any case, with ``-`` or ``_``; or a file: in PyTorch's notation (`.csv`) or ``.py``. Options may
            follow: ``pb_lwp[by=difference,scale=2]``.
        microbatches: m, the parts of a minibatch; None for the method's own choice.

    Raises:
        ScheduleError: there is no such method or option, or it does not work with this plan or number.

    The schedule's name is `canonical`, from which it can be built again.
    """
    if microbatches is not None and microbatches < 1:
        raise ScheduleError(f"a minibatch is split into at least 1 microbatch, found {microbatches}")
    if is_schedule_file(name) and not options:
        loaded = load_schedule(name, plan)
        if microbatches not in (None, loaded.microbatches):
            raise ScheduleError(
                f"schedule {name!r} with {microbatches} microbatches a minibatch: the file has {loaded.microbatches}; "
                "leave the number out, or write the file for as many"
            )
        return loaded
    method_name, method, values = _resolve(name, options)
    full_name = method_name + format_options(values)
    if is_method_file(method_name):
        return replace(_build_by(method, full_name, plan, microbatches, values), name=full_name)
    make: Callable[..., Schedule] = method.build
    try:
        built = make(plan, microbatches, **values)
    except ScheduleError:
        raise
    except ValueError as error:  # e.g. of a weight rule
        raise ScheduleError(f"schedule {full_name!r}: {error}") from None
    return replace(built, name=full_name) if values else built


def canonical(name: str, **options: Any) -> str:
    """Returns the unique name of a method: no alias, and with the options that differ from their defaults.

    It is the text that every ``schedule=`` takes: ``canonical("pb_lwp", by="difference", scale=2)``.

    Raises:
        ScheduleError: there is no such method or option.
    """
    if is_schedule_file(name) and not options:
        return name
    method_name, _, values = _resolve(name, options)
    return method_name + format_options(values)


def stage_order_of(name: str) -> StageOrder | None:
    """Returns a method's order of stages; None for one stage per worker, or for a file that has its own."""
    if is_schedule_file(name):
        return None
    return method_of(name).stage_order


def check_chunks(name: str, chunks: int | None) -> None:
    """Raises ScheduleError if a method cannot run with this number of stages per worker."""
    stage_order = stage_order_of(name)
    if chunks is None or (stage_order is not None and stage_order.chunks is not None):
        return
    if chunks == 1 and stage_order is None and not is_schedule_file(name):
        return
    reason = "its workers have one stage each" if stage_order is None else f"it needs {stage_order.words}"
    reason = "the file itself says which stages a worker has" if is_schedule_file(name) else reason
    raise ScheduleError(f"schedule {name!r} with {chunks} chunks per worker: {reason}; leave the number out")


def method_of(name: str) -> Method:
    """Returns the method of a name or a user's file, ignoring options; raises ScheduleError if it does not exist."""
    method_name, options = name_and_options(name)
    if options and is_schedule_file(method_name):
        raise ScheduleError(f"schedule {name!r}: a file in PyTorch's notation has no options; leave the brackets out")
    if is_method_file(method_name):
        return load_method(method_name)
    key = method_name.lower().replace("-", "_")
    method = METHODS.get(ALIASES.get(key, key))
    if method is None:
        if similar := get_close_matches(key, METHODS, n=1):  # not after a list of all, where nobody finds it
            raise ScheduleError(
                f"schedule {name!r} is not known; did you mean {similar[0]}? 'pipedream show' lists all"
            )
        notation = "FILE.csv in PyTorch's notation, or " if is_schedule_file("FILE.csv") else ""
        raise ScheduleError(
            f"schedule {name!r} is not known; choose one of {', '.join(sorted(METHODS))}, or give a file: "
            f"{notation}FILE.py that declares METHODS"
        )
    return method


def refuse_code(name: str, source: str) -> None:
    """Raises ScheduleError if a plan or a checkpoint names a Python file as its method: data never runs code.

    Args:
        name: a method's name, a file, or an empty text.
        source: the file or entry point that names it.
    """
    if name and is_method_file(name_and_options(name)[0]):
        raise ScheduleError(
            f"{source} names the method {name!r}, a Python file, which is not run because a plan or a checkpoint names "
            f"it; read the file and, if you trust it, name it yourself: --schedule {name!r} on the command line, "
            f"schedule={name!r} in Python"
        )


def _resolve(name: str, options: dict[str, Any]) -> tuple[str, Method, dict[str, Any]]:
    """Returns the method's own name (or its file's), the method, and its changed options."""
    if is_schedule_file(name):
        raise ScheduleError(f"schedule {name!r}: a file in PyTorch's notation has no options; leave them out")
    method, (method_name, texts) = method_of(name), name_and_options(name)
    values = read_options(name, method, dict(texts), options)
    return method_name if is_method_file(method_name) else method.name, method, values
