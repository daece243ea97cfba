"""Pictures as files: SVG as it is, PDF and PNG by CairoSVG."""

from __future__ import annotations

import os
from pathlib import Path

from pipedream.core.artifact import new_file
from pipedream.core.errors import PlanError

PICTURES = (".svg", ".pdf", ".png")
"""Suffixes of pictures."""

_PNG_SCALE = 2.0  # pixels of a PNG for one of the SVG


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a picture that `save_picture` can write.

    Raises:
        PlanError: its suffix is another one, or CairoSVG is needed and missing.
    """
    path = Path(path)
    if path.suffix.lower() not in ("", *PICTURES):
        raise PlanError(
            f"a picture was to be written to {path}, but it is an SVG, PDF or PNG; write name.svg, .pdf or .png"
        )
    if path.suffix.lower() in (".pdf", ".png"):
        try:
            import cairosvg  # noqa: F401
        except ModuleNotFoundError:
            raise PlanError(
                f"a picture was to be written to {path}, but CairoSVG is not installed, which makes PDF and PNG; "
                "install it (pip install 'torch-pipedream[pictures]'), or write a .svg"
            ) from None
        except OSError as error:
            raise PlanError(
                f"a picture was to be written to {path}, but CairoSVG does not find the library cairo: "
                f"{str(error).splitlines()[0]}; install it (Debian, Ubuntu: apt install libcairo2; macOS: brew install "
                "cairo), or write a .svg"
            ) from None
    return path


def save_picture(picture: str, path: str | os.PathLike[str]) -> Path:
    """Writes an SVG text to a file, as SVG, PDF or PNG by the suffix (none: SVG). Returns the path.

    PDF and PNG need the extra ``pictures``. Their colours are those of a light screen.

    Raises:
        PlanError: see `check_picture`.
        ArtifactError: it cannot be written.
    """
    path = check_picture(path)
    data = picture.encode()
    if path.suffix.lower() == ".pdf":
        import cairosvg

        data = cairosvg.svg2pdf(bytestring=data)
    elif path.suffix.lower() == ".png":
        import cairosvg

        data = cairosvg.svg2png(bytestring=data, scale=_PNG_SCALE)
    with new_file(path) as scratch:
        scratch.write_bytes(data)
    return path
