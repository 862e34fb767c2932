"""The rules between an arm's values: an arm that breaks one cannot run, or not as described."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

from flux_megatron.integration import parser_signature
from flux_megatron.launch import memory
from flux_megatron.launch.errors import Rule
from flux_megatron.launch.schema import File
from flux_megatron.launch.workload import BYTE_VOCAB, Workload

# the one value that the loop of `flux-megatron train` can have
OWN_LOOP = {
    "model.vocab": BYTE_VOCAB, "parallel.pp": 1, "training.recompute": "none",
    "training.distributed_optimizer": False, "training.overlap_grad_reduce": False,
    "training.overlap_param_gather": False, "training.fp8": "none",
}  # fmt: skip


def broken(w: Workload, file: File, arguments: list[str]) -> list[Rule]:
    """Every rule that the arm breaks; its memory is only looked at where it keeps all others.

    `arguments`: those of Megatron's that the file gives for it.
    """
    found = [*_release(file, arguments), *_divisions(w)]
    found += [(key, rule) for wrong, key, rule in [*_parallel(w), *_training(w)] if wrong]
    if file.program == "train":
        found += _own_loop(w)
    if not found and not memory.fits(w):
        rule = f"arm {w.arm} needs {memory.needed(w) / 2**30:.1f} GiB on its fullest GPU"
        given = f"cluster.memory_gib, {w.cluster.memory_gib:g}"
        return [("training", f"{rule}, too much for {given}, less what the system reserves")]
    return found


def _release(file: File, arguments: list[str]) -> Iterator[Rule]:
    """It must be one whose parser is recorded, and must know the arguments."""
    if file.megatron_lm not in (known := parser_signature.releases()):
        rule = f"one of {known} expected: the arguments of no other are known"
        yield "megatron_lm", f"{file.megatron_lm!r} given, {rule}"
    elif file.program == "pretrain_gpt":
        for error in parser_signature.check(arguments, file.megatron_lm):
            yield "arguments", error
        if any(word.partition("=")[0] in ("--fp8-format", "--fp8-recipe") for word in arguments):
            yield "arguments", "--fp8-format given, training.fp8 expected: predictions read that"
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
    if w.parallel.virtual_stages > 1:  # interleaved micro-batches
        whole = "training.micro_batch x parallel.dp x parallel.pp"
        pairs.append(("training.global_batch", whole))
    if w.parallel.sequence_parallel:
        pairs.append(("model.seq_length", "parallel.tp"))
    for key, by in pairs:
        value = attrgetter(key)(w)
        divisor = math.prod(attrgetter(name)(w) for name in by.split(" x "))
        if value % divisor:
            yield key, f"{value} is not divisible by {by}, {divisor}"


def _parallel(w: Workload) -> Iterator[tuple[bool, str, str]]:
    """Between nodes arm flux overlaps by `signalled`, and userbuffers do not."""
    parallel, cluster, te = w.parallel, w.cluster, w.arm == "te"
    tp, per_node = parallel.tp, cluster.gpus_per_node
    degrees = f"tp {tp} x pp {parallel.pp} x dp {parallel.dp} = {parallel.world_size} GPUs"
    there = f"the cluster has {cluster.nodes} x {per_node} = {cluster.gpus}"
    yield parallel.world_size != cluster.gpus, "parallel", f"{degrees}, {there}"
    rule = f"none given, {cluster.nodes} nodes need them"
    yield cluster.nodes > 1 and cluster.nics is None, "cluster.nics", rule
    rule = f"{tp} and cluster.gpus_per_node, {per_node}: one must divide the other"
    yield bool(per_node % tp and tp % per_node), "parallel.tp", rule
    rule = f"{tp} ranks span nodes of {per_node}: arm te overlaps only within one"
    yield te and tp > per_node, "parallel.tp", rule
    rule = "arm te overlaps only where GPUs reach each other's memory"
    yield te and cluster.link.kind == "host", "cluster.link.kind", rule
    yield te and cluster.gpu == "cpu", "arm", "TransformerEngine needs GPUs"
    rule = "false given, true expected: arm te has nothing to overlap without it"
    yield te and not parallel.sequence_parallel, "parallel.sequence_parallel", rule
    rule = "interleaving needs parallel.pp above 1"
    yield parallel.virtual_stages > 1 and parallel.pp == 1, "parallel.virtual_stages", rule


def _training(w: Workload) -> Iterator[tuple[bool, str, str]]:
    training = w.training
    rule = f"{training.warmup_steps} dropped of training.steps, {training.steps}: none is left"
    yield training.warmup_steps >= training.steps, "training.warmup_steps", rule
    needed = training.distributed_optimizer and training.overlap_grad_reduce
    rule = "needs training.distributed_optimizer and training.overlap_grad_reduce"
    yield training.overlap_param_gather and not needed, "training.overlap_param_gather", rule
    if training.fp8 != "none":
        alone = w.parallel.tp > 1 and not w.parallel.sequence_parallel
        yield alone, "training.fp8", "needs parallel.sequence_parallel"
        yield training.dtype != "bfloat16", "training.fp8", "needs training.dtype bfloat16"
        yield w.cluster.gpu == "cpu", "training.fp8", "needs GPUs"


def _own_loop(w: Workload) -> Iterator[Rule]:
    if w.arm == "te":
        yield "arm", "program train has no such arm"
    for key, only in {**OWN_LOOP, "model.kv_heads": w.model.heads}.items():
        if (given := attrgetter(key)(w)) != only:
            yield key, f"{given} given, program train has nothing but {only}"
