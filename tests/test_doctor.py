"""`flux-megatron doctor`: what it finds here, what elsewhere, and what stops a run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from started import executable
from without_torch import without_torch

from flux_megatron import doctor, lab_commands, settings
from flux_megatron.command_errors import EXTRAS
from flux_megatron.doctor import Finding, Wanted, calls, examine, machine, packages
from flux_megatron.errors import BadInput
from flux_megatron.integration import parser_signature
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm import enqueue
from flux_megatron.tuning import environment, link, plan_cache
from flux_megatron.tuning.environment import Environment
from flux_megatron.tuning.plan_entry import Entry, Measured


def run(*arguments: str, code: int = 0) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = doctor.main(arguments)
    assert status == code, output.getvalue()
    return output.getvalue()


def found(subject: str, wanted: Wanted = Wanted()) -> Finding:  # noqa: B008, it is frozen
    (one,) = (finding for finding in examine(wanted) if finding.subject == subject)
    return one


def test_this_machine_can_run_the_tests():
    findings = {finding.subject: finding for finding in examine(Wanted(gpus=0))}
    assert {"Python", "torch", "triton", "shared memory"} <= findings.keys()
    assert findings["shared memory"].status == "ok"
    assert "GPUs" not in findings


def test_missing_torch_is_said_and_stops_a_run():
    code = "from flux_megatron import doctor; sys.exit(doctor.main())"
    done = without_torch("--json", "-", code=code, more=("numpy",), expected=1)
    missing = [r["subject"] for r in json.loads(done.stdout) if r["text"] == "not installed"]
    assert {"torch", "numpy"} <= {*missing}


@pytest.mark.parametrize(("installed", "wanted"), [(True, "train"), (False, "launch")])
def test_packages_of_the_laboratory_are_for_where_it_is(monkeypatch, installed, wanted):
    monkeypatch.setattr(lab_commands, "is_installed", lambda command: installed)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    found = {one.subject: one for one in packages.other_packages(Wanted())}
    expected = {name for name, extra in EXTRAS.items() if extra in ("launch", wanted)}
    assert {name for name in EXTRAS if name in found} == expected
    launch = ("missing", "pip install 'flux-megatron[launch]'")
    assert (found["yaml"].status, found["yaml"].remedy) == launch
    assert {found[name].status for name, extra in EXTRAS.items() if extra == "train" == wanted} <= {
        "note"
    }, "a run starts without"


def test_missing_gpus_stop_a_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(machine, "_links", lambda count: ())
    assert "2 x NVIDIA H200; 4 expected" in run("--gpus", "4", code=1)
    assert "4 expected" not in run("--gpus", "2")


def test_gpus_that_cannot_reach_each_other_are_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one + other != 3)
    first = next(machine._links(3))
    said = ("peer access", "note", "not between 1 and 2")
    assert (first.subject, first.status, first.text) == said
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert next(machine._links(3)).status == "ok"


@pytest.mark.parametrize(("kind", "said"), [("nvlink, hidden", True), ("unknown", False)])
def test_the_link_of_one_visible_gpu(monkeypatch, kind, said):
    """As of a rank under Ray; a machine with one GPU has none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(link, "of", lambda device: kind)
    texts = [one.text for one in machine.gpus(Wanted()) if one.subject == "link"]
    assert texts == (["nvlink, to GPUs that this process does not see"] if said else [])


@pytest.mark.parametrize(
    ("capability", "kernels"), [((9, 0), "run in 16 bits"), ((8, 9), "capability 9")]
)
def test_which_kernels_there_will_be(monkeypatch, capability, kernels):
    pytest.importorskip("flux_megatron.kernels.hopper.signalled_gemm")
    hopper_gemm.refuses_bands.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    (found,) = calls.kernels(Wanted())
    hopper_gemm.refuses_bands.cache_clear()
    assert kernels in found.text
    assert found.status == ("ok" if capability == (9, 0) else "note")


