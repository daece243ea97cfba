"""The distribution: what its files hold, and that it works outside of the checkout."""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from commands import load_script

import pipedream as pd

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_links_of_the_description() -> None:
    text = "![a picture](docs/a.svg) [here](#use) [page](docs/a.md#b) [web](https://example.org/a) ![b](https://b.org)"
    absolute = "https://code.example/we/it"
    assert load_script(ROOT / "setup.py").description(text, absolute + "/") == (
        f"![a picture]({absolute}/raw/main/docs/a.svg) [here](#use) [page]({absolute}/blob/main/docs/a.md#b) "
        "[web](https://example.org/a) ![b](https://b.org)"
    )
    plain = " [here](#use) page [web](https://example.org/a) ![b](https://b.org)"
    assert load_script(ROOT / "setup.py").description(text, None) == plain
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(_relative(readme)) > 10
    for repository in (None, absolute):
        assert not _relative(load_script(ROOT / "setup.py").description(readme, repository))


def _relative(text: str) -> list[str]:
    """Returns the targets of links that are neither addresses nor places on the page."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", target)]


def test_each_extra_is_advised() -> None:
    """An import that fails names the extra that installs it, if one does."""
    extras = SETTINGS["optional-dependencies"]
    distributions = {"sklearn": "scikit-learn"}
    for package, extra in pd.errors._EXTRAS.items():
        assert any(requirement.startswith(distributions.get(package, package)) for requirement in extras[extra])
        missing = ModuleNotFoundError(f"No module named {package!r}", name=f"{package}.inside")
        assert pd.errors.install_advice(missing) == f"; pip install 'torch-pipedream[{extra}]'"
    assert pd.errors.install_advice(ModuleNotFoundError("No module named 'mine'", name="mine")) == ""
    assert {*pd.errors._EXTRAS.values()} == {*extras} - {"dev", "docs"}


def test_the_citation_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {pd.__version__}\n" in text
    assert f"license: {SETTINGS['license']}\n" in text


def test_the_readme_names_the_versions_that_are_tested() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tried = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (oldest,) = (text.removeprefix("torch>=") for text in SETTINGS["dependencies"] if text.startswith("torch>="))
    newest = re.findall(r'^NEWEST = "([\d.]+)"$', tried, re.MULTILINE)[0]
    pythons = [classifier.rpartition(" ")[2] for classifier in SETTINGS["classifiers"] if "Python :: 3." in classifier]
    assert f"Python {pythons[0]} to {pythons[-1]}" in readme
    assert f"PyTorch {oldest} to {newest}" in readme
    assert SETTINGS["requires-python"] == f">={pythons[0]}"


@pytest.mark.slow
@pytest.mark.processes
def test_the_wheel_of_the_sdist_works_elsewhere(tmp_path: Path) -> None:
    """In an environment that sees the packages of this one, but not the checkout.

    A folder that a .pth file names has its own .pth files ignored, and so an editable installation in it.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: object, folder: Path = tmp_path) -> str:
        done = subprocess.run([*map(str, command)], cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def build(kind: str, folder: Path) -> Path:
        """Without pip's separate environment, which would download."""
        program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
        return tmp_path / run(sys.executable, "-c", program, tmp_path, folder=folder).splitlines()[-1]

    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "shared")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    with tarfile.open(build("sdist", tmp_path / "source")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    examples = [f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")]
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "docs/img/pipedream.svg", *examples):
        assert (unpacked / name).is_file(), name
    wheel = build("wheel", unpacked)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = Parser().parsestr(archive.read(next(n for n in names if n.endswith("METADATA"))).decode())
    assert "pipedream/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"pipedream", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert (described["Name"], described["Description-Content-Type"]) == ("torch-pipedream", "text/markdown")
    assert not _relative(described.get_payload())
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    packages = [path for path in (*sys.path, *site.getsitepackages()) if path.endswith("site-packages")]
    inside = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "environment"), "platbase": str(tmp_path)})
    Path(inside, "packages.pth").write_text("\n".join(dict.fromkeys(packages)) + "\n")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", wheel)
    assert run(python, "-c", "import pipedream; print(pipedream.__file__)").startswith(str(tmp_path))
    command = python.with_name("pipedream")
    assert run(command, "--version") == f"pipedream {pd.__version__}\n"
    digits = unpacked / "examples" / "digits.py"
    run(command, "train", digits, "--workers", "2", "--epochs", "1", "--minibatches", "4", "--out", "run")
    assert (tmp_path / "run" / "report.html").is_file()
