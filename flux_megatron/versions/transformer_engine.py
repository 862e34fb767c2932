"""TransformerEngine. One version was run, on GPUs; what our layers ask of it is in the stand-ins of
`tests/integration/te_stand_ins.py`.
"""

from __future__ import annotations

from flux_megatron.versions.library import Library

TRANSFORMER_ENGINE = Library(
    "transformer-engine", "transformer_engine", oldest="2.11", newest="2.11"
)
