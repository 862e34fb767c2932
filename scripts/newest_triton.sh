#!/usr/bin/env bash
# The kernels with the newest Triton that was run, beside the torch of .venv or of TEST_PYTHON, as if
# there were no GPU. It is installed once, without dependencies, into a folder that comes first on
# PYTHONPATH. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${TEST_PYTHON:-.venv/bin/python}
newest=$(PYTHONPATH=$PWD "$python" -c 'from flux_megatron.versions.triton import TRITON; print(TRITON.newest)')
folder=$PWD/.venv/newest_triton/$newest-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
if [ ! -d "$folder" ]; then
    rm -rf "$folder.part"  # of an installation that was interrupted
    # an older Python gets the newest that is built for it
    "$python" -m pip install --quiet --no-deps --target "$folder.part" "triton>=3.6,<=$newest.99" ||
        { echo "Triton $newest is not installed: pip and an index that has it are needed." >&2; exit 1; }
    mv "$folder.part" "$folder"
fi
export PYTHONPATH=$folder:$PWD CUDA_VISIBLE_DEVICES=
"$python" -c 'import torch, triton; print("Triton", triton.__version__, "beside torch", torch.__version__)'
# what depends on Triton alone: its compilers, its launches, its interpreter
exec "$python" -m pytest -q --tb=short -rfE tests/test_triton_launch.py tests/test_versions.py \
    tests/protocol/test_sample_ptx.py tests/protocol/test_offline_calls.py \
    tests/protocol/test_gluon_versions.py tests/protocol/test_hopper_descriptors.py \
    tests/protocol/test_interpreter.py tests/test_ops.py::test_exact \
    tests/test_low_latency.py::test_exact "$@"
