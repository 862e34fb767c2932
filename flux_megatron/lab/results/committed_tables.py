"""The rows of the tables of docs/reference/tables.md, each made from rows of docs/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from flux_megatron.lab.results.committed import (
    MODELS,
    Case,
    Race,
    Row,
    gain,
    hidden_shares,
    iterations,
    model,
    races,
    rows,
)  # fmt: skip

Cells = Sequence[str]
CALLS = {"ag_gemm": "AG+GEMM", "gemm_rs": "GEMM+RS", "gemm_ar": "GEMM+AR", "backward": "backward"}


def _of_iterations(root: Path) -> Iterator[Cells]:
    for race in iterations(root / "docs/results"):
        arms = "stock", "tp_comm_overlap", "flux", "without_collectives"
        times = (race.time(arm, "median_ms") for arm in arms)
        middle, low, high = gain(race)
        *case, tokens, remark = race.case
        yield (race.gpus, *case, tokens + remark, *times, f"{middle} ({low} to {high})",
               str(race.arms["flux"].get("E") or "-"), race.commit)  # fmt: skip


def _of_experts_iterations(root: Path) -> Iterator[Cells]:
    def case_and_arm(_: str, row: Row) -> tuple[Case, str]:
        tp, dp = row["tp"], row["dp"]
        ranks = f"EP {tp * dp}" if tp == 1 else f"TP {tp}, EP {tp * dp}"
        sizes = str(row["layers"]), f"{row['M']} x {row['micro_batches']}"
        arm = row["arm"].removesuffix("_graphs")
        graphs = "-" if arm == row["arm"] else "yes"
        name = model(row["model"]) + ", once" * row.get("experts_once", False)
        name += f", skew {row['skew']}" if "skew" in row else ""
        return (ranks, name, *sizes, graphs, row["commit"]), arm  # hosts differ, so each run stays

    arms = "stock", "overlap_moe_expert_parallel_comm", "deepep", "flux", "without_collectives"
    results, names = root / "docs/results", ("experts_iterations",)
    for race in races(results, names, case_and_arm, ("stock", "flux")):
        times = (race.time(arm, "median_ms") for arm in arms)
        over = race.over("stock", "flux", "median_ms")
        if "speedup" in race.arms["flux"]:  # in turns
            middle, low, high = gain(race)
            over = f"{middle} ({low} to {high})"
        *case, commit = race.case
        yield race.gpus, *case, *times, over, commit


def _of_layers_of_experts(root: Path) -> Iterator[Cells]:
    names = "once", "by expert", "nccl", "nccl + sync", "deepep", "deepep + sync"
    for gpus, _, row in rows(root / "docs/results", "expert_layers"):
        us = {name: median(times) for name, times in row["times_us"].items()}
        sizes = f"{row['model']}, {row['tokens']} tokens, skew {row['skew']}"
        times = (f"{us[name]:.0f}" if name in us else "-" for name in names)
        over = (f"{us[name] / us['once']:.2f}" if name in us else "-" for name in names[-2:])
        yield gpus, str(row["tp"]), sizes, row["direction"], *times, *over, row["commit"]


def _of_layers(root: Path) -> Iterator[Cells]:
    cases: dict[tuple[str, int], dict[str, float]] = {}
    for gpus, _, row in rows(root / "docs/results", "layer_predictions"):
        if row["connections"] == "1":
            of = cases.setdefault((f"{gpus}, {model(row['model'])}", row["M"]), {})
            of[row["strategy"]] = row["measured_us"]
    for (name, M), us in cases.items():
        times = (f"{us[arm]:.1f}" for arm in ("megatron", "te", "auto"))
        yield name, str(M), *times, *(f"{us[a] / us['auto']:.3f}" for a in ("megatron", "te"))


def _of_fp8_layers(root: Path, names: tuple[str, ...], suffix: str = "") -> Iterator[Cells]:
    def case_and_arm(_: str, row: Row) -> tuple[Case, str] | None:
        if row["table"] != "fp8_layers":
            return None
        recipe = str(row["recipe"]).replace("current", "tensorwise")
        beside = "an all-reduce" if row["beside"] else "nothing"
        case = f"TP {row['tp']}", recipe, model(row["case"]), str(row["M"]), beside
        return case, row["candidate"]

    te, ours = f"te{suffix}", f"ours{suffix}"
    for race in races(root / "docs/results", names, case_and_arm, (te, ours)):
        times = (race.time(arm) for arm in (te, f"userbuffers{suffix}", ours, f"alone{suffix}"))
        yield race.gpus, *race.case, *times, race.over(te, ours), race.commit


def _of_fp8_calls(root: Path) -> Iterator[Cells]:
    kinds = {"": "fast sums", "split": "split sums", "blockwise": "blockwise",
             "wire": "fast sums, e4m3 on the wire"}  # fmt: skip

    def case_and_arm(_: str, row: Row) -> tuple[Case, str] | None:
        arm, _, kind = row.get("candidate", "").replace("hopper_gemm", "own").partition("_")
        if row["table"] != "fp8_operations" or kind not in kinds:
            return None
        return (_call(row["case"]), kinds[kind]), arm

    names = "fp8_operations", "fp8_blockwise"
    for race in races(root / "docs/results", names, case_and_arm, ("gemm", "serial", "ours")):
        times = (race.time(arm) for arm in ("gemm", "serial", "ours"))
        yield race.gpus, *race.case, *times, f"{race.arms['ours']['E']:.2f}", race.commit


def _call(case: str) -> str:
    pattern, sizes = case.split()
    return f"{CALLS[pattern]} {' x '.join(sizes.split('x'))}"


def _of_calls(root: Path) -> Iterator[Cells]:
    def case_and_arm(_: str, row: Row) -> tuple[Case, str] | None:
        if row.get("table") != "operators" or "," in row["commit"] or row["status"] != "ok":
            return None  # other plans or processes than a user's
        beside = row.get("collective", "").replace("_", "-") if row["beside"] else ""
        sizes = f"{row['M']} x {row['N_local']} x {row['K_local']} {row['layout']}"
        arm = row["candidate"]
        return (f"{CALLS[row['pattern']]} {sizes}", f"{beside}s" if beside else "nothing"), arm

    names = "beside", "gemm_ar", "few_rows", "untuned"
    for race in races(root / "docs/results", names, case_and_arm, ("serial", "auto")):
        ours = race.arms["auto"]
        peers = [row["median_us"] for row in race.arms.values() if row["role"] == "peer"]
        times = f"{ours['gemm_us']:.1f}", f"{ours['serial_us']:.1f}"
        peer = f"{min(peers):.1f}" if peers else "-"
        ratio = f"{ours['serial_us'] / ours['median_us']:.3f}"
        yield (race.gpus, *race.case, *times, peer, race.time("auto"),
               f"{ours['efficiency']:.2f}", ratio, race.commit)  # fmt: skip


def _of_slower_calls(root: Path) -> Iterator[Cells]:
    for connections in ("unset", "1"):
        us: dict[Case, dict[str, float]] = {}
        for _, _, row in rows(root / "docs/results", f"operators_connections-{connections}"):
            case = (row["suite"], row["pattern"], row["op"], str(row["M"]))
            us.setdefault(case, {})[row["candidate"]] = row["median_us"]
        for low, high in ((64, 512), (1024, 1024), (2048, 8192)):
            of = (one for case, one in us.items() if low <= int(case[-1]) <= high)
            found = [one["auto"] / one["serial"] for one in of if {"auto", "serial"} <= one.keys()]
            slower, clearly = (sum(r > bound for r in found) for bound in (1, 1.02))
            sizes = str(low) if low == high else f"{low} to {high}"
            yield (connections, sizes, str(len(found)), str(slower), str(clearly),
                   f"{max(found):.3f}")  # fmt: skip


def _of_hidden_shares(root: Path) -> Iterator[Cells]:
    for race in hidden_shares(root / "docs/results"):
        arms = (race.arms[arm]["efficiency"] for arm in ("auto", "te_ring", "async_tp"))
        yield *race.case, *(f"{share:.2f}" for share in arms)


def _of_plans(root: Path) -> Iterator[Cells]:
    speedups: dict[tuple[str, str, str, int, bool], list[float]] = {}
    for file in sorted((root / "configs/tuned").glob("*/*connections-1.json")):
        name, tp, _ = file.stem.split("_")
        for entry in json.loads(file.read_text(encoding="utf-8"))["entries"]:
            problem, measured = entry["problem"], entry["measured"]
            nccl = [m["median_us"] for m in measured if m["plan"]["strategy"] == "sequential"]
            best = [m["median_us"] for m in measured if m["plan"] == entry["plan"]]
            gpu = entry["environment"]["gpu"].split()[1]
            case = f"{problem['world_size']} x {gpu}", tp, name, problem["M"], problem["beside"]
            if nccl:
                speedups.setdefault(case, []).append(nccl[0] / best[0])
    for (gpus, _, name, M, beside), found in sorted(speedups.items()):
        least, most = f"{min(found):.2f}", f"{max(found):.2f}"
        yield (gpus, MODELS[name], str(M), "an all-reduce" if beside else "nothing",
               str(len(found)), least, f"{median(found):.2f}", most)  # fmt: skip


def _of_many_rows(root: Path) -> Iterator[Cells]:
    for gpus, _, row in rows(root / "docs/results", "dynamic_rows"):
        if row["case"] in ("ops", "nn"):
            layers = "operations" if row["case"] == "ops" else "modules, backward too"
            host = (f"{row[f'host_ms_{arm}']['median']:.1f}" for arm in ("ours", "nccl"))
            ratios = (f"{row[f'ratio_{which}']:.3f}" for which in ("median", "lowest"))
            yield (gpus, model(row["model"]), layers, "one" if row["repeat"] else "each its own",
                   "all-reduces" if row["beside"] else "nothing", *ratios, *host,
                   row["commit"])  # fmt: skip


def _of_machines(root: Path) -> Iterator[Cells]:
    """The fastest plan of each call, of its last run."""
    last: dict[Cells, list[Row]] = {}
    for gpus, _, row in rows(root / "docs/results", "machines"):
        if row["table"] == "machines":
            name, _, sizes = row["case"].partition(":")
            call = gpus, row["link"], row["max_connections"], CALLS[name], sizes.replace("x", " x ")
            if last.setdefault(call, [row])[0]["run"] != row["run"]:
                last[call] = []
            last[call].append(row)
    for case, found in last.items():
        best = min(found, key=lambda row: row["us"])
        times = (f"{best[name]:.0f}" for name in ("gemm_us", "collective_us", "serial_us", "us"))
        shares = (f"{best[name]:.2f}" for name in ("speed", "of_ideal"))
        yield *case, *times, best["candidate"], *shares, best["commit"]


def _of_apart_iterations(root: Path) -> Iterator[Cells]:
    def case_and_arm(_: str, row: Row) -> tuple[Case, str]:
        sizes = f"TP {row['tp']}", model(row["model"]), str(row["layers"])
        return (row["link"], *sizes, f"{row['M']} x {row['micro_batches']}"), row["arm"]

    for race in races(
        root / "docs/results", ("apart_iterations",), case_and_arm, ("stock", "flux")
    ):
        times = (race.time(arm, "median_ms") for arm in ("stock", "flux", "without_collectives"))
        E = f"{race.arms['flux']['E']:.2f}"
        yield race.gpus, *race.case, *times, race.over("stock", "flux", "median_ms"), E, race.commit


def _of_post_training(root: Path) -> Iterator[Cells]:
    for gpus, _, row in rows(root / "docs/results", "post_training"):
        name, layout = row["case"].split()
        gains = (row[f"speedup_{part}"] for part in ("log_probs", "train", "step"))
        shown = (f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in gains)
        ours = f"{row['overlapped']} of {row['calls']}"
        yield gpus, model(name), {"sp": "yes", "whole": "no"}[layout], *shown, ours, row["commit"]


def _of_others(root: Path) -> Iterator[Cells]:
    results = root / "docs/results"
    for race in races(results, ("generate",), _decoding, ("stock", "flux")):
        us = (f"{race.arms[arm]['ms_per_token'] * 1e3:.1f}" for arm in ("stock", "flux"))
        yield race.gpus, *race.case, *us, race.over("stock", "flux", "ms_per_token"), race.commit
    for race in races(results, ("expert_parallel",), _experts, ("all",)):
        us = race.arms["all"]["us"]
        yield (race.gpus, *race.case, f"{us['nccl']:.1f}", f"{us['hopper']:.1f}",
               f"{us['nccl'] / us['hopper']:.3f}", race.commit)  # fmt: skip
    for race in races(results, ("embedding_a2a",), _embedding, ("library", "fused")):
        yield _against_library(race, "fused")
    for race in races(results, ("own_kernel",), _own_kernel, ("library", "triton 4096")):
        yield _against_library(race, "triton 4096")


def _against_library(race: Race, ours: str) -> Cells:
    times = race.time("library"), race.time(ours)
    return race.gpus, *race.case, *times, race.over("library", ours), race.commit


def _decoding(_: str, row: Row) -> tuple[Case, str] | None:
    return (("decoding a token", f"batch {row['batch']}"), row["arm"]) if "arm" in row else None


def _experts(_: str, row: Row) -> tuple[Case, str] | None:
    case = row["operation"], f"{row['model']}, {row['tokens']} tokens, skew {row['skew']}"
    return None if "," in row["commit"] else (case, "all")


def _embedding(_: str, row: Row) -> tuple[Case, str]:
    sizes = f"batch {row['batch']}, {row['tables']} tables, pooling {row['pooling']}"
    case = f"embedding, {row['direction']}", f"{sizes}, {row['dtype']}"
    return case, row["candidate"]


def _own_kernel(_: str, row: Row) -> tuple[Case, str]:
    return ("all-gather and RMSNorm", f"{row['M']} x {row['N']}"), row["candidate"]


def _of_losses(root: Path) -> Iterator[Cells]:
    losses: dict[str, list[float]] = {}
    for file in sorted((root / "docs/results/h200x4").glob("train_*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()
        losses[file.stem.removeprefix("train_")] = [json.loads(line)["loss"] for line in lines]
    for first, others in (("flux", losses), ("stock", losses)):
        for second in others:
            if second not in ("flux", first):
                pairs = zip(losses[first], losses[second], strict=True)
                yield first, second, f"{fmean(abs(a - b) for a, b in pairs):.4f}"


TABLES: dict[str, Callable[[Path], Iterable[Cells]]] = {  # by the heading of the page
    "Whole iterations": _of_iterations,
    "Whole iterations with experts": _of_experts_iterations,
    "Layers of experts": _of_layers_of_experts,
    "One layer": _of_layers,
    "FP8: MLPs": lambda root: _of_fp8_layers(root, ("fp8_blockwise", "fp8_layers")),
    "FP8: MLPs from CUDA graphs": lambda root: _of_fp8_layers(root, ("fp8_graphs",), "_graph"),
    "FP8: calls": _of_fp8_calls,
    "Calls of shapes that nobody tuned": _of_calls,
    "Calls that are slower than NCCL and a GEMM": _of_slower_calls,
    "Share of the communication that is hidden": _of_hidden_shares,
    "Plans that ship": _of_plans,
    "Another M in every micro-batch": _of_many_rows,
    "Ranks that share no memory": _of_machines,
    "Iterations of ranks that share no memory": _of_apart_iterations,
    "Post-training": _of_post_training,
    "Other operations": _of_others,
    "Losses of runs that differ in the order of sums": _of_losses,
}
