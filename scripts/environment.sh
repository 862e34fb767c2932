#!/usr/bin/env bash
# Makes .venv in this checkout, with everything that demo.sh and test.sh need. Does nothing when it
# is up to date. PYTHON=... chooses the interpreter; pip's own variables (PIP_INDEX_URL,
# PIP_FIND_LINKS, PIP_NO_INDEX) choose where packages come from.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
for candidate in python3.11 python3; do
    # A shim can be on the path and still refuse to run.
    if [ -z "$python" ] && "$candidate" -c '' 2>/dev/null; then python=$candidate; fi
done
[ -n "$python" ] || { echo "No Python found: install Python 3.11 or set PYTHON." >&2; exit 1; }

torch_folder=""
constraints=(--constraint scripts/constraints-cpu.txt)
if nvidia-smi --list-gpus >/dev/null 2>&1; then
    # The torch of a GPU machine fits its driver: keep it, and the versions that came with it.
    constraints=()
    torch_folder=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' || true)
fi

stamp=$( { pwd; "$python" -c 'import sys; print(sys.version, sys.prefix)'; echo "$torch_folder"
    cat pyproject.toml scripts/environment.sh scripts/constraints-cpu.txt; } | sha256sum )
[ "$stamp" != "$(cat .venv/stamp 2>/dev/null)" ] || exit 0

echo "Creating .venv with $("$python" --version) (a few minutes) ..."
"$python" -m venv --clear .venv
if [ -n "$torch_folder" ]; then
    # --system-site-packages would miss it where that Python is itself a virtual environment's.
    echo "$torch_folder" > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
fi
.venv/bin/python -m pip install --quiet "${constraints[@]}" --editable '.[train,launch,lab,docs,dev]'
echo "$stamp" > .venv/stamp
