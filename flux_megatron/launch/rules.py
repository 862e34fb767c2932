"""The rules between an arm's values: an arm that breaks one cannot run, or not as described."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flux_megatron.launch import parser_signature
from flux_megatron.launch.schema import Head
from flux_megatron.launch.workload import Workload

Rule = tuple[str, str]  # dotted key, what is wrong

LARGEST = 2**31 - 1
MAY_BE_ZERO = ("training.seed", "training.warmup_steps", "cluster.nics.latency_us")
BYTE_VOCAB = 257  # of `flux-megatron train`: 256 bytes and the end-of-document token


def broken(workload: Workload, head: Head) -> list[Rule]:
    """Every rule that the arm breaks, `too_large` aside."""
    if found := list(_signs("", workload)):
        return found
    for rules in (_sizes, _experts, _batches, _cluster, _schedule, _arm):
        found += rules(workload)
    found += _nodes(workload, head)
    if head.program == "train":
        found += _own_loop(workload)
    return found


def too_large(workload: Workload) -> list[Rule]:
    """Whether the arm, which breaks no rule, needs more memory than its GPUs have."""
    from flux_megatron.launch import memory

    needed = memory.estimate(workload)
    if needed.fits(workload.cluster):
        return []
    rule = (
        f"arm {workload.arm} needs {needed.total / 2**30:.1f} GiB on its fullest GPU, too much for "
        f"cluster.memory_gib, {workload.cluster.memory_gib:g}, less what the system reserves"
    )
    return [("training", rule)]


def of_megatron(head: Head, arguments: list[str]) -> Iterator[Rule]:
    """The release must be one whose parser is recorded, and must know the arguments."""
    if head.megatron_lm not in (known := parser_signature.releases()):
        rule = (
            f"{head.megatron_lm!r} given, one of {known} expected: "
            "the arguments of no other are known"
        )
        yield "megatron_lm", rule
    elif head.program == "pretrain_gpt":
        for error in parser_signature.check(arguments, head.megatron_lm):
            yield "arguments", error
    elif arguments:
        yield "arguments", f"{arguments} given, program train takes none of Megatron's"


def _divides(key: str, value: int, by_key: str, by: int) -> Iterator[Rule]:
    if value % by:
        yield key, f"{value} is not divisible by {by_key}, {by}"


def _signs(prefix: str, section: object) -> Iterator[Rule]:
    """Numbers must be positive, and counts what an int of C holds."""
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _signs(f"{key}.", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            zero = key in MAY_BE_ZERO
            if value < 0 or (value == 0 and not zero):
                yield key, f"{value} given, {'0 or more' if zero else 'more than 0'} expected"
            elif isinstance(value, int) and value > LARGEST:
                yield key, f"{value} given, at most {LARGEST} expected"


def _sizes(w: Workload) -> Iterator[Rule]:
    model, tp = w.model, w.parallel.tp
    yield from _divides("model.hidden", model.hidden, "model.heads", model.heads)
    yield from _divides("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    for name in ("heads", "kv_heads", "hidden", "ffn"):
        yield from _divides(f"model.{name}", getattr(model, name), "parallel.tp", tp)
    if w.parallel.sequence_parallel:
        yield from _divides("model.seq_length", model.seq_length, "parallel.tp", tp)


def _experts(w: Workload) -> Iterator[Rule]:
    """Expert parallelism is predicted within a node and without tensor parallelism."""
    moe, parallel = w.model.moe, w.parallel
    if moe is None:
        if parallel.ep > 1:
            yield "parallel.ep", f"{parallel.ep} given, model.moe expected with it"
        return
    if moe.topk > moe.experts:
        yield "model.moe.topk", f"{moe.topk} given, at most model.moe.experts, {moe.experts}"
    if moe.imbalance < 1:
        yield "model.moe.imbalance", f"{moe.imbalance:g} given, at least 1 expected"
    if parallel.tp > 1:
        yield "parallel.tp", f"{parallel.tp} given, 1 expected with model.moe"
    if parallel.ep > w.cluster.gpus_per_node:
        yield (
            "parallel.ep",
            f"{parallel.ep} given, at most a node's GPUs, {w.cluster.gpus_per_node}",
        )
    yield from _divides("model.moe.experts", moe.experts, "parallel.ep", parallel.ep)
    yield from _divides("parallel.dp", parallel.dp, "parallel.ep", parallel.ep)


def _batches(w: Workload) -> Iterator[Rule]:
    training = w.training
    per_round = training.micro_batch * w.parallel.dp
    yield from _divides(
        "training.global_batch",
        training.global_batch,
        "training.micro_batch x parallel.dp",
        per_round,
    )
    if training.warmup_steps >= training.steps:
        yield (
            "training.warmup_steps",
            f"{training.warmup_steps} dropped of training.steps, {training.steps}: none is left",
        )


def _cluster(w: Workload) -> Iterator[Rule]:
    parallel, cluster = w.parallel, w.cluster
    if parallel.world_size != cluster.gpus:
        yield (
            "parallel",
            f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp} = {parallel.world_size} GPUs, "
            f"the cluster has {cluster.nodes} x {cluster.gpus_per_node} = {cluster.gpus}",
        )
    if cluster.nodes > 1 and cluster.nics is None:
        yield "cluster.nics", f"none given, {cluster.nodes} nodes need them"


def _nodes(w: Workload, head: Head) -> Iterator[Rule]:
    """Overlap needs ranks that reach each other's memory: those of one node."""
    tp, per_node = w.parallel.tp, w.cluster.gpus_per_node
    if per_node % tp and tp % per_node:
        yield (
            "parallel.tp",
            f"{tp} and cluster.gpus_per_node, {per_node}: one must divide the other",
        )
    elif tp > per_node and w.arm == "te":
        yield "parallel.tp", f"{tp} ranks span nodes of {per_node}: arm te overlaps only within one"
    elif tp > per_node and w.arm == "flux" and not head.tp_across_nodes:
        yield (
            "parallel.tp",
            f"{tp} ranks span nodes of {per_node}: arm flux would run without overlap; "
            "say tp_across_nodes: true where that is meant",
        )


