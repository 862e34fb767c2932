"""torch.

| | 2.10 to 2.12 | 2.13 to 2.15 |
| --- | --- | --- |
| a `Plan` as argument in `torch.compile(fullgraph=True)` | refused | works |

torch 2.9 lacks `torch.nn.functional.grouped_mm` and wants Triton 3.5, which is too old.
"""

from __future__ import annotations

from flux_megatron.versions.library import Library

TORCH = Library("torch", "torch", oldest="2.10", newest="2.15")
