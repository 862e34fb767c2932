"""The rules between an arm's values: an arm that breaks one cannot run, or not as described."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

from flux_megatron.launch import parser_signature
from flux_megatron.launch.schema import File
from flux_megatron.launch.workload import Workload

Rule = tuple[str, str]  # dotted key, what is wrong

BYTE_VOCAB = 257  # of `flux-megatron train`: 256 bytes and the end-of-document token


def broken(workload: Workload, file: File, arguments: list[str]) -> Iterator[Rule]:
    """Every rule that the arm breaks, `too_large` aside. `arguments`: those of Megatron's that the
    file gives for it.
    """
    yield from _release(file, arguments)
    yield from _divisions(workload)
    yield from _experts(workload)
    yield from _cluster(workload, file)
    yield from _training(workload)
    if workload.arm == "te":
        yield from _te(workload)
    if file.program == "train":
        yield from _own_loop(workload)


def too_large(workload: Workload) -> Iterator[Rule]:
    """Whether the arm, which breaks no rule, needs more memory than its GPUs have."""
    from flux_megatron.launch import memory

    needed = memory.estimate(workload)
    if not needed.fits(workload.cluster):
        rule = f"arm {workload.arm} needs {needed.total / 2**30:.1f} GiB on its fullest GPU"
        given = f"cluster.memory_gib, {workload.cluster.memory_gib:g}"
        yield "training", f"{rule}, too much for {given}, less what the system reserves"


def _release(file: File, arguments: list[str]) -> Iterator[Rule]:
    """It must be one whose parser is recorded, and must know the arguments."""
    if file.megatron_lm not in (known := parser_signature.releases()):
        rule = (
            f"{file.megatron_lm!r} given, one of {known} expected: "
            "the arguments of no other are known"
        )
        yield "megatron_lm", rule
    elif file.program == "pretrain_gpt":
        for error in parser_signature.check(arguments, file.megatron_lm):
            yield "arguments", error
    elif arguments:
        yield "arguments", f"{arguments} given, program train takes none of Megatron's"


def _divisions(w: Workload) -> Iterator[Rule]:
    pairs = [
        ("model.hidden", "model.heads"),
        ("model.heads", "model.kv_heads"),
        *((f"model.{name}", "parallel.tp") for name in ("heads", "kv_heads", "hidden", "ffn")),
        ("model.layers", "parallel.pp x parallel.virtual_stages"),
        ("training.global_batch", "training.micro_batch x parallel.dp"),
    ]
    if w.parallel.sequence_parallel:
        pairs.append(("model.seq_length", "parallel.tp"))
    if w.model.moe:
        pairs += [("model.moe.experts", "parallel.ep"), ("parallel.dp", "parallel.ep")]
    for key, by in pairs:
        value = attrgetter(key)(w)
        divisor = math.prod(attrgetter(name)(w) for name in by.split(" x "))
        if value % divisor:
            yield key, f"{value} is not divisible by {by}, {divisor}"
    chunks = "parallel.pp (interleaved micro-batches)"
    if w.parallel.virtual_stages > 1 and w.micro_batches % w.parallel.pp:
        rule = f"{w.micro_batches} is not divisible by {chunks}, {w.parallel.pp}"
        yield "training.global_batch", rule


def _experts(w: Workload) -> Iterator[Rule]:
    """Expert parallelism is predicted within a node and without tensor parallelism."""
    ep, tp, moe = w.parallel.ep, w.parallel.tp, w.model.moe
    if moe is None:
        if ep > 1:
            yield "parallel.ep", f"{ep} given, model.moe expected with it"
        return
    if moe.topk > moe.experts:
        yield "model.moe.topk", f"{moe.topk} given, at most model.moe.experts, {moe.experts}"
    if tp > 1:
        yield "parallel.tp", f"{tp} given, 1 expected with model.moe"
    if ep > w.cluster.gpus_per_node:
        yield "parallel.ep", f"{ep} given, at most a node's GPUs, {w.cluster.gpus_per_node}"


def _cluster(w: Workload, file: File) -> Iterator[Rule]:
    """Overlap needs ranks that reach each other's memory: those of one node."""
    parallel, cluster = w.parallel, w.cluster
    tp, per_node = parallel.tp, cluster.gpus_per_node
    spans = f"{tp} ranks span nodes of {per_node}: arm {w.arm}"
    if parallel.world_size != cluster.gpus:
        degrees = f"tp {tp} x pp {parallel.pp} x dp {parallel.dp} = {parallel.world_size} GPUs"
        there = f"{cluster.nodes} x {per_node} = {cluster.gpus}"
        yield "parallel", f"{degrees}, the cluster has {there}"
    if cluster.nodes > 1 and cluster.nics is None:
        yield "cluster.nics", f"none given, {cluster.nodes} nodes need them"
    if per_node % tp and tp % per_node:
        rule = f"{tp} and cluster.gpus_per_node, {per_node}: one must divide the other"
        yield "parallel.tp", rule
    elif tp > per_node and w.arm == "te":
        yield "parallel.tp", f"{spans} overlaps only within one"
    elif tp > per_node and w.arm == "flux" and not file.tp_across_nodes:
        rule = "would run without overlap; say tp_across_nodes: true where that is meant"
        yield "parallel.tp", f"{spans} {rule}"


def _training(w: Workload) -> Iterator[Rule]:
    training = w.training
    if training.warmup_steps >= training.steps:
        dropped = f"{training.warmup_steps} dropped of training.steps, {training.steps}"
        yield "training.warmup_steps", f"{dropped}: none is left"
    if w.parallel.virtual_stages > 1 and w.parallel.pp == 1:
        yield "parallel.virtual_stages", "interleaving needs parallel.pp above 1"
    if training.overlap_param_gather:
        needed = ("distributed_optimizer", "overlap_grad_reduce")
        if not all(getattr(training, name) for name in needed):
            rule = " and ".join(f"training.{name}" for name in needed)
            yield "training.overlap_param_gather", f"needs {rule}"


def _te(w: Workload) -> Iterator[Rule]:
    if not w.parallel.sequence_parallel:
        rule = "false: arm te has nothing to overlap without sequence parallelism"
        yield "parallel.sequence_parallel", rule
    if w.cluster.gpu == "cpu":
        yield "arms.te", "TransformerEngine needs GPUs"


def _own_loop(w: Workload) -> Iterator[Rule]:
    """What the loop of `flux-megatron train` does not do."""
    model, training = w.model, w.training
    if w.arm == "te":
        yield "arms.te", "program train has no such arm"
    if model.kv_heads != model.heads:
        yield "model.kv_heads", f"{model.kv_heads} given, program train needs model.heads"
    if model.vocab != BYTE_VOCAB:
        yield "model.vocab", f"{model.vocab} given, program train reads bytes: {BYTE_VOCAB}"
    if model.moe:
        yield "model.moe", "program train has no experts"
    if w.parallel.pp > 1:
        yield "parallel.pp", f"{w.parallel.pp} given, program train has no pipeline"
    if training.recompute != "none":
        yield "training.recompute", f"{training.recompute} given, program train recomputes none"
    for name in ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        if getattr(training, name):
            yield f"training.{name}", "true given, program train has none"
