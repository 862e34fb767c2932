"""The breakdown of an iteration, on traces and clocks that are made up."""

from __future__ import annotations

import inspect
import json
import stat
import time

import breakdown
import pytest

RANK = """
import json, pathlib, sys, time

gate = pathlib.Path(sys.argv[2])
while not gate.exists():
    time.sleep(0.01)
for i in range(1, 21):
    print(f" [2026-11-21 18:00:{i:02}] iteration {i}/ 20 | elapsed time per iteration (ms): 100 | "
          "global batch size: 8 | lm loss: 1.0 | number of skipped iterations: 0 | "
          "number of nan iterations: 0 |")
time.sleep(0.5)
gate.with_name("recorded.jsonl").write_text(json.dumps({"arm": "stock", "span_us": 7}) + "\\n")
"""
SMI = """#!/bin/sh
while true; do
    echo "1980, 690.00, 100"
    echo "300, 70.00, 3"
    sleep 0.02
done
"""


def trace(path, *events):
    """Of (category, name, begin, duration) in us."""
    keys = ("cat", "name", "ts", "dur")
    rows = [dict(zip(keys, event, strict=True)) for event in events]
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *rows]}))
    return path


def test_time_in_which_only_communication_runs(tmp_path):
    found = breakdown.shares(
        breakdown.activities(
            trace(
                tmp_path / "trace.json",
                ("kernel", "nvjet_hsh_128x256", 100, 50),
                ("kernel", "ncclDevKernel_AllGather_RING_LL", 140, 40),  # 30 of them alone
                ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 170, 15),  # 5 more
                ("cpu_op", "aten::mm", 0, 1000),
                ("kernel", "hopper_gemm_rs_kernel", 200, 100),  # after 15 in which nothing runs
            )
        )
    )
    assert found["span_us"] == 200
    assert found["idle_us"] == 15
    assert found["communication_alone_us"] == 35
    assert found["idle_before_us"]["hopper_gemm_rs_kernel"] == sum(found["idle_before_us"].values())
    assert found["by_kind_us"] == {"linear": 150, "collective": 40, "copy": 15}
    assert [us for _, us in found["in_turn_us"]] == [50, 40, 100]
    assert next(iter(found["longest_us"].items())) == ("hopper_gemm_rs_kernel", 100)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster<", "optimizer"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>", "optimizer"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, NormTwo", "optimizer"),
        ("norm_backward_kernel", "norm"),
        ("void transformer_engine::normalization::rmsnorm_fwd_general_kernel<", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add", "other"),
        ("reduce_received_kernel", "sum of parts"),
        ("wait_sources_kernel", "wait"),
    ],
)
def test_kinds(name, kind):
    assert breakdown.Activity(name, 0, 1).kind == kind


def test_rows_of_a_run(tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text(RANK)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(breakdown, "RANK", str(tmp_path / "rank.py"))
    monkeypatch.setattr(breakdown.iterations, "machine_of", lambda *_: {"gpu": "none"})
    experiments = breakdown.iterations.EXPERIMENTS[:1]
    monkeypatch.setattr(breakdown.iterations, "EXPERIMENTS", experiments)
    monkeypatch.setattr(breakdown, "sustained_gemm", lambda: {"what": "sustained_gemm"})
    breakdown.main(tmp_path, tmp_path / "rows.jsonl", tp=2, M="2048", micro_batches=8, layers=2)
    gemm, iteration, clocks = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert gemm["what"] == "sustained_gemm"
    assert (iteration["what"], iteration["M"], iteration["arm"]) == ("breakdown", 2048, "stock")
    assert (iteration["model"], iteration["micro_batches"]) == ("gpt3-175b-2-layers", 8)
    assert (clocks["what"], clocks["sm_mhz"], clocks["watts"]) == ("clocks", 1980, 690)


def test_a_recorded_step_keeps_its_parameters(tmp_path):
    """The step check finds `optimizer` among them."""

    def train_step(data, optimizer):
        return optimizer

    recording = breakdown.record_iterations(train_step, tmp_path / "rows.jsonl")
    assert list(inspect.signature(recording).parameters) == ["data", "optimizer"]
    assert recording(1, optimizer=2) == 2


def test_idle_gpus_say_nothing_of_clocks(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.replace("100", "20"))
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with breakdown.clocks() as seen:
        time.sleep(0.3)
    assert seen == []
