"""Every Python of a pretended node begins here: Slurm's task prolog puts this folder on PYTHONPATH.

The node has a kernel of its own, which is how flux_megatron tells machines apart. And each rank
writes at its end what it took: a file in $RANKS_TELL.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pathlib
import resource
import socket
import struct
import time

BOOT = "/proc/sys/kernel/random/boot_id"
INFO = struct.Struct("<120xQQ16xII")  # of Linux's tcp_info: bytes acknowledged and received, and
# segments with data in and out; a store's client sends every request as one
_read_text = pathlib.Path.read_text


def _of_this_node(path: pathlib.Path, *given: object, **named: object) -> str:
    own = str(path) == BOOT
    return f"{os.environ['SLURMD_NODENAME']}\n" if own else _read_text(path, *given, **named)


def _tell(folder: pathlib.Path) -> None:
    requests, sent, received = 0, 0, 0
    for number in os.listdir("/proc/self/fd"):
        # it may be no socket, or gone
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as one:
            if one.getpeername()[1] == int(os.environ["MASTER_PORT"]):
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                acked, got, _, segments = INFO.unpack_from(info)
                requests, sent, received = requests + segments, sent + acked, received + got
    row = {
        "rank": int(os.environ["RANK"]),
        "requests": requests,
        "sent": sent,
        "received": received,
        "rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "cpu_s": time.process_time(),
    }
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    (folder / f"{step}.{os.environ['RANK']}").write_text(json.dumps(row))


if "SLURMD_NODENAME" in os.environ:
    pathlib.Path.read_text = _of_this_node
    if "RANK" in os.environ:
        atexit.register(_tell, pathlib.Path(os.environ["RANKS_TELL"]))
