"""Follows calls of ``set_epoch`` by the user's loop, while a pipeline reads ahead of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import walk_stack
from types import MethodType
from typing import Any, Protocol, runtime_checkable

from pipedream.core.errors import PipelineError
from pipedream.runtime.data.epochs import NUMBERS, list_counting
from pipedream.runtime.data.generators import find_values

_READERS = ("reader", "sharded_reader")  # modules


@runtime_checkable
class _Counting(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


@contextmanager
def watching_epochs(
    loader: Any,
    position: Callable[[], tuple[int, int]],
    begun: Callable[[], int],
    report: Callable[[PipelineError], PipelineError],
) -> Iterator[None]:
    """Context in which a call of ``set_epoch`` by the user's loop or callback is followed, or raises a PipelineError.

    Args:
        position: of the loop: its epoch, and the minibatches done of that.
        begun: returns the last epoch that the loader has begun, which may be ahead.
        report: sends an error to other ranks, and returns it.
    """
    parts, roots = dict[int, Any](), {"": loader}
    while roots:
        inner = [part for part in find_values(roots, (_Counting,), parts).values() if hasattr(type(part), "set_epoch")]
        parts |= {id(part): part for part in inner}
        roots = {f"{id(part)}.{name}": item for part in inner for name, item in getattr(part, "__dict__", {}).items()}
    for part in parts.values():
        with suppress(AttributeError, TypeError):
            part.set_epoch = _SetEpoch(part, loader, position, begun, report)
    try:
        yield
    finally:
        for part in parts.values():
            with suppress(AttributeError):
                del part.set_epoch


class _SetEpoch:
    """Replaces the ``set_epoch`` of a sampler or data set while a train runs."""

    def __init__(self, part: Any, loader: Any, position: Any, begun: Any, report: Any) -> None:
        self._part, self._loader, self._position, self._begun, self._report = part, loader, position, begun, report
        self._last = getattr(part, "epoch", None)

    def __reduce__(self) -> tuple[Any, ...]:  # for processes that load
        return _bind, (type(self._part).set_epoch, self._part)

    def __call__(self, epoch: int) -> None:
        modules = [frame.f_globals.get("__name__", "").split(".") for frame, _ in walk_stack(None)]
        if not any(path[0] == "pipedream" and path[-1] in _READERS for path in modules):
            following, batches = self._position()
            current = following if batches else following - 1
            is_counted = any(self._part is part for part in list_counting(self._loader))
            above = NUMBERS.get(self._loader, (0, 0))[1] if is_counted else 0
            if batches or self._begun() >= following:
                if epoch not in ((current + above, current + 1 + above) if is_counted else (self._last,)):
                    text = (
                        f"set_epoch({epoch}) of a {type(self._part).__name__} comes too late: a pipeline reads ahead "
                        f"of its loop, and has begun epoch {self._begun()} with another number; train one epoch at a "
                        "time: set_epoch(...), then for done in pipeline.train(loader)"
                    )
                    raise self._report(PipelineError(text))
                return
            if is_counted:
                NUMBERS[self._loader] = epoch, epoch - following
        self._last = epoch
        type(self._part).set_epoch(self._part, epoch)


def _bind(function: Any, part: Any) -> Any:
    return MethodType(function, part)
