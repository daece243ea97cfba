"""The README as a package index shows it: without links that lead nowhere there. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description(readme: str, repository: str | None) -> str:
    """Returns a README whose relative links lead into the repository, or are plain text if it has no address."""

    def absolute(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        if repository is None:
            return "" if mark else text
        return f"{mark}[{text}]({repository.rstrip('/')}/{'raw' if mark else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, readme)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Repository")),
        long_description_content_type="text/markdown",
    )
