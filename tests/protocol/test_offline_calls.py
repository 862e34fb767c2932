"""Whole calls of the kernels for GPUs, by Triton's own launches, by direct ones of Python and by C:
the same driver calls in the same order, and the same parameters of kernels, but for the epoch.
Needs no GPU.
"""

from __future__ import annotations

import pytest
from compiled_apart import NEEDS_OFFLINE_CALLS, compiled_by

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    *NEEDS_OFFLINE_CALLS,
]
EPOCHS = {"gather": 70000, "scatter": 90000, "words": 110000, "rows beside": 130000}  # first call
FORK, JOIN = ["record", "follow"], ["record", "follow"]
PUSH = ["copy", "write"]
GATHER = [*FORK, *PUSH]
CALLS = {
    "hopper ag_gemm": [*GATHER, "launch", *JOIN],
    "hopper ag_gemm, rows in parts of K": [
        *FORK, *["copy rows", "copy rows", "write"] * 4, "launch", *JOIN,
    ],
    "hopper gemm_rs": [*FORK, "launch", *["wait", *PUSH] * 2, "write", "write", *JOIN],
    "hopper gemm_rs, by SM": ["launch"],
    "hopper ag_gemm, FP8": [*GATHER, "launch", *JOIN],
    "hopper gemm_rs, FP8": [*FORK, "launch", *["wait", *PUSH] * 2, "write", "write", *JOIN],
    "fused ag_gemm": [*GATHER, *PUSH, "launch", *JOIN],
    "fused gemm_rs": ["launch", "launch"],
    "pipelined ag_gemm": [*GATHER, *PUSH, "torch", "launch", "torch", "torch", *JOIN],
    "pipelined ag_gemm, FP8 in blocks": [  # whose scales go before the first signal
        *FORK, "copy", *PUSH, *PUSH, "torch", "launch", "torch", *JOIN,
    ],
    "pipelined beside, FP8 in blocks": [
        *FORK, "copy", *PUSH, "copy", "copy", "launch", "torch", "torch", *JOIN,
    ],
    "pipelined gemm_rs, FP8": [
        "torch", *FORK, *PUSH, "torch", *FORK, "write", "launch", *JOIN,
    ],
    "pipelined ag_gemm, one GEMM": [*GATHER, "copy", "launch", "torch", *JOIN],
    "pipelined gemm_rs": [
        "torch", *FORK, *PUSH, "torch", *FORK, "write", "launch", *JOIN,
    ],
    "pipelined gemm_rs, halves": [
        *["torch", *FORK, *PUSH] * 2, *["torch", *FORK, "write"] * 2, "launch", *JOIN,
    ],
    "pipelined gemm_rs, one GEMM": [
        "torch", "copy", *FORK, *PUSH, "write", "launch", *JOIN,
    ],
    # what a layer enqueues while it borrows rows is a kernel of torch's
    "hopper lent rows": [*GATHER, "launch", "launch", "torch", *JOIN],
    "fused lent rows": [*GATHER, "launch", "copy", *JOIN, "launch", "torch"],
    "pipelined lent rows": [*GATHER, "torch", "launch", "torch", "copy", *JOIN, "launch", "torch"],
    "hopper backward": [*GATHER, "launch", "copy", "launch", "torch", *JOIN],
    "fused backward": [*GATHER, "launch", "copy", "launch", "torch", *JOIN, "launch"],
    "pipelined backward": [
        *GATHER, "torch", *FORK, *PUSH, "torch", *FORK, "write",
        "copy", "launch", "torch", *JOIN, "launch", *JOIN,
    ],
    "low_latency ag_gemm": ["launch"],
    "low_latency ag_gemm, TMA": ["launch"],
    "low_latency gemm_rs": ["launch"],
    "low_latency gemm_ar": ["launch"],
    "low_latency gemm_ar, two phases": ["launch"],
    "low_latency lent rows": ["launch", "torch"],
    "low_latency backward": [*GATHER, "launch", "copy", "launch", "torch", *JOIN],
    "hopper gemm_ar": [*FORK, "launch", "wait", *PUSH, "write", *JOIN],
    "hopper gemm_ar, by SM": ["launch"],
    "hopper gemm_ar, exchanged": ["launch", "launch"],
    "fused gemm_ar": ["launch", "launch", *GATHER, "copy", "launch", "torch", *JOIN],
    "pipelined gemm_ar": [
        "torch", *FORK, *PUSH, "torch", *FORK, "write", "launch", *JOIN,
        *GATHER, "copy", "launch", "torch", *JOIN,
    ],
    "hopper column layer": [*GATHER, "launch", *JOIN],
    "hopper row layer": ["launch"],
    "hopper column layer, evaluated": [*GATHER, "launch", *JOIN],
    "hopper row layer, evaluated": ["launch"],
}  # fmt: skip


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, dict]:
    return compiled_by("offline_calls.py", tmp_path_factory.mktemp("offline"))


def without_epoch(call: dict, number: int) -> tuple[list, list]:
    """What a call has enqueued, a channel's name for the number of the call where it may stand: in
    signals and in parameters of kernels.
    """
    epochs = {first + number: channel for channel, first in EPOCHS.items()}
    done = [
        [epochs.get(value, value) if what == "write" else value for value in (what, *values)]
        for what, *values in call["done"]
    ]
    given = []
    for one in map(bytes.fromhex, call["given"]):
        words = [int.from_bytes(one[at : at + 4], "little") for at in range(0, len(one), 4)]
        given.append([epochs.get(word, word) for word in words])
    return done, given


@pytest.mark.parametrize("name", CALLS)
def test_c_does_what_python_does(calls, name):
    compiled, by_python, native, watched, by_triton = calls[name].values()
    for engine in calls[name].values():
        listed = engine in (compiled, native)
        assert [call["by_list"] for call in engine] == [listed] * len(engine)
    assert [what for what, *_ in by_python[0]["done"]] == CALLS[name]
    direct, of_triton = (
        [without_epoch(call, len(native) + number) for number, call in enumerate(engine, begun)]
        for begun, engine in ((0, watched), (len(watched), by_triton))
    )
    assert direct == of_triton, "what a direct launch hands over is what Triton's own does"
    assert direct[0] != direct[1] or name.startswith("low_latency"), "two regions"
    for number, call in enumerate(native):
        done, given = without_epoch(call, number)
        assert [what for what, *_ in done] == CALLS[name]
        # Python's call of the same parity, which uses the same memory
        assert (done, given) == direct[number % 2]
        assert call["made"] == native[0]["made"], "memory that C would not take anew"
        assert call["made"]
        assert given
        assert all({*EPOCHS} & {*one} for one in given) or name.startswith("low_latency")


def test_another_epoch_would_be_noticed(calls):
    call = calls["hopper ag_gemm"]["native"][4]
    assert without_epoch(call, 4) != without_epoch(call, 3)
