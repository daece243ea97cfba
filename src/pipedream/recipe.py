"""A recipe: a user's file that says what to train. One function returns model, loss, optimizer and loaders.

    def recipe(seed: int = 0) -> pipedream.Recipe:
        return pipedream.Recipe(model=..., loss=..., optimizer=..., train=..., test=...)

    if __name__ == "__main__":
        pipedream.run(recipe)

The same file is trained by ``pipedream train file.py``, by plain ``python file.py`` (all workers in one
process) and by ``torchrun file.py``. A recipe is a program: whoever runs it runs its code.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from pipedream.core.errors import PipelineError, RecipeError
from pipedream.core.schedule.coupling import CLIP, MOST
from pipedream.core.schedule.phase import Phase

__all__ = ["Recipe", "blaming", "load_recipe", "make_recipe"]


@dataclass
class Recipe:
    """What to train. The fields mean what they mean in `Pipeline`.

    Attributes:
        model: a chain of modules.
        loss: ``loss(output, batch)``, or one of torch's own.
        optimizer: factory from a list of (name, parameter) to an optimizer.
        train: loader of the training batches; iterated once an epoch.
        test: loader of the batches that the result is measured on.
        metrics: name -> metric(output, batch).
        epochs: how many, unless the command line says.
        target: (metric, value) to be reached; the seconds until then are reported. For 'loss', lower is better.
        sample: the model's input for one minibatch, for the profile; by default the first training batch's.
        inputs, targets, weight, scheduler, clip_grad_norm, clip, ema, autocast, compensation, on_nan, grad_scaler: see
            `Pipeline`; a compensation is for the methods that do not flush.
        phases: see `Pipeline`; () for one method. Taken unless a schedule or phases are said elsewhere; beside
            them no microbatches are said.
        name: of the recipe; by default the file's.
    """

    model: Any
    loss: Any
    optimizer: Callable[[list[tuple[str, Any]]], Any]
    train: Iterable[Any]
    test: Iterable[Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    epochs: int = 1
    target: tuple[str, float] | None = None
    sample: Any = None
    inputs: Callable[[Any], Any] | None = None
    targets: Callable[[Any], Any] | None = None
    weight: Callable[[Any], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    clip_grad_norm: float | None = None
    clip: str = "global"
    ema: float | None = None
    autocast: Any = None
    compensation: Any = None
    on_nan: str = "error"
    grad_scaler: Any = None
    phases: str | Sequence[Phase] = ()
    name: str = ""

    def __post_init__(self) -> None:
        callables = ("optimizer", "inputs", "targets", "weight", "scheduler")
        wrong = [f"{name} cannot be called" for name in callables if not _may_be_called(getattr(self, name))]
        if self.optimizer is None:
            wrong.append("optimizer is missing: give a factory, as in partial(torch.optim.SGD, lr=0.1)")
        if not _may_be_called(self.loss):
            wrong.append("loss cannot be called; it is loss(output, batch), or None where the output carries .loss")
        if not (hasattr(self.model, "named_parameters") and callable(self.model)):
            wrong.append(f"model is a {type(self.model).__name__}, not a torch.nn.Module")
        for name in ("train", "test"):
            loader = getattr(self, name)
            if isinstance(loader, (str, bytes)) or not (
                hasattr(loader, "__iter__") or (name, loader) == ("test", None)
            ):
                wrong.append(f"{name} is a {type(loader).__name__}, not a loader of batches")
        if not isinstance(self.metrics, Mapping) or not all(callable(metric) for metric in self.metrics.values()):
            wrong.append("metrics is not a dict of functions metric(output, batch)")
        wrong += [f"{name} is {getattr(self, name)!r}, {rule}" for name, rule in self._out_of_range()]
        if wrong:
            raise RecipeError(f"the recipe cannot be trained: {'; '.join(wrong)}; see pipedream.Recipe")

    def _out_of_range(self) -> Iterator[tuple[str, str]]:
        """Yields the fields whose value makes no sense, with what they should be."""
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            yield "epochs", "not a whole number from 1 on"
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < most):
                yield name, f"not a number between 0 and {most:g}"
        if self.clip not in CLIP:
            yield "clip", f"none of {', '.join(map(repr, CLIP))}"
        if self.target is not None and not (
            isinstance(self.target, tuple)
            and len(self.target) == 2
            and isinstance(self.target[0], str)
            and isinstance(self.target[1], (int, float))
        ):
            yield "target", "not a pair (metric, value)"
        if not isinstance(self.phases, str) and not (
            isinstance(self.phases, Sequence) and all(isinstance(phase, Phase) for phase in self.phases)
        ):
            yield "phases", "neither a text nor a list of Phase"
        if not isinstance(self.name, str):
            yield "name", "not a text"

    def first_batch(self) -> Any:
        """Returns a training batch; the order of the data is what it would be without."""
        from pipedream.runtime.data.rng import preserved_rng  # here: a recipe is described without loading torch

        with preserved_rng(self.train):
            return self._first_batch()

    def _first_batch(self) -> Any:
        loader: Any = self.train
        dataset: Any = getattr(loader, "dataset", None)
        collate = getattr(loader, "collate_fn", None)
        size = getattr(loader, "batch_size", None)
        if size and collate is not None and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return collate([dataset[i] for i in range(min(size, len(dataset)))])
        batch = next(iter(loader), None)
        if batch is None:
            raise RecipeError("the recipe's training loader yields nothing; give one with at least one batch")
        return batch


def load_recipe(path: str, *, seed: int = 0, function: str = "recipe") -> Recipe:
    """Imports a recipe's file and calls its function.

    Args:
        path: of the Python file.
        seed: handed to the function, if it takes one.
        function: its name.

    Raises:
        RecipeError: no such file, it does not import, or the function is missing, fails or returns something else.
    """
    file = Path(path)
    if not file.is_file():
        raise RecipeError(
            f"the recipe {path} does not exist; give the path of a Python file with a function {function}()"
        )
    spec = spec_from_file_location(f"recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"the recipe {path} is not a Python file; give one that ends in .py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what the recipe defines can be found by name
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RecipeError(f"the recipe {path} does not import: {_last_words(error)}") from error
    finally:
        sys.path.pop(0)
    make = getattr(module, function, None)
    if not callable(make):
        raise RecipeError(f"the recipe {path} has no function {function}(); define one that returns a pipedream.Recipe")
    return make_recipe(make, seed=seed, name=file.stem)


def make_recipe(make: Callable[..., Any], *, seed: int = 0, name: str = "") -> Recipe:
    """Calls a recipe's function, with ``seed=`` if it takes one.

    Raises:
        RecipeError: it fails, or returns something that is not a Recipe.
    """
    takes_seed = "seed" in inspect.signature(make).parameters
    try:
        made = make(seed=seed) if takes_seed else make()
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"the recipe's function {make.__name__}() failed: {_last_words(error)}") from error
    if not isinstance(made, Recipe):
        raise RecipeError(
            f"the recipe's function {make.__name__}() returned a {type(made).__name__}; return a pipedream.Recipe"
        )
    made.name = made.name or name or Path(inspect.getsourcefile(make) or "recipe").stem
    return made


@contextmanager
def blaming(when: str) -> Iterator[None]:
    """Makes any error of the recipe's own code a `RecipeError` that says where it was.

    Raises:
        RecipeError: what is run inside failed, with none of this library's errors.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        raise RecipeError(f"the recipe failed {when}: {_last_words(error)}") from error


def _may_be_called(value: Any) -> bool:
    return value is None or callable(value)


def _last_words(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
