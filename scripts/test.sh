#!/usr/bin/env bash
# Linters, types, the docs and the whole test suite; arguments go to pytest, which runs those tests
# alone. All of it runs, then the exit status tells whether anything failed.
#
# A part of it runs again with the newest Triton. Where there are GPUs the suite runs twice: on the
# CPU, as if there were none, then on the GPUs whatever can use them. Makes .venv, unless TEST_PYTHON
# names a Python that has all that is needed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${TEST_PYTHON:-.venv/bin/python}
[ -n "${TEST_PYTHON:-}" ] || scripts/environment.sh || exit
scripts/slurm_install.sh || echo "The tests of Slurm jobs will be skipped." >&2

# compiled once, not in each of the thousand processes that import this checkout
export PYTHONDONTWRITEBYTECODE=

status=0
step() {
    echo "== $*"
    "$@" || status=1
}
lint() {
    if "$python" -c "import $1" 2>/dev/null; then
        step "$python" -m "$@"
    else
        echo "== no $1 here"
        [ -n "${TEST_PYTHON:-}" ] || status=1  # .venv has it
    fi
}
test=("$python" -m pytest -q --tb=short -rfE --durations=15)
lint ruff check .
lint ruff format --check .
lint mypy
NO_MKDOCS_2_WARNING=1 lint mkdocs build --strict  # docs/ as a site, in site/
if [ $# -gt 0 ]; then
    step "${test[@]}" "$@"
    exit $status
fi
cores=$(nproc)
# many tests start ranks of their own; on few cores there is one more worker, as others wait
workers=$((cores > 4 ? cores / 2 : cores + 1))
without_gpus=(env CUDA_VISIBLE_DEVICES=)
# one kernel of each kind is for other versions than these, with which every kernel is compiled
sample=tests/protocol/test_sample_ptx.py
step "${without_gpus[@]}" "${test[@]}" --ignore="$sample" -m "not alone" -n "$workers" --dist loadgroup
step "${without_gpus[@]}" "${test[@]}" -m alone
step scripts/newest_triton.sh -n "$workers" --dist loadgroup
if nvidia-smi --list-gpus >/dev/null 2>&1; then
    # most of a test on GPUs is compiling, on one core: several share the GPUs
    on_gpus="(device or gpu or gpus)"
    step "${test[@]}" -m "$on_gpus and not alone" -n 4 --dist loadgroup
    step "${test[@]}" -m "$on_gpus and alone"
fi
exit $status
