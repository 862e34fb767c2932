"""TransformerEngine. 2.11 was run on GPUs, and 2.12 with FP8. What our layers ask of it is in the
stand-ins `tests/integration/te_stand_ins.py` and `te_modules.py`, what the benchmark calls in
`lab/bench/competitors`.

Read in the wheels of 2.11.0 to 2.20.2: the functions of userbuffers and `general_gemm` have the
same arguments, but that `initialize_ub` has an optional `with_cublasmp` from 2.17 on; parameters
have the same names.
"""

from __future__ import annotations

from flux_megatron.versions.library import Library

TRANSFORMER_ENGINE = Library(
    "transformer-engine", "transformer_engine", oldest="2.11", newest="2.12"
)
