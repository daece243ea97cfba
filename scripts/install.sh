#!/bin/sh
# Installs the pins and this package into .venv, which must exist; quiet unless something fails.
#
# Without a GPU, torch's CPU build is enough, and a tenth of the size of the CUDA build. It is searched on PyTorch's own
# index and in the find-links of the user's pip. If neither has it, the ordinary index provides its build, which works too.
set -eu
cd "$(dirname "$0")/.."

pip() {
    .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"
}

torch=$(grep '^torch==' requirements/pins.txt)
if ! nvidia-smi -L >/dev/null 2>&1; then
    pip install --no-compile --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "$torch" \
        >/dev/null 2>&1 || echo "no CPU build of $torch was found; taking the ordinary one"
fi
pip install --no-compile --requirement requirements/pins.txt
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true # pip would take one core; some files are not valid
pip install --no-deps --no-build-isolation --editable .
