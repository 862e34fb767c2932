#!/usr/bin/env bash
# Linters, types, the docs and the tests: ten minutes on two cores. All of it runs, then the exit
# status tells whether anything failed.
#
#     scripts/test.sh              what a change can have broken
#     scripts/test.sh --all        everything
#     scripts/test.sh TEST ...     these tests alone; arguments go to pytest
#
# tests/whole_suite.txt names the last commit that everything passed at. Tests of minutes (`WHOLE` in
# tests/conftest.py), and mutants, are left out where nothing that they are about has changed since.
# Everything runs where a kernel or the virtual ranks have changed, or where that commit is not known.
#
# Where there are GPUs the suite runs twice: on the CPU, as if there were none, then on the GPUs
# whatever can use them. Makes .venv, unless TEST_PYTHON names a Python that has all that is needed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${TEST_PYTHON:-.venv/bin/python}
[ -n "${TEST_PYTHON:-}" ] || scripts/environment.sh || exit

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

# what every test of minutes and every mutant is about
everything='^flux_megatron/kernels/|^tests/protocol/.*\.py$|^tests/conftest\.py$'

# Into `whole` goes why everything runs, if it does; into `CHANGED` what has changed, if it does not:
# files, and the titles of mutants.
what_has_changed() {
    local commit changed found
    commit=$(cat tests/whole_suite.txt)
    if ! changed=$(git diff --name-only "$commit" -- 2>/dev/null); then
        whole="the commit of tests/whole_suite.txt is not here"
        return
    fi
    changed+=$'\n'$(git ls-files --others --exclude-standard)
    if found=$(grep -m 1 -E "$everything" <<<"$changed"); then
        whole="$found has changed since $commit"
        return
    fi
    changed+=$'\n'$(git diff -U0 "$commit" -- 'tests/protocol/*.diff' | sed -n 's/^+# //p')
    export CHANGED=$changed
}

whole=
if [ "${1:-}" = --all ]; then
    whole=asked
elif [ $# -gt 0 ]; then
    step "${test[@]}" "$@"
    exit $status
else
    what_has_changed
fi
if [ -n "$whole" ]; then
    echo "== the whole suite: $whole"
    and=""
    # one kernel of each kind is for where not every kernel is compiled
    test+=(--ignore=tests/protocol/test_sample_ptx.py)
else
    echo "== left out: what nothing has changed of since $(cat tests/whole_suite.txt), newest Triton"
    and=" and not whole"
fi
if [ -n "$whole" ] || grep -q -E '/(launch|slurm)/' <<<"$CHANGED"; then
    scripts/slurm_install.sh || echo "The tests of Slurm jobs will be skipped." >&2
fi
cores=$(nproc)
# many tests start ranks of their own; on few cores there is one more worker, as others wait
workers=$((cores > 4 ? cores / 2 : cores + 1))
without_gpus=(env CUDA_VISIBLE_DEVICES=)
step "${without_gpus[@]}" "${test[@]}" -m "not alone$and" -n "$workers" --dist loadgroup
step "${without_gpus[@]}" "${test[@]}" -m "alone$and"
[ -z "$whole" ] || step scripts/newest_triton.sh -n "$workers" --dist loadgroup
if nvidia-smi --list-gpus >/dev/null 2>&1; then
    # most of a test on GPUs is compiling, on one core: several share the GPUs
    on_gpus="(device or gpu or gpus)$and"
    step "${test[@]}" -m "$on_gpus and not alone" -n 4 --dist loadgroup
    step "${test[@]}" -m "$on_gpus and alone"
fi
if [ -n "$whole" ] && [ $status = 0 ] && [ -z "$(git status --porcelain)" ]; then
    echo "== all is green: git rev-parse HEAD > tests/whole_suite.txt notes it"
fi
exit $status
