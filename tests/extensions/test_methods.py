"""Further methods: found by scanning their folder, needed by nothing else."""

from pathlib import Path

import pipedream
import pipedream as pd

PACKAGE = Path(pipedream.__file__).parent


def test_they_are_listed() -> None:
    assert {"roundpipe", "timeprest_interpolated"} <= set(pd.schedules.METHODS)


def test_nobody_imports_them() -> None:
    text = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    importers = {name for name, source in text.items() if "pipedream.extensions.methods" in source}
    assert {name for name in importers if not name.startswith("extensions/methods/")} == {"core/extensions.py"}
    for word in ("Interpolated", "timeprest_interpolated"):
        assert not [
            name for name, source in text.items() if word in source and not name.startswith("extensions/methods/")
        ]
