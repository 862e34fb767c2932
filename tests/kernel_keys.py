"""Prints what Triton finds each of our kernels by: its hash, and the type of its time limit.

TRITON_INTERPRET=0 python kernel_keys.py SEED      kernels are hashed in an order drawn from SEED
"""

import importlib
import json
import pkgutil
import random
import sys

from triton.runtime.jit import JITFunction

from flux_megatron import kernels
from flux_megatron.kernels import triton_launch

names = (one.name for one in pkgutil.walk_packages(kernels.__path__, "flux_megatron.kernels."))
modules = [importlib.import_module(name) for name in names]
found = {
    one.__qualname__: one
    for module in modules
    for one in vars(module).values()
    if isinstance(one, JITFunction) and one.__name__.endswith("_kernel")
}
shuffled = sorted(found.values(), key=lambda one: one.__qualname__)
random.Random(int(sys.argv[1])).shuffle(shuffled)
for one in shuffled:
    triton_launch.hash_in_order(one)
limits = {
    name: parameter.annotation_type
    for name, one in found.items()
    for parameter in one.params
    if parameter.name == "timeout_ns"
}
print(json.dumps({"keys": {name: one.hash for name, one in found.items()}, "limits": limits}))
