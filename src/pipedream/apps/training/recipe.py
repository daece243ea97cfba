"""A recipe: a Python file with a function that returns model, loss, optimizer and loaders.

    def recipe(seed: int = 0) -> pipedream.Recipe:
        return pipedream.Recipe(model=..., loss=..., optimizer=..., train=..., test=...)

    if __name__ == "__main__":
        pipedream.run(recipe)

It is trained by ``pipedream train file.py``, by ``python file.py`` (all workers in one process) and by
``torchrun file.py``. To run a recipe is to run its code.
"""

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from typing import Any

from pipedream.core.cold import busy_wait_cold_cache
from pipedream.core.errors import PipelineError, RecipeError, ScheduleError, install_advice
from pipedream.core.user_code import with_place
from pipedream.options import ModelOptions, optimizer_problems

_LOADS = 5  # batches made to time the loader


@dataclass(frozen=True)
class Recipe(ModelOptions):
    """Model, data and their options (`ModelOptions`).

    Attributes:
        model: any module (docs/models.md).
        loss: ``loss(output, batch)``, one of torch's own, or None if the model's output carries ``.loss``.
        optimizer: factory from a list of (name, parameter) to an optimizer.
        train: loader of training batches; iterated once per epoch.
        test: loader of batches to evaluate.
        epochs: unless the run chooses.
        target: (metric, value); the seconds until it is reached are reported. For 'loss', lower is better.
        name: by default that of its file.
        source: the text of its file, which must be the same on all ranks; '' if there is none.

    Raises:
        RecipeError: names all fields that cannot be trained with.
    """

    model: Any
    loss: Any
    optimizer: Callable[[list[tuple[str, Any]]], Any]
    train: Iterable[Any]
    test: Iterable[Any] | None = None
    epochs: int = field(default=1, kw_only=True)
    target: tuple[str, float] | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)
    source: str = field(default="", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        wrong = [*self._find_problems(), *self.problems()]
        try:
            self.policy()
        except ScheduleError as error:
            wrong.append(str(error))
        if wrong:
            raise RecipeError(f"the recipe cannot be trained: {'; '.join(wrong)}; see pipedream.Recipe")

    def _find_problems(self) -> Iterator[str]:
        yield from optimizer_problems(self.optimizer)
        if self.loss is not None and not callable(self.loss):
            yield "loss cannot be called; it is loss(output, batch), or None if the output carries .loss"
        if not (hasattr(self.model, "named_parameters") and callable(self.model)):
            yield f"model is a {type(self.model).__name__}, not a torch.nn.Module"
        for name, loader in (("train", self.train), ("test", self.test if self.test is not None else ())):
            if isinstance(loader, (str, bytes)) or not hasattr(loader, "__iter__"):
                yield f"{name} is a {type(loader).__name__}, not a loader of batches"
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            yield f"epochs is {self.epochs!r}, not a whole number from 1 on"
        match self.target:
            case None | (str(), int() | float()):
                pass
            case _:
                yield f"target is {self.target!r}, not a pair (metric, value)"
        for name, text in (("name", self.name), ("source", self.source)):
            if not isinstance(text, str):
                yield f"{name} is {text!r}, not a text"

    def first_batch(self) -> Any:
        """Returns a training batch without changing the order of the data."""
        from pipedream.runtime.data.rng import preserved_rng  # describing a recipe should not load torch

        with preserved_rng(self.train):
            if (make := self._find_maker()) is not None:
                return make()
            batch = next(iter(self.train), None)
        if batch is None:
            raise RecipeError("the recipe's training loader yields nothing; give one with at least one batch")
        return batch

    def load_s(self) -> float:
        """Returns the seconds that a batch takes to load; 0 if unknown, or if the loader has worker processes."""
        from pipedream.runtime.data.rng import preserved_rng

        if getattr(self.train, "num_workers", 0) or (make := self._find_maker()) is None:
            return 0.0
        seconds = []
        with preserved_rng(self.train):
            for _ in range(_LOADS):
                busy_wait_cold_cache()
                start = time.perf_counter()
                make()
                seconds.append(time.perf_counter() - start)
        return median(seconds)

    def _find_maker(self) -> Callable[[], Any] | None:
        """Returns how a map-style DataLoader makes its first batch, without its sampler."""
        loader: Any = self.train
        dataset: Any = getattr(loader, "dataset", None)
        collate = getattr(loader, "collate_fn", None)
        size = getattr(loader, "batch_size", None)
        if size and collate is not None and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return lambda: collate([dataset[i] for i in range(min(size, len(dataset)))])
        return None


def check_recipe_file(path: str) -> Path:
    """Returns the path of a recipe's file, which is read but not run.

    Raises:
        RecipeError: no such file, or no Python.
    """
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"the recipe {path} does not exist; give the path of a Python file with a function recipe()")
    if file.suffix != ".py":
        raise RecipeError(f"the recipe {path} is not a Python file; give one that ends in .py")
    with blaming(f"the recipe {path} does not import"):
        compile(file.read_bytes(), file, "exec", dont_inherit=True)
    return file


def load_recipe(path: str, *, seed: int = 0) -> Recipe:
    """Imports a recipe's file and calls its function, with `seed` if it takes one.

    Raises:
        RecipeError: no such file, it does not import, or the function is missing, fails or returns something else.
    """
    file = check_recipe_file(path)
    spec = spec_from_file_location(f"recipe_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None, "the suffix has one"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # so that pickle finds what the recipe defines
    sys.path.insert(0, str(file.resolve().parent))
    try:
        with blaming(f"the recipe {path} does not import", passes=()):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    make = getattr(module, "recipe", None)
    if not callable(make):
        raise RecipeError(f"the recipe {path} has no function recipe(); define one that returns a pipedream.Recipe")
    return replace(make_recipe(make, seed=seed, name=file.stem), source=file.read_bytes().decode())


def make_recipe(make: Callable[..., Any], *, seed: int = 0, name: str = "") -> Recipe:
    """Calls a recipe's function, with ``seed=`` if it takes one; names a recipe without a name.

    Raises:
        RecipeError: it fails, or does not return a Recipe.
    """
    takes_seed = "seed" in inspect.signature(make).parameters
    function = getattr(make, "__name__", repr(make))  # a partial function has no name
    with blaming(f"the recipe's function {function}() failed", passes=(RecipeError,)):
        recipe = make(seed=seed) if takes_seed else make()
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"the recipe's function {function}() returned a {type(recipe).__name__}; return a pipedream.Recipe"
        )
    file = Path(getattr(getattr(make, "__code__", None), "co_filename", ""))
    source = file.read_bytes().decode() if file.is_file() else ""
    return replace(
        recipe, name=recipe.name or name or (file.stem if source else "recipe"), source=recipe.source or source
    )


@contextmanager
def blaming(what: str, passes: tuple[type[PipelineError], ...] = (PipelineError,)) -> Iterator[None]:
    """Turns an exception of the recipe's code into a `RecipeError` that says what failed, and where.

    `passes`: errors that say enough.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (*passes, KeyboardInterrupt, GeneratorExit)):
            raise
        raise RecipeError(f"{what}: {with_place(error)}{install_advice(error)}") from error
