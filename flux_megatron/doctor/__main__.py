"""`python -m flux_megatron.doctor`, as launches call it: the command need not be on PATH."""

from __future__ import annotations

import sys

from flux_megatron.doctor import main

if __name__ == "__main__":
    sys.exit(main())
