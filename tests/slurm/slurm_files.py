"""The files of a Slurm whose nodes are parts of this machine."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

PATH = f"{os.environ['PATH']}:/usr/sbin"  # Debian's daemons; not on every user's path
OF_A_NODE = Path(__file__).parent / "of_a_node"
TELLS = "ranks"  # the folder in which ranks say what they took

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog.sh
MpiDefault=none
KillWait=2
MinJobAge=3600
PropagateResourceLimits=NONE
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
NodeName={nodes} NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cpus}{gres}
PartitionName={partition} Nodes={nodes} Default=YES
{further}
"""

RENTED = """
NodeName=gpu[1-16] CPUs=128 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=gpu Nodes=gpu[1-16]
"""

# slurmd insists on knowing of what kind cgroups are, though nothing here uses them; the kind that
# it would find by itself may want systemd
CGROUPS = "CgroupPlugin=cgroup/v1\n"


def write(
    folder: Path, nodes: str, cpus: int, gpus: Sequence[Sequence[str]], apart: bool
) -> list[str]:
    """All of them, for `nodes` such as cpu[1-3]; how a slurmd is started.

    Slurm lies where its slurmd is found, or in a folder of its own with bin/ and lib/plugins/.
    """
    (folder / "state").mkdir(parents=True)
    (folder / TELLS).mkdir()
    partition, count = re.findall(r"[a-z]+|\d+(?=])", nodes)
    controller_port, *ports = _free_ports(1 + int(count))
    text = CONFIGURATION.format(
        folder=folder,
        user=pwd.getpwuid(os.getuid()).pw_name,
        controller_port=controller_port,
        partition=partition,
        nodes=nodes,
        ports=",".join(map(str, ports)),
        cpus=cpus,
        gres=f" Gres=gpu:{len(gpus[0])}" if gpus else "",
        further="" if gpus else RENTED,
    )
    slurmd = ["slurmd", "-D"]
    prefix = Path(shutil.which("slurmd", path=PATH) or "/").parent.parent
    if (prefix / "lib" / "plugins").is_dir():
        text += f"PluginDir={prefix}/lib/plugins\n"
        slurmd += ["-d", f"{prefix}/bin/slurmstepd"]
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(CGROUPS)
    of_nodes = [f"NodeName=gpu{n} Name=gpu File={','.join(g)}\n" for n, g in enumerate(gpus, 1)]
    (folder / "gres.conf").write_text("AutoDetect=off\n" + "".join(of_nodes))
    (folder / "prolog.sh").write_text(_prolog(folder, gpus, apart))
    (folder / "prolog.sh").chmod(0o755)
    return slurmd


def _prolog(folder: Path, gpus: Sequence[Sequence[str]], apart: bool) -> str:
    """What it prints are variables of every task. Slurm numbers a node's GPUs from 0, where no
    cgroup hides the others.
    """
    lines = ["#!/bin/sh", "case $SLURMD_NODENAME in"]
    for number, files in enumerate(gpus, 1):
        numbers = ",".join(re.findall(r"\d+$", file)[0] for file in files)
        lines.append(f"gpu{number}) echo export CUDA_VISIBLE_DEVICES={numbers} ;;")
    lines.append("esac")
    if apart:
        ours = f"{OF_A_NODE}:{os.environ.get('PYTHONPATH', '')}"
        lines += [f'echo "export PYTHONPATH={ours}"', f"echo export RANKS_TELL={folder / TELLS}"]
        lines.append("echo export NCCL_HOSTID=$SLURMD_NODENAME")
    return "\n".join([*lines, ""])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_until_all_are_known:
        probes = [open_until_all_are_known.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
