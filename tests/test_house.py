"""The rules for all of the code that need running it: the public face, no torch for planning, examples, breaks.

`scripts/check_style.py` has the rules that need only reading it.
"""

import ast
import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from commands import load_script

import pipedream as pd

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pipedream"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
WITHOUT_TORCH = ("core", "planner", "schedules", "verifier", "simulator", "metrics", "report")
WITHOUT_TORCH += (
    "extensions.auto_method",
    "extensions.codecs",
    "extensions.methods",
    "extensions.host_weights.copied_passes",
    "extensions.host_weights.methods",
    "extensions.meshes.planning",
    "extensions.torch_csv",
)
WITHOUT_TORCH += (
    "extensions.compensations.velocity",
    "extensions.reducers.sixteen_bits",
    "extensions.two_bw",
    "extensions.meshes.layouts.description",
    "extensions.meshes.layouts.report",
    "extensions.meshes.layouts.search",
)


def test_planning_and_studying_do_not_load_torch() -> None:
    prefixes = tuple(f"pipedream.{package}." for package in WITHOUT_TORCH)
    modules = [name for name in MODULES if f"{name}.".startswith(prefixes)]
    program = (
        "import importlib, sys\n"
        f"for name in ['pipedream', *{modules!r}]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'importing {name} loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_face_says_each_name_once() -> None:
    """Its three lists (for editors, for star imports, for first use) hold the same names from the same homes."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    checking = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: (node.module or "").removeprefix("pipedream").removeprefix(".")
        for node in checking.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name: homes.pop(name) for name in pd._MODULES}
    assert set(modules.values()) == {""}
    assert homes == pd._HOMES
    assert {*pd.__all__} == {*homes, *modules, "__version__"}
    assert len(pd.__all__) <= 41


def test_face_resolves() -> None:
    for name in pd.__all__:
        value = getattr(pd, name)
        assert getattr(value, "__name__", name).split(".")[-1] == name
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        pd.plam  # noqa: B018


def test_face_shows_what_a_user_needs_and_nothing_else() -> None:
    program = "import pipedream, pipedream.apps.cli, pipedream.workflows.plan; print(*dir(pipedream))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()
    assert shown == sorted(pd.__all__)


def test_examples_in_docstrings() -> None:
    with_examples = [name for name, path in MODULES.items() if ">>> " in path.read_text(encoding="utf-8")]
    assert not [name for name in with_examples if doctest.testmod(import_module(name)).failed]


def test_style_checks_find_what_they_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    style = load_script(ROOT / "scripts" / "check_style.py")
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "PACKAGE", tmp_path)
    path = tmp_path / "core.py"
    rows, calls = ("\n".join(f"        {text}" for _ in range(100)) for text in ("1,", "print()"))
    path.write_text(
        f"""'''A caf\u00e9.'''
import os as _own
class RunManager:
    '''It goes on.'''
def get_table():
    return (
{rows}
    )
def long():
        cuda.synchronize()
{calls}
""",
        encoding="utf-8",
    )
    assert style.split_words("_RunManager.get_IOChunk2") == {"run", "manager", "get", "io", "chunk"}
    source = style.read(path)
    findings = [finding for check in style.FILE_CHECKS for finding in check(source)]
    findings += style.check_phrases({"core.py": source.text})
    findings += style.check_vague_names([source])
    assert [finding.removeprefix("core.py:") for finding in findings] == [
        "109: waits for a whole device, which only measurements may",
        "1: not ASCII",
        "3: docs/glossary.md has a better word than RunManager",
        "5: get_ in get_table says nothing",
        "5: get_table has no docstring",
        "108: long has no docstring",
        f"108: the body of long is over {style.MAX_FUNCTION_LINES} lines",
        r"4: \bgoes on\b, of which 0 may be left",
        "2: _own does not say what it holds",
    ]


def test_the_architecture_page_names_what_exists() -> None:
    """Names in backticks that look like code: files and folders, classes, their members, dotted and called names."""
    sources = [path.read_text(encoding="utf-8") for path in MODULES.values()]
    members: dict[str, set[str]] = {}
    for name, body in re.findall(r"^class (\w+)(.*?)(?=^\S|\Z)", "\n".join(sources), re.M | re.S):
        members.setdefault(name, set()).update(re.findall(r"\w+", body))
    words = set(re.findall(r"\w+", "\n".join(sources)))
    places = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*")}
    for path in PACKAGE.rglob("*"):
        places |= {f"{path.parent.name}/{path.name}", path.name}
    elsewhere = {"FILE.py", "Schedule1F1B._get_pipeline_order", "tests", "benchmarks"}
    page = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), flags=re.S)

    def exists(name: str) -> bool:
        stem, parts = name.rstrip("/"), name.split(".")
        if "/" in name or name.endswith(".py"):
            return stem in places or stem in elsewhere or (ROOT / stem).exists()
        return parts[1] in members.get(parts[0], ()) if name[0].isupper() and parts[1:] else words.issuperset(parts)

    names = set(re.findall(r"`([A-Za-z_][\w./]*)(?:\(\))?`", page)) - elsewhere
    assert not [name for name in sorted(names) if not exists(name)], "docs/architecture.md names what does not exist"


def test_deliberate_breaks_are_of_this_code() -> None:
    """Each break of scripts/deliberate_breaks.toml changes one place, and names test files that exist."""
    script = load_script(ROOT / "scripts" / "deliberate_breaks.py")
    breaks = script.read_breaks()
    assert len(breaks) >= 200
    assert len({row.name for row in breaks}) == len(breaks)
    assert not script.find_stale(breaks)
