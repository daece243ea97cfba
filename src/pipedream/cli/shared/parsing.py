"""Parses what typer does not: options with several values, options that have moved."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from typer.core import TyperCommand

from pipedream.core.errors import PlanError
from pipedream.core.flags import Panel

_RATE = r"[0-9.]+([eE][-+]?\d+)?([kKmMgGtT]?(bit|[bB])(/s|ps)?)?"


class OptionParser(TyperCommand):
    """A command whose lists may be written ``--workers 4 4``, ``--workers 4,4``, or with the option repeated.

    A file named by a number must come before such an option.
    """

    _LISTS: ClassVar = {
        "--workers": r"[\d+]+(,[\d+]+)*",
        "--bandwidth": rf"{_RATE}(,{_RATE})*",
    }
    _MOVED: ClassVar[dict[tuple[str | None, str], str]] = {
        ("plan", "--check"): "pipedream check PLAN --profile PROFILE",
        ("plan", "--sweep"): "pipedream sweep PROFILE --workers 2,4,8 --bandwidth 1e8,1e9",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes the option's name before each of its values."""
        for word in args:
            if moved := self._MOVED.get((self.name, word.partition("=")[0])):
                raise PlanError(f"{word} is a command of its own now; write {moved}")
        lists = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        lists &= set(self._LISTS)
        words: list[str] = []
        option = ""
        for word in args:
            if option and words[-1] != option and re.fullmatch(self._LISTS[option], word):
                words.append(option)
            elif not option or words[-1] != option:
                name = word.partition("=")[0]
                option = name if name in lists else ""
                if option and word != name:
                    words += [option, word.partition("=")[2]]
                    continue
            words.append(word)
        return list(super().parse_args(ctx, words))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {panel: [] for panel in Panel}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                usual = Panel.ARGUMENTS if param.param_type_name == "argument" else Panel.OPTIONS
                name, text = record
                text = re.sub(
                    r"\[default: \((.*?)\)", r"[default: \1", text
                )  # typer puts a default in words in brackets
                if "|" in name:  # the choices say the range
                    text = re.sub(r"; \d+<=x<=\d+\]", "]", text)
                sections.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append((name, text))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
