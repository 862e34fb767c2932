"""The main module of a process that multiprocessing spawns: the script of its parent, with what
`provide_override` gives. It stands in the place of the script, so names are found in it.
"""

from __future__ import annotations

import runpy
import sys

from flux_megatron.versions.python import provide_override

provide_override()
globals().update(runpy.run_path(sys.argv[0], run_name=__name__))
