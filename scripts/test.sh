#!/usr/bin/env bash
# Linters, types and the whole test suite; arguments go to pytest. Tests that need GPUs run where
# there are some. All of it runs, then the exit status tells whether anything failed.
set -uo pipefail
cd "$(dirname "$0")/.."
scripts/environment.sh || exit
scripts/slurm_install.sh || echo "The tests of Slurm jobs will be skipped." >&2

status=0
step() {
    echo "== $*"
    .venv/bin/python -m "$@" || status=1
}
step ruff check .
step ruff format --check .
step mypy
if [ $# -gt 0 ]; then
    step pytest -q --durations=15 "$@"
else # those that compute in one process share the cores; the others start ranks, and watch clocks
    alone=(tests/protocol tests/perf tests/results)
    step pytest -q -n 2 --dist loadfile "${alone[@]}"
    step pytest -q --durations=15 "${alone[@]/#/--ignore=}"
fi
exit $status
