"""Before a release: tests the built wheel outside of the checkout, with each Python and the torch versions claimed.

uvx nox                                     all of them, with the default tests: an hour on two cores
uvx nox -p 3.13 -- tests/runtime -k comm    one Python, and what pytest is given
uvx nox -- none                             the commands alone
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
SETTINGS = nox.project.load_toml(ROOT / "pyproject.toml")
TORCH = next(text for text in SETTINGS["project"]["dependencies"] if text.startswith("torch>="))
OLDEST = TORCH.removeprefix("torch>=")
NEWEST = "2.15"
EXTRAS = ("dev", "notebook")

nox.options.default_venv_backend = "uv"


@nox.session(python=nox.project.python_versions(SETTINGS))
@nox.parametrize("torch", [OLDEST, NEWEST])
def wheel(session: nox.Session, torch: str) -> None:
    """Installs the wheel of the sdist; starts the commands, a run and its continuation; then the sdist's tests."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)  # what an earlier try has left
    session.run("uv", "build", "--quiet", "--out-dir", str(folder), str(ROOT), external=True)
    (sdist,), (built,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    # PyTorch's own index has builds without CUDA. Where it cannot be reached, the ordinary build works too.
    cpu = ("--index-url", "https://download.pytorch.org/whl/cpu")
    session.install(f"torch=={torch}.*", *cpu, silent=True, success_codes=(0, 1, 2))
    # With the oldest Python and torch also the oldest of what else pyproject.toml names.
    lowest = (session.python, torch) == (nox.project.python_versions(SETTINGS)[0], OLDEST)
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    session.install(
        f"torch=={torch}.*",
        *("-r", str(ROOT / "pyproject.toml"), *extras),
        *(("--resolution", "lowest-direct") if lowest else ()),
    )
    session.install("--no-deps", "--force-reinstall", str(built))
    shutil.unpack_archive(sdist, folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    session.chdir(folder)
    # Warnings are errors in all processes; old versions of other packages warn of each other.
    strict = {} if lowest else {"PYTHONWARNINGS": "error"}
    session.run("python", "-c", "import pipedream, torch; print(pipedream.__file__, torch.__version__)", env=strict)
    session.run("pipedream", "--version", env=strict)
    session.run("pipedream", "schedules", env=strict)
    train = ("pipedream", "train", str(unpacked / "examples" / "digits.py"), "--workers", "2", "--out", "run")
    session.run(*train, "--minibatches", "8", "--checkpoint-every", "4", env=strict)
    session.run(*train, "--minibatches", "12", "--resume", "run", env=strict)
    if session.posargs != ["none"]:
        session.chdir(unpacked)
        session.run("pytest", "-q", "-n", "2", *session.posargs, env=strict)
