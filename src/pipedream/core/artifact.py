"""Saves and loads plans, profiles and the like: JSON, checked field by field, with a format number.

An artifact is a frozen dataclass that inherits `Artifact` and sets ``FORMAT``. A file of another kind or format, or
with a wrong field, is refused.
"""

import dataclasses
import enum
import errno
import json
import math
import os
import stat
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from pipedream.core.errors import ArtifactError, PlanError

MAX_TEXT_BYTES = 256_000_000
NOT_STORED = {"json": ""}
"""Metadata of a field that is not saved."""
INLINE = {"json": "*"}
"""Metadata of a dataclass whose fields are saved among those of its holder."""


class Artifact:
    """A dataclass that can be saved and loaded."""

    FORMAT: ClassVar[int] = 1
    DROPPED: ClassVar[frozenset[str]] = frozenset()
    """Fields of older files that no longer mean anything."""

    def to_json(self) -> str:
        head = {"artifact": type(self).__name__, "format": self.FORMAT}
        return json.dumps(head | encode(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> Self:
        """Reads JSON text. Raises ArtifactError: no JSON, another kind or format, or a wrong field."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(
                f"{source} is not JSON ({error}), so it is not {_add_article(cls)}; give the right file"
            ) from None
        if not isinstance(data, dict) or data.get("artifact") != cls.__name__:
            kind = data.get("artifact") if isinstance(data, dict) else type(data).__name__
            raise ArtifactError(f"{source} should hold {_add_article(cls)}, but holds {kind!r}; give the right file")
        if data.get("format") != cls.FORMAT:
            raise ArtifactError(
                f"{source} has {cls.__name__} format {data.get('format')!r}, this library reads format "
                f"{cls.FORMAT}; make it again with this version"
            )
        body = {key: value for key, value in data.items() if key not in ("artifact", "format")}
        try:
            return typing.cast(Self, decode(cls, body, cls.__name__))
        except ArtifactError as error:
            raise ArtifactError(f"{source}: {error}") from None

    @classmethod
    def check_is(cls, value: Any) -> Self:
        """Returns the value. Raises a PlanError if it is not of this class but, say, a file name."""
        if not isinstance(value, cls):
            name = cls.__name__
            is_path = isinstance(value, (str, os.PathLike))
            advice = f"read the file: pipedream.{name}.load({str(value)!r})" if is_path else f"give {_add_article(cls)}"
            raise PlanError(f"expected {_add_article(cls)}, got a {type(value).__name__}; {advice}")
        return value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a file, atomically."""
        return write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file. Raises ArtifactError if there is none, or as `from_json` does."""
        try:
            text = read_text(path)
        except FileNotFoundError:
            raise ArtifactError(f"{path} does not exist; give the file of {_add_article(cls)}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"cannot read the {cls.__name__} in {path}: {error}") from None
        return cls.from_json(text, str(path))


class NamedKind:
    """A dataclass with several kinds, whose JSON names the kind.

    The base class sets ``KEY``, the JSON field for the kind; each concrete kind sets its ``name``.
    """

    KEY: ClassVar[str]
    name: ClassVar[str]
    kinds: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "KEY" in vars(cls):
            cls.kinds = {}
        if "name" in vars(cls):
            cls.kinds[cls.name] = cls

    def encoded(self) -> dict[str, Any]:
        names = (field.name for field in dataclasses.fields(typing.cast(Any, self)))
        return {self.KEY: self.name} | encode_attributes(self, *names)

    @classmethod
    def decoded(cls, value: dict[str, Any], where: str) -> Self:
        """Reads JSON values. Raises an ArtifactError for an unknown kind or a wrong field."""
        kind = cls.kinds.get(str(value.get(cls.KEY)))
        if kind is None:
            raise ArtifactError(f"{where}.{cls.KEY} should be one of {sorted(cls.kinds)}")
        return typing.cast(Self, decode_fields(kind, {k: v for k, v in value.items() if k != cls.KEY}, where))


def read_text(path: str | os.PathLike[str]) -> str:
    """Reads a regular file of at most `MAX_TEXT_BYTES`. Raises OSError or UnicodeDecodeError."""
    check_regular(path)
    if (size := os.stat(path).st_size) > MAX_TEXT_BYTES:
        raise OSError(f"it has {size} bytes; at most {MAX_TEXT_BYTES} are read")
    return Path(path).read_text(encoding="utf-8")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises an OSError for a pipe or a device, whose reading might never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError("it is a pipe or a device; give a regular file")


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a file atomically, by renaming a temporary file beside it."""
    path = Path(path)
    with new_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
    return path


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file to write, which then replaces `path`; makes the folder.

    A device or a pipe, such as ``/dev/null``, is written itself: root's rename would replace it by a file.

    Raises:
        ArtifactError: the file cannot be written; no partial file is left.
    """
    with writing(path):
        if path.exists() and not path.is_file():  # a folder is refused by its writer
            yield path
            return
        path = path.resolve()  # /dev/stdout is a link
        scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")  # containers have equal ids
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
            scratch.replace(path)
        except BaseException:
            with suppress(OSError):
                scratch.unlink()
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an `OSError` into an `ArtifactError` that names the file that could not be written."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free space, or choose a place with more" if is_full else "choose another place"
        reason = f"{error.filename} is a file" if isinstance(error, FileExistsError) else error.strerror or error
        raise ArtifactError(f"cannot write {path}: {reason}; {advice}") from None


def system_error(error: BaseException) -> BaseException:
    """Returns the OSError (a full disk, ...) that caused an error; else the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


def copy_json(value: Any, what: str) -> Any:
    """Returns a copy of a value. Raises an `ArtifactError` if JSON, and so a checkpoint, cannot hold it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"{what} cannot be kept in a checkpoint: {error}; use numbers, texts, lists and dicts"
        ) from None


def encode(value: Any) -> Any:
    """Returns the JSON values of a value; a class may define its own ``encoded``."""
    if hasattr(type(value), "encoded"):
        return value.encoded()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        stored: dict[str, Any] = {}
        for f in _list_stored_fields(value):
            code = encode(getattr(value, f.name))
            stored |= code if _is_inline(f) else {_find_json_name(f): code}
        return stored
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def encode_attributes(value: Any, *names: str) -> dict[str, Any]:
    """Returns the JSON values of some attributes."""
    return {name: encode(getattr(value, name)) for name in names}


def decode(kind: Any, value: Any, where: str) -> Any:
    """Returns a value of an annotated type from JSON; a class may define its own ``decoded``, or ``parse`` a text.

    Raises:
        ArtifactError: a field is missing, unknown, of the wrong type or not finite.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner_kind = next(item for item in arguments if item is not type(None))
        return decode(inner_kind, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {key: decode(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if hasattr(kind, "parse") and isinstance(value, str):
        try:
            return kind.parse(value)
        except PlanError as error:
            raise ArtifactError(f"{where}: {error}") from None
    if hasattr(kind, "decoded"):
        _expect(isinstance(value, dict), where, "an object", value)
        return kind.decoded(value, where)
    if dataclasses.is_dataclass(kind):
        return decode_fields(typing.cast(type, kind), value, where)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        _expect(isinstance(value, list) and len(value) == len(hints), where, f"a list of {len(hints)}", value)
        return kind(*(decode(h, v, f"{where}.{n}") for (n, h), v in zip(hints.items(), value, strict=True)))
    if origin is typing.Literal:
        _expect(value in arguments, where, f"one of {list(arguments)}", value)
        return value
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        choices = [item.value for item in kind]
        _expect(value in choices, where, f"one of {choices}", value)
        return kind(value)
    if kind is float:
        _expect(isinstance(value, (int, float)) and not isinstance(value, bool), where, "a number", value)
        # Larger than any second, byte or rate, and far from overflow.
        _expect(math.isfinite(value) and abs(value) <= 1e60, where, "a number up to 1e60", value)
        return float(value)
    if kind is int:
        _expect(isinstance(value, int) and not isinstance(value, bool), where, "a whole number", value)
        _expect(abs(value) < 1 << 63, where, "a whole number of at most 63 bits", value)
        return value
    if kind is bool and value in (0.0, 1.0):  # a share in older files
        return bool(value)
    _expect(isinstance(value, kind), where, f"a {kind.__name__}", value)
    return value


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), where, "a list", value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    _expect(len(value) == len(arguments), where, f"a list of {len(arguments)}", value)
    return tuple(decode(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(arguments, value, strict=True)))


def decode_fields(kind: type, value: Any, where: str) -> Any:
    """Returns a dataclass from JSON, field by field; see `decode`."""
    _expect(isinstance(value, dict), where, "an object", value)
    hints = typing.get_type_hints(kind)
    for f in filter(_is_inline, _list_stored_fields(kind)):
        names = {_find_json_name(inner) for inner in _list_stored_fields(hints[f.name])}
        inner_values = {name: item for name, item in value.items() if name in names}
        value = {name: item for name, item in value.items() if name not in names} | {INLINE["json"]: inner_values}
    fields = {_find_json_name(f): f for f in _list_stored_fields(kind)}
    dropped: frozenset[str] = getattr(kind, "DROPPED", frozenset())
    value = {name: item for name, item in value.items() if name not in dropped}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ArtifactError(f"{where} has unknown fields {unknown}; it may have {sorted(fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            inner_place = where if _is_inline(field) else f"{where}.{name}"
            arguments[field.name] = decode(hints[field.name], value[name], inner_place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ArtifactError(f"{where} lacks the field {name!r}")
    try:
        return kind(**arguments)
    except (ValueError, TypeError, PlanError) as error:  # PlanError: of a mesh or a layout
        raise ArtifactError(f"{where}: {error}") from None


def _list_stored_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init and field.metadata.get("json") != ""]


def _is_inline(field: dataclasses.Field[Any]) -> bool:
    return field.metadata.get("json") == INLINE["json"]


def _find_json_name(field: dataclasses.Field[Any]) -> str:
    """Returns a field's name in JSON; if the field was renamed, its older name."""
    return str(field.metadata.get("json", field.name))


def _add_article(kind: type) -> str:
    """Returns a class's name with an article, unless it is a plural (Operators)."""
    name = kind.__name__
    return name if name.endswith("s") else f"a{'n' * (name[0] in 'AEIOU')} {name}"


def _expect(condition: bool, where: str, expected: str, value: Any) -> None:
    if not condition:
        shown = repr(value)
        raise ArtifactError(f"{where} should be {expected}, found {shown if len(shown) < 80 else shown[:77] + '...'}")
