"""Every command with what it cannot work with: one line that says why, and the exit status.

A row is the words of a command, and what its only line has. They run in a folder with the files of
`FILES`; no GPU is there. Commands `train` and `generate` have a table of their own.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from started import python

pytest.importorskip("pydantic")

from typer.testing import CliRunner

from flux_megatron import machine, option_values
from flux_megatron.cli import app

ROOT = Path(__file__).parents[1]
FILES = {
    "bytes.jsonl": b"\xff\xfe\x00\x80",
    "torn.yaml": "a: [1",
    "empty.yaml": "",
    "words.yaml": "just words",
    "endless.yaml": "model: &m {layers: *m}",
    "null.yaml": 'base: "\\0"',
    "file": "a file, where a folder is asked for",
    "folder/in_it": "",
    "script.py": "",
    "run/experiment.json": '{"format": 1, "experi',
    "rounds/round-2.bak/experiment.json": "",
    "old/experiment.json": json.dumps({"format": 0}),
}
TUNE_MODEL = "tune --device cpu"
MEGATRON = "--hidden-size 64 --num-attention-heads 4"
PAPER = "simulate paper/gpt3-175b_a100-pcie"
TINY = "launch cpu/tiny --run-dir new"
GPT = "launch paper/gpt3-175b_a100-pcie --run-dir new"
ON_CPU = "tries it out on the CPU"
LONG = "x" * 256  # a name that no file can have

VALUES = {  # that an option does not take: the line names both
    "tune --suite gpt3-175b": ["--tp 1", "--cuda-max-connections -1", "--scale 0"],
    "bench": ["--rounds many", "--tp 0"],
    "bench operations": ["--rounds 0"],
    "run": ["--nproc-per-node 0 script.py"],
    "simulate --gpu H100": ["--dp 0", "--hidden -8"],
    TINY: ["--alternate -1"],
    "doctor": ["--strategies 0"],
}
WITH_DEVICE = ["tune --suite gpt3-175b {}", "bench {}", "run {} script.py"]
ROWS = [
    *[(f"{words} {value}", *value.split()[:2]) for words, some in VALUES.items() for value in some],
    *[(words.format("--device tpu"), "--device 'tpu' given, one of cuda, cpu expected")
      for words in WITH_DEVICE],
    ("bench --rounds 3 --rounds -7", "'--rounds'", "-7"),
    # tune
    ("tune --M", "flux-megatron tune: Option '--M' requires an argument"),
    ("tune", "one of --suite, --hidden and Megatron"),
    ("tune --suite gpt3-175b", "--tp 2: as many GPUs expected, 0 found", ON_CPU),
    ("tune --suite gpt3", "--suite 'gpt3' given", "one of gpt3-175b, llama2-70b"),
    ("tune --suite gpt3-175b --dtype fp8", "--dtype 'fp8' given", "bfloat16, float16, float32"),
    ("tune --suite gpt3-175b --M abc", "--M 'abc' given, whole numbers above 0 with commas"),
    ("tune --suite gpt3-175b --M -64", "--M '-64' given"),
    ("tune --suite gpt3-175b --device cpu --tp 17", "--tp 17 given, at most 16 on the CPU"),
    ("tune --suite gpt3-175b --device cpu --tp 7", "widths [24, 72,", "of the 7 ranks expected"),
    ("tune --suite gpt3-175b --device cpu --M 63", "--M [63] given, multiples of the 2 ranks"),
    ("tune --suite gpt3-175b --device cpu --scale 5", "scale 5 given, a divisor of"),
    ("tune --suite gpt3-175b --device cpu --scale 1", "64 x 18432 x 12288", "too large"),
    ("tune --suite gpt3-175b --device cpu --out file", "--out file: file exists"),
    ("tune --suite gpt3-175b --device cpu --out /proc/new", "--out /proc/new: no such file"),
    (f"{TUNE_MODEL} --hidden 64 --ffn 64", "a model's widths need --heads too"),
    (f"{TUNE_MODEL} --vocab 64", "a model's widths need --hidden, --ffn, --heads too"),
    (f"{TUNE_MODEL} --hidden 66 --ffn 64 --heads 4", "66 wide with 4 heads given", "--head-dim"),
    (f"{TUNE_MODEL} --hidden 64 --ffn 64 --heads 4 --kv-heads 3", "3 key-value heads", "divisor"),
    (f"{TUNE_MODEL} --hidden 64 --ffn 63 --heads 4", "ffn 63 given, a multiple of the 2 ranks"),
    (f"{TUNE_MODEL} --hidden 64 --ffn 64 --heads 4 --vocab 65", "vocab 65 given, a multiple of"),
    (f"{TUNE_MODEL} --hidden 64 --ffn 64 --heads 4 --M 7", "--M [7] given, multiples of the 2"),
    (f"{TUNE_MODEL} --hidden 64 --ffn 64 --heads 4 --scale 2", "--scale 2 given without --suite"),
    (f"{TUNE_MODEL} --hidden 64 --ffn 64 --heads 4 -- {MEGATRON}", "one of --suite, --hidden and"),
    (f"{TUNE_MODEL} word", "'word' given, Megatron's arguments behind -- expected"),
    (f"{TUNE_MODEL} -- --hidden-size 64", "--num-attention-heads expected", "'--hidden-size 64'"),
    (f"{TUNE_MODEL} -- --hidden-size x", "--hidden-size: 'x' given, a whole number above 0"),
    (f"{TUNE_MODEL} -- {MEGATRON} --num-query-group 2", "--num-query-group given, --num-query-gr"),
    (f"{TUNE_MODEL} -- {MEGATRON} --num-query-groups 2", "2 given without --group-query-attent"),
    (f"{TUNE_MODEL} --tp 4 -- {MEGATRON} --tensor-model-parallel-size 2",
     "--tp 4 and --tensor-model-parallel-size 2 given"),
    # bench
    ("bench", "--tp 1: as many GPUs expected, 0 found", "`flux-megatron bench --device cpu`"),
    ("bench --candidates fusd", "--candidates 'fusd' given, fused? one of auto, fused,"),
    ("bench --candidates auto,megatrn", "--candidates 'megatrn' given, megatron?"),
    ("bench --suite gpt4", "--suite 'gpt4' given", "gpt3-175b"),
    ("bench --pattern ag_gem", "--pattern 'ag_gem' given, ag_gemm? one of"),
    ("bench --device cpu --shapes 'gemm_r 4x6x8'", "--shapes 'gemm_r' given, gemm_rs? one of"),
    ("bench --device cpu --shapes 'ag_gemm 4x6'", "--shapes 'ag_gemm 4x6' given, PATTERN MxNxK"),
    ("bench --device cpu --shapes 'gemm_rs 3x6x8'", "M a multiple of the 2 ranks expected"),
    ("bench --M 1k", "--M '1k' given"),
    ("bench --device cpu --M 63", "M [63] given, multiples of the 2 ranks expected"),
    ("bench --device cpu --M 8192 --scale 1", "8192 x 18432 x 12288", "--scale 512"),
    ("bench --device cpu --tp 4 --suite llama2-70b --scale 1024", "cannot be split"),
    ("bench --device cpu --scale 7", "scale 7 given, a divisor of"),
    ("bench --time-limit -1", "--time-limit -1 given, a finite number of seconds"),
    ("bench --device cpu --out file", "--out file: file exists"),
    ("bench operations", "--tp 1: as many GPUs expected, 0 found", ON_CPU),
    ("bench operations --device cpu conv", "operations ['conv'] given"),
    ("bench operations --device cpu --time-limit inf", "--time-limit inf given"),
    ("bench operations --device cpu --out file/rows", "--out file/rows: ", "expected"),
    # run
    ("run nope.py", "nope.py: no such file"),
    ("run script.py", "no megatron.training beside script.py or on PYTHONPATH"),
    # simulate
    ("simulate", "an experiment, or --gpu H100"),
    ("simulate --gpu H900", "--gpu H900: one of H200, H100"),
    ("simulate --gpu H100 --ffn 7", "model.ffn: 7 is not divisible by parallel.tp, 4"),
    ("simulate cpu/tiny --gpu H100", "cpu/tiny: no --gpu, --tp, --hidden"),
    ("simulate cpu/tiny", "gpu 'cpu' on memory given"),
    ("simulate --gpu H100 --hidden 64", "--hidden 64: at least 128 expected"),
    ("simulate nope", "nope: one of cpu/tiny, "),
    ("simulate paper/gpt3-175b_a100-pci", "paper/gpt3-175b_a100-pcie? one of "),
    ("simulate torn.yaml", "torn.yaml: not YAML"),
    ("simulate none.yaml", "none.yaml: No such file"),
    ("simulate endless.yaml", "endless.yaml: not YAML: found unconstructable recursive node"),
    ("simulate null.yaml", "embedded null byte"),
    (f"{PAPER} --set 'model=&m {{layers: *m}}'", "--set: model: not YAML"),
    (f"{PAPER} --arm nope", "arms", "['nope'] given"),
    (f"{PAPER} --set nope", "--set: 'nope' given, key=value expected"),
    (f"{PAPER} --set training.micro_batch=7", "training.global_batch"),
    (f"{PAPER} --set parallel.tp=0",
     "a100-pcie: parallel.tp: Input should be greater than 0, 0 given"),
    (f"{PAPER} --set 'parallel.tp=[1'", "parallel.tp: not YAML: '[1'"),
    (f"{PAPER} --json folder", "--json folder: is a directory; a file that can be written"),
    (f"{PAPER} --json loop", "--json loop: too many levels of symbolic links"),
    (f"{PAPER} --json /proc/new/a.json", "--json /proc/new/a.json: "),
    ("simulate study/dlrm-128-nodes --arm flux", "expected with a study"),
    # launch
    ("launch nope", "nope: one of cpu/tiny, "),
    ("launch cpu/tini --run-dir new", "cpu/tini: cpu/tiny? one of cpu/tiny"),
    ("launch study/dlrm-128-nodes", "a study, which `flux-megatron simulate` alone takes"),
    (f"{GPT} --sbatch gpus-per-node=a100:4", "gpus-per-node=8 expected"),
    (f"{GPT} --megatron-lm folder", "folder has no pretrain_gpt.py"),
    (f"{GPT} --megatron-lm folder --local", "128 GPUs needed on this machine, 0 found",
     "an experiment of 16 nodes is for --submit"),
    (f"{TINY} --sbatch nodes=3", "--sbatch nodes=3 given, nodes=2 expected", "cluster.nodes"),
    (f"{TINY} --sbatch ntasks-per-node=8", "ntasks-per-node=1 expected"),
    (f"{TINY} --sbatch array=0-3", "--sbatch array given: one job trains all arms", "--arm ch"),
    (f"{TINY} --sbatch N=2", "--sbatch N: 'N' given, the long name of an option, as cpus-per-"),
    (f"{TINY} --sbatch =1", "--sbatch '=1' given, KEY=VALUE expected"),
    (f"{TINY} --env WORD", "--env 'WORD' given, KEY=VALUE expected"),
    (f"{TINY} --arm te", "arms ['te'] given, some of ['megatron'"),
    (f"{TINY} --set parallel.tp", "key=value expected"),
    (f"{TINY} --set training.steps=-1", "training.steps: Input should be greater than 0, -1 given"),
    (f"{TINY} --site none.yaml", "none.yaml: No such file"),
    (f"{TINY} --site torn.yaml", "torn.yaml: not YAML"),
    (f"{TINY} --site bytes.jsonl", "bytes.jsonl: not a text file"),
    (f"{TINY} --data-path nowhere", "--data-path", "nowhere given, a folder of text files"),
    (f"{TINY} --data-path {LONG}", f"--data-path {LONG} given, a folder of text files expected"),
    (f"{TINY} --resume", "new is no run folder"),
    (f"launch cpu/tiny --resume --run-dir {LONG}", f"{LONG} is no run folder"),
    (f"launch cpu/tiny --run-dir {LONG}", "--run-dir", "file name too long; a folder that can be"),
    (f"{TINY} --env A=\udcff", "A=\\udcff\" given, UTF-8 expected"),
    (f"{GPT} --megatron-lm {LONG}", f"{LONG} has no pretrain_gpt.py"),
    (f"{GPT} --data-path /{LONG}", "--megatron-lm: none given"),
    (f"{TINY} --dry-run --submit", "one of --dry-run, --submit and --local expected"),
    (f"{TINY} --submit --local", "one of --dry-run, --submit and --local expected"),
    ("launch cpu/tiny --run-dir loop", "--run-dir", "loop: file exists; a folder"),
    (f"{TINY} --set training.steps=1000000000000000000000", "training.steps: ", "2147483647, 1000"),
    ("launch cpu/tiny --run-dir /proc/new", "--run-dir /proc/new: no such file"),
    ("launch node/small_h200 --run-dir new --local", "4 GPUs needed on this machine, 0 found"),
    (GPT, "--megatron-lm: none given, a checkout of core_v0.16.1 needed"),
    # results
    ("results nowhere", "nowhere is no run folder"),
    ("results file", "file is no run folder"),
    (f"results {LONG}", f"{LONG} is no run folder"),
    ("results rounds", "rounds is no run folder"),
    ("results run", "run/experiment.json: "),
    ("results old", "old/experiment.json: format: Input should be 1, 0 given"),
    ("results folder --loss-bound -1", "--loss-bound -1 given"),
    # the others
    ("patch check nowhere", "nowhere is no checkout of Megatron-LM"),
    ("patch undo file", "file is no checkout of Megatron-LM"),
    ("doctor --need foo", "--need", "'foo'", "transformer_engine"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        file = made / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (made / "loop").symlink_to("loop")
    return made


@pytest.fixture(autouse=True)
def place(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without nvidia-smi
    monkeypatch.delenv("FLUX_MEGATRON_LM", raising=False)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bad_input(row, folder, capfd):
    words, *parts = row
    done = CliRunner().invoke(app, shlex.split(words))
    said = done.output + "".join(capfd.readouterr())
    assert done.exit_code == 2, said
    assert said.strip(), "silent"
    assert len(said.strip().splitlines()) == 1, said
    for part in parts:
        assert part in said
    assert not (folder / "new").exists()


def test_a_disk_that_fills_up_is_named_with_its_option(folder):
    """It takes a file, and nothing that is in it."""
    done = CliRunner().invoke(app, shlex.split(f"{PAPER} --json /dev/full"))
    assert done.exit_code == 1
    assert done.stderr == "--json /dev/full: /dev/full not written: no space left on device\n"


def test_a_full_disk_is_seen_before_the_work(folder, monkeypatch):
    no_file = mock.MagicMock()
    write = no_file.return_value.__enter__.return_value.write
    write.side_effect = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(option_values.tempfile, "TemporaryFile", no_file)
    done = CliRunner().invoke(app, shlex.split(TINY.replace("new", "folder/full")))
    assert done.exit_code == 2
    assert "folder/full: no space left on device; a folder that can be written" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed, folder):
    """No file of ours gets their number, and none of them is None."""
    program = """
