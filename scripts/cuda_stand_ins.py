"""Lets a CUDA build of torch be imported without its gigabytes of CUDA libraries, on a CPU.

    python scripts/cuda_stand_ins.py SITE_PACKAGES

Compiles a library of the same name for each one that torch's libraries want and that is not there.
Its functions end the process: nothing may call them. Needs gcc and binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(r"lib(cu(?!da\.)|nccl|nv)")  # the driver's libcuda is wanted by none of them
ANY = ""  # the version of functions that have none


def listed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def files_of_versions(library: Path) -> dict[str, str]:
    """The file in which a library looks for symbols of a version."""
    found, file = {}, ""
    for line in listed("readelf", "--version-info", "--wide", str(library)).splitlines():
        if match := re.search(r"Version: \d+\s+File: (\S+)", line):
            file = match[1]
        elif file and (match := re.search(r"Name: (\S+)\s+Flags", line)):
            found[match[1]] = file
    return found


def wanted(folder: Path) -> dict[str, dict[str, set[str]]]:
    """library -> version -> functions. Nobody says where those without a version are: all
    libraries have them.
    """
    libraries = [path for path in folder.glob("*.so*") if path.is_file()]
    defined = {
        line.split()[-1].partition("@")[0]
        for library in libraries
        for line in listed("nm", "-D", "--defined-only", str(library)).splitlines()
    }
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    plain = set()
    for library in libraries:
        for name in re.findall(r"NEEDED.*\[(.*)\]", listed("readelf", "-d", str(library))):
            if CUDA.match(name):
                found[name][ANY] = plain
        files = files_of_versions(library)
        for line in listed("nm", "-D", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            file = files.get(version.lstrip("@"))
            if file is None and re.match(r"[a-z]\w*$", name) and name not in defined:
                plain.add(name)
            elif file is not None and CUDA.match(file):
                found[file][version.lstrip("@")].add(name)
    return found


def build(target: Path, versions: dict[str, set[str]]) -> None:
    named = {version: names for version, names in versions.items() if version}
    functions = set().union(*versions.values())
    code = [f"void {name}(void) {{ abort(); }}" for name in sorted(functions)]
    nodes = [f"{version} {{ global: {'; '.join(names)}; }};" for version, names in named.items()]
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "it.c"), Path(folder, "it.map")
        source.write_text("\n".join(["void abort(void);", *code, ""]))
        script.write_text("\n".join([*nodes, ""]))
        versioned = [f"-Wl,--version-script={script}"] if nodes else []
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{target.name}",
             *versioned, "-o", str(target), str(source)],
            check=True,
        )  # fmt: skip


def main(site: Path) -> None:
    folder = site / "torch" / "lib"
    present = {path.name for path in site.glob("nvidia/**/*.so*")}
    made = {name: versions for name, versions in wanted(folder).items() if name not in present}
    for name, versions in made.items():
        build(folder / name, versions)
    print(f"stand-ins for libraries of CUDA: {', '.join(sorted(made)) or 'none are wanted'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