def _schedule(w: Workload) -> Iterator[Rule]:
    parallel, training = w.parallel, w.training
    chunks = parallel.pp * parallel.virtual_stages
    yield from _divides(
        "model.layers", w.model.layers, "parallel.pp x parallel.virtual_stages", chunks
    )
    if parallel.virtual_stages > 1:
        if parallel.pp == 1:
            yield "parallel.virtual_stages", "interleaving needs parallel.pp above 1"
        yield from _divides(
            "training.global_batch",
            w.micro_batches,
            "parallel.pp (interleaved micro-batches)",
            parallel.pp,
        )
    if training.overlap_param_gather and not (
        training.distributed_optimizer and training.overlap_grad_reduce
    ):
        yield (
            "training.overlap_param_gather",
            "needs training.distributed_optimizer and training.overlap_grad_reduce",
        )


def _arm(w: Workload) -> Iterator[Rule]:
    if w.arm == "te" and not w.parallel.sequence_parallel:
        yield (
            "parallel.sequence_parallel",
            "false: arm te has nothing to overlap without sequence parallelism",
        )
    if w.arm == "te" and w.cluster.gpu == "cpu":
        yield "arms.te", "TransformerEngine needs GPUs"


def _own_loop(w: Workload) -> Iterator[Rule]:
    """What the loop of `flux-megatron train` does not do."""
    model, parallel, training = w.model, w.parallel, w.training
    if w.arm == "te":
        yield "arms.te", "program train has no such arm"
    if model.kv_heads != model.heads:
        yield "model.kv_heads", f"{model.kv_heads} given, program train needs model.heads"
    if model.vocab != BYTE_VOCAB:
        yield "model.vocab", f"{model.vocab} given, program train reads bytes: {BYTE_VOCAB}"
    if model.moe:
        yield "model.moe", "program train has no experts"
    if parallel.pp > 1:
        yield "parallel.pp", f"{parallel.pp} given, program train has no pipeline"
    if training.recompute != "none":
        yield "training.recompute", f"{training.recompute} given, program train recomputes none"
    for name in ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        if getattr(training, name):
            yield f"training.{name}", "true given, program train has none"