import sys
from flux_megatron.cli import app
@app.command()
def one():
    assert [sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno()] == [0, 1, 2]
app()
"""
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} one {closed}"
    done = subprocess.run(line, shell=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("--version", ""), ("doctor --help", "1"), ("launch cpu/tiny --dry-run", ""), (PAPER, "1"),
     (f"{PAPER} --json -", "")],
)  # fmt: skip
def test_a_stdout_that_cannot_be_written_is_said_in_one_line(words, unbuffered, folder):
    """A full disk, also where the text would only be written when Python ends; and a pipe that
    nobody reads any more, of which nothing is said.
    """
    command = [sys.executable, "-m", "flux_megatron", *words.split()]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    read, pipe = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    for stdout, said in ((full, "stdout not written: no space left on device\n"), (pipe, "")):
        done = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, env=variables, text=True, timeout=60
        )
        os.close(stdout)
        assert (done.returncode, done.stderr) == (1, said)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("words", "strategy", "part"),
    [
        ("run nope.py", "auto", "nope.py: no such file"),
        ("tune --suite gpt3-175b", "auto", "as many GPUs expected, 0 found"),
        ("bench --device cpu --out rows", "fast",
         "FLUX_MEGATRON_STRATEGY='fast', expected one of auto, fused, pipelined"),
    ],
)  # fmt: skip
def test_a_process_ends_as_soon(words, strategy, part, folder):
    """Without torch, whose import alone takes 3 s: of CPU time, nothing here waits for anything."""
    variables = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"FLUX_MEGATRON_STRATEGY": strategy}
    begin = cpu_s()
    done = python("-m", "flux_megatron", *words.split(), code=2, folder=folder, **variables)
    assert not done.stdout
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert cpu_s() - begin < 2
