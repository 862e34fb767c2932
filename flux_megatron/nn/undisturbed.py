"""A layer that torch.compile runs as it is, with all that it calls. Imported where something
compiles, because torch._dynamo takes a second.
"""

from __future__ import annotations

import torch._dynamo

from flux_megatron.nn import linear_passes

run = torch._dynamo.disable(linear_passes.run)