@pytest.mark.parametrize(
    ("native", "reason", "status", "said"),
    [(True, None, "ok", "C makes them"), (False, None, "ok", "Python makes them"),
     (True, "no compiler", "note", "one at a time: no compiler")],
)  # fmt: skip
def test_who_makes_the_driver_calls(monkeypatch, native, reason, status, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(enqueue, "unavailable", lambda: reason)
    monkeypatch.setattr(settings, "get", lambda: settings.Settings(native=native))
    (finding,) = calls.driver_calls(Wanted())
    assert (finding.status, said in finding.text) == (status, True), finding


@pytest.mark.parametrize(
    ("subject", "version", "status"),
    [
        ("torch", "2.9.1+cu126", "missing"), ("torch", "2.10.0", "ok"),
        ("triton", None, "missing"), ("triton", "3.0.0", "missing"), ("triton", "3.6.0", "ok"),
        ("megatron-core", "0.13.0", "missing"), ("megatron-core", "0.14.0", "ok"),
        ("megatron-core", "0.19.2", "ok"), ("megatron-core", "0.21.0", "note"),
        ("megatron-core", None, "missing"),
    ],
)  # fmt: skip
def test_versions_are_held_against_those_that_run(monkeypatch, subject, version, status):
    monkeypatch.setattr(torch, "__version__", version if subject == "torch" else "2.10.0")
    monkeypatch.setattr(packages, "version_of", lambda name: version)
    finding = found(subject)
    assert finding.status == status
    assert (version or "not in") in finding.text
    assert finding.remedy or status != "missing"
    assert "0.16.1" in finding.remedy or status != "note"


@pytest.mark.parametrize(
    ("gpus", "variable", "there", "verdicts"),
    [
        (2, "", ("gcc",), [("ok", "/bin/gcc; nvcc is not needed")]),
        (2, "", ("clang",), [("ok", "/bin/clang; nvcc is not needed")]),
        (2, "mycc", (), [("ok", "mycc; nvcc is not needed")]),
        (2, "", (), [("missing", "no C compiler on PATH")]),
        (0, "", (), []),  # the CPU's kernels are interpreted
    ],
)
def test_triton_needs_a_compiler_where_there_are_gpus(monkeypatch, gpus, variable, there, verdicts):
    monkeypatch.setattr(packages, "gpus_seen", lambda: gpus)
    monkeypatch.setenv("CC", variable)
    which = {name: f"/bin/{name}" for name in there}.get
    monkeypatch.setattr(packages.shutil, "which", which)
    findings = [one for one in packages.triton(Wanted()) if one.subject == "compiler"]
    assert [(one.status, one.text) for one in findings] == verdicts


def test_what_nobody_has_run_is_noted(monkeypatch):
    assert "version of torch" not in [one.subject for one in examine(Wanted(gpus=0))]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(packages, "version_of", lambda name: "9.1")
    subjects = {one.subject: one for one in examine(Wanted(gpus=0))}
    assert "newer than" in subjects["version of torch"].text
    for name in ("triton", "megatron-core", "transformer-engine"):
        assert subjects[f"version of {name}"].status == "note"


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_checkout_is_looked_at_in_its_place(tmp_path):
    assert found("Megatron-LM", Wanted(checkout=tmp_path)).status == "missing"
    written(tmp_path, {
        "pretrain_gpt.py": "",
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 18\nPATCH = 2\n",
    })  # fmt: skip
    finding = found("Megatron-LM", Wanted(checkout=tmp_path))
    assert (finding.status, finding.text) == ("ok", f"0.18.2 in {tmp_path}")


SOURCES = {
    "pretrain_gpt.py": "import json\nfrom megatron.training import (\n    pretrain,\n)",
    "megatron/training/__init__.py": "from .training import pretrain",
    "megatron/training/training.py": "from megatron.training.tokenizer import build",
    "megatron/training/tokenizer/__init__.py": "from ..tokenizer import bert\n"
    "try:\n    import one_that_is_tried\nexcept ImportError:\n    pass",
    "megatron/training/tokenizer/bert.py": "import absent_six\ndef f():\n    import one_in_use",
    "megatron/training/not_imported.py": "import one_of_another_script",
}


def test_a_package_that_the_checkout_imports_stops_a_run(tmp_path):
    written(tmp_path, SOURCES)
    names = {finding.subject for finding in examine(Wanted(checkout=tmp_path))}
    assert not {name for name in names if name.startswith("one_")}
    finding = found("absent_six", Wanted(checkout=tmp_path))
    assert finding.status == "missing"
    assert "not installed, megatron/training/tokenizer/bert.py of" in finding.text
    assert finding.remedy == "pip install absent_six"


def test_variables_that_mean_nothing(monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_STRATEGIE", "fused")
    assert found("variable").status == "note"
    monkeypatch.delenv("FLUX_MEGATRON_STRATEGIE")
    monkeypatch.setenv("FLUX_MEGATRON_TUNE", "eager")
    assert found("variable").status == "missing"


def test_what_an_arm_is_built_of_must_be_there(monkeypatch):
    monkeypatch.setattr(packages, "version_of", lambda name: None)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    for subject, need in (("TransformerEngine", "transformer_engine"), ("apex", "apex")):
        assert found(subject).status == "note"
        assert found(subject, Wanted(packages=(need,))).status == "missing"


def test_frameworks_are_found_and_how_to_switch_us_on(monkeypatch):
    docs = Path(__file__).parents[1] / "docs"
    known = {"megatron-bridge": "0.6.2", "transformers": "5.24.0"}
    monkeypatch.setattr(packages, "version_of", known.get)
    found = {one.subject: one.text for one in packages.frameworks(Wanted())}
    assert found.keys() == known.keys()
    assert found["megatron-bridge"].startswith("0.6.2; overlaps with FLUX_MEGATRON_ENABLE=1")
    assert "in_transformers()" in found["transformers"]
    for words in ("FLUX_MEGATRON_ENABLE=1", "in_transformers()", "torchtitan"):
        pages = [(docs / name).read_text() for name in ("frameworks.md", "pytorch.md")]
        assert any(words in page for page in pages), f"no page has {words}"


def test_failing_probe_does_not_silence_the_others(monkeypatch):
    def broken(wanted: Wanted) -> list[Finding]:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "PROBES", (packages.python, broken, packages.triton))
    python, failed, triton = examine(Wanted())
    assert (python.status, triton.subject) == ("ok", "triton")
    assert (failed.status, failed.text) == ("note", "not examined: OSError('no such device')")


@pytest.mark.parametrize(
    ("room", "probe", "wanted"),
    [(torch.cuda, "get_device_name", ("--gpus", "1")),
     (parser_signature, "releases", ("--megatron-lm", "x"))],
)  # fmt: skip
def test_a_demand_that_cannot_be_examined_is_not_met(monkeypatch, room, probe, wanted):
    """As where a GPU is lost, or a file system."""

    def lost(*_: object) -> None:
        raise RuntimeError("it is lost")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(room, probe, lost)
    shown = "not examined: RuntimeError('it is lost')"
    assert shown in run(*wanted, "--quiet", code=1)
    assert shown not in run("--quiet")


def test_ranks_that_cannot_open_each_others_memory_are_reported(monkeypatch):
    """Each in a container of its own, for example."""
    monkeypatch.setattr(machine.os, "getpid", lambda: 2**22 + 1)
    finding = found("shared memory", Wanted(gpus=0))
    assert finding.status == "missing"
    assert "/proc/4194305/fd/" in finding.text


def test_findings_are_lines_or_json_and_quietly_only_what_is_missing(tmp_path, monkeypatch, capsys):
    two = [Finding("a", "ok", "b"), Finding("c", "note", "d")]
    monkeypatch.setattr(doctor, "PROBES", (lambda wanted: two,))
    lines, file = ["ok", "a", "b", "note", "c", "d"], tmp_path / "found" / "doctor.json"
    assert run("--quiet") == ""
    assert run().split() == run("--json", str(file)).split() == lines
    for text in (run("--json", "-"), file.read_text()):
        assert [row["status"] for row in json.loads(text)] == ["ok", "note"]
    with pytest.raises(SystemExit):
        run("--json", str(tmp_path))
    said = f"{tmp_path}: is a directory; a file that can be written expected"
    assert said in capsys.readouterr().err


def test_the_data_set_helper_of_another_python_is_seen(tmp_path, monkeypatch):
    """Megatron would compile one that this Python cannot load, and fail while it builds data."""
    programs, checkout = tmp_path / "bin", tmp_path / "Megatron-LM"
    datasets = checkout / "megatron" / "core" / "datasets"
    datasets.mkdir(parents=True)
    names = ("make", "g++", "python3", "python3-config")
    for name in names:
        executable(programs / name, "#!/bin/sh\necho .cpython-27-other.so\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    helper = found("data set helper", Wanted(checkout=checkout))
    assert helper.status == "missing"
    assert ".cpython-27-other.so" in helper.text
    assert f"pip install -e {checkout}" in helper.remedy

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (programs / "python3-config").write_text(f"#!/bin/sh\necho {suffix}\n")
    (programs / "python3").write_text("#!/bin/sh\nexit 1\n")
    helper = found("data set helper", Wanted(checkout=checkout))
    assert (helper.status, helper.text) == ("missing", "no pybind11 of the python3 on PATH")
    with pytest.raises(BadInput, match="no pybind11 of the python3 on PATH; pip install -e "):
        doctor.check_script(checkout / "pretrain_gpt.py")
    (programs / "python3").write_text("#!/bin/sh\necho -I/include\n")
    # pyenv's are those of the folder, as Megatron's `.python-version` has it
    here = f"#!/bin/sh\n[ $PWD = {datasets} ] && echo {suffix}\n"
    (programs / "python3-config").write_text(here)
    doctor.check_script(checkout / "pretrain_gpt.py")
    assert found("data set helper", Wanted(checkout=checkout)).status == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found("data set helper", Wanted(checkout=checkout)).text == f"no {', '.join(names)}"
    (datasets / f"helpers_cpp{suffix}").touch()
    assert found("data set helper", Wanted(checkout=checkout)).text == "compiled"


def test_plans_that_the_user_has_measured_are_counted(tmp_path, monkeypatch):
    here = Environment("NVIDIA H200", "nvlink", "0", "0", "0", "0", "1", "these sources")
    plan = Plan("sequential")
    problem = Problem(Pattern.AG_GEMM, 512, 512, 512, "bfloat16", 4)
    entry = Entry(problem, here, plan, (Measured(plan, 1.0),), (), 0, 0.1, 12, "2026-01-31")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(environment, "of", lambda device: here)
    monkeypatch.setenv("FLUX_MEGATRON_CACHE", str(tmp_path))
    settings.reload()
    try:
        assert "0 of just this software" in found("measured plans").text
        plan_cache.keep(entry, tmp_path, torch.device("cuda", 0))
        plan_cache.opened.cache_clear()
        plans = found("measured plans")
        assert (plans.status, plans.text.split(", ")[1]) == ("ok", "1 of just this software")
    finally:
        monkeypatch.delenv("FLUX_MEGATRON_CACHE")
        settings.reload()
        plan_cache.opened.cache_clear()
