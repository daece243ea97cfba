"""Options declared once: a command's flags come from the fields of dataclasses and from its own parameters."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.main import get_command

from pipedream import cli
from pipedream.cli.flags import as_command
from pipedream.core.flags import argument, flag_of, option, option_of
from pipedream.options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Two options and a field without a flag."""

    rate: float = option(0.5, "Rate.", "--learning-rate", metavar="R", least=0.0, panel="Training")
    names: tuple[str, ...] = option((), "Names.", kind=list[str], read=tuple)
    source: Any = None


def run(words: str) -> dict[str, Any]:
    """Returns what a command gets for these words."""
    received: dict[str, Any] = {}

    def command(
        *,
        file: str = argument("FILE", "File."),
        options: Options,
        is_loud: bool = option(False, "Be loud."),
        slow_rate: float = option_of(Options, "rate", default=0.1, names=()),
    ) -> None:
        """Do it."""
        received.update(file=file, options=options, is_loud=is_loud, slow_rate=slow_rate)

    app = typer.Typer(add_completion=False)
    app.command()(as_command(command))
    get_command(app)(words.split(), standalone_mode=False)
    return received


def test_values_and_defaults_reach_their_dataclass() -> None:
    assert run("a.txt") == {"file": "a.txt", "options": Options(), "is_loud": False, "slow_rate": 0.1}
    expected = Options(rate=2.0, names=("x", "y"))
    received = run("a.txt --learning-rate 2 --names x --names y --is-loud --slow-rate 3")
    assert received == {"file": "a.txt", "options": expected, "is_loud": True, "slow_rate": 3.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "Missing parameter: file"),
        ("a.txt --learning-rate -1", "greater than or equal to 0"),
        ("a.txt --no-is-loud", "No such option: --no-is-loud"),
    ],
)
def test_wrong_calls(words: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        run(words)


def test_train_has_a_flag_for_each_training_option() -> None:
    """Of the others it takes files, flags of shape and links, or --json."""
    flags = {param.name for param in cli.load("train").params}
    without = {field.name for field in dataclasses.fields(TrainingOptions) if flag_of(field) is None}
    assert without == {"plan", "shape", "cluster", "memory_bytes", "quiet"}
    assert {field.name for field in dataclasses.fields(TrainingOptions)} - without <= flags
