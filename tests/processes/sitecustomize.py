"""How every Python process begins that a test starts.

With rare collections of garbage: what imports make stays, and without any collection a rank's
imports take 5.0 to 5.3 s of CPU time instead of 5.9 to 6.2 (megatron-core 0.16.1, torch 2.13.0, two
cores, 2026-11-22).

And where TORCHDYNAMO_DISABLE=1 says that torch.compile compiles nothing, without it in Megatron,
which would load Inductor: 2 s more.

And with `typing.override`, which megatron-core from 0.17 on imports, also before Python 3.12.
"""

import gc
import importlib.machinery
import os
import sys
import typing


class _WithoutFusion:
    """Lets Megatron's own switch turn its fused functions off as soon as there is one."""

    def find_spec(self, name, path=None, target=None):
        if name != "megatron.core.jit" or os.environ.get("TORCHDYNAMO_DISABLE") != "1":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            getattr(module, "disable_jit_fuser", lambda: None)()

        spec.loader.exec_module = loaded
        return spec


gc.set_threshold(100_000, 20, 100)
if not hasattr(typing, "override"):
    typing.override = lambda method: method
sys.meta_path.insert(0, _WithoutFusion())
