"""megatron-core. From 0.17 on it needs Python 3.12.

The functions that we replace or rely on are held against each recorded release by their text
(`patching.fingerprints`), and its arguments by their names (`integration.arguments`), so that what
differs in a newer one is refused by its name. What our layers find in one of two places:

| | to 0.16 | from 0.17 on |
| --- | --- | --- |
| the experts of a provider (`integration.provider`) | a class | a class, or a partial of it |
| `qk_l2_norm` (`lab.train.specs`) | an argument of specifications to 0.15 | the configuration's |
"""

from __future__ import annotations

from flux_megatron.versions.library import Library

MEGATRON_CORE = Library("megatron-core", "megatron.core", oldest="0.14", newest="0.19")
