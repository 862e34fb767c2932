#!/usr/bin/env bash
# The kernels with the newest Triton that was run, beside the torch of .venv: it is installed without
# dependencies into .venv/newest_triton, once, and comes first on PYTHONPATH. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
newest=$(PYTHONPATH=$PWD "$python" -c 'from flux_megatron.versions.triton import TRITON; print(TRITON.newest)')
folder=$PWD/.venv/newest_triton/$newest
if [ ! -d "$folder" ]; then
    # an older Python gets the newest that is built for it
    "$python" -m pip install --quiet --no-deps --target "$folder.part" "triton>=3.6,<=$newest.99"
    mv "$folder.part" "$folder"
fi
export PYTHONPATH=$folder:$PWD
"$python" -c 'import triton; print("Triton", triton.__version__)'
# what depends on Triton alone: its compilers, its interpreter, its launches
exec "$python" -m pytest -q --tb=short -rfE tests/test_versions.py tests/test_triton_launch.py \
    tests/protocol/test_sample_ptx.py tests/protocol/test_offline_driver.py \
    tests/protocol/test_gluon_versions.py tests/protocol/test_hopper_descriptors.py \
    tests/protocol/test_interpreter.py tests/test_symm.py tests/test_low_latency.py "$@"
