"""Variables that must stand in the environment before a rank starts."""

from __future__ import annotations

from pathlib import Path

from flux_megatron.launch.workload import Workload

# One hardware queue: kernels run in the order of their launches, communication first. Megatron
# demands it for tensor parallelism up to Hopper.
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# to be known before torch and triton are imported
CPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}

GPU = {"NCCL_DEBUG": "WARN"}  # it says why it fails


def variables(workload: Workload, run: Path) -> dict[str, str]:
    """What every arm of an experiment sets alike; a site's own variables are added to them.

    Caches are in the run's folder, which every container sees; of the home folder that is not so.
    """
    return {
        **ONE_QUEUE,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # logs are read while the run goes on
        "PYTHONFAULTHANDLER": "1",  # a rank that gets SIGABRT first writes its stack
        "FLUX_MEGATRON_CACHE": str(run / "cache" / "plans"),
        "TRITON_CACHE_DIR": str(run / "cache" / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(run / "cache" / "inductor"),
        **(CPU if workload.cluster.gpu == "cpu" else GPU),
        **dict(workload.cluster.environment),
    }
