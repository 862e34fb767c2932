"""Trains a small DLRM (Naumov et al., 2019) on data in Criteo's format; docs/pytorch.md.

torchrun --nproc-per-node 2 scripts/dlrm.py                       a GPU for each rank
TRITON_INTERPRET=1 torchrun --nproc-per-node 2 scripts/dlrm.py    no GPU: interpreted, slow
"""

from __future__ import annotations

import argparse
import os
import random
from itertools import cycle, islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flux_megatron import report
from flux_megatron.nn import ShardedEmbeddingBag

DENSE, TABLES = 13, 26  # columns of a line, behind its label
CLOSE = 1e-5  # losses in fp32: docs/tests.md


def generated(count: int, seed: int = 0) -> list[str]:
    """Lines as Criteo's: label, 13 integers, 26 categories of eight hex digits; some are missing.
    Half of the categories are one of four. The label depends on the first of both kinds.
    """
    made, lines = random.Random(seed), []
    for _ in range(count):
        dense = [made.choice(["", str(made.randint(-2, 200))]) for _ in range(DENSE)]
        kinds = [made.getrandbits(32) >> made.choice([0, 30]) for _ in range(TABLES)]
        chance = 0.2 + 0.3 * (kinds[0] % 2) + 0.3 * (dense[0] != "")
        texts = [f"{kind:08x}" * (made.random() > 0.05) for kind in kinds]
        lines.append("\t".join([str(int(made.random() < chance)), *dense, *texts]))
    return lines


def batch_of(lines: list[str], tables: slice, samples: slice, rows: int) -> tuple[Tensor, ...]:
    """Labels and dense features of this rank's samples; of its tables, indices and offsets of the
    whole batch. A missing category is an empty bag.
    """
    fields = [line.rstrip("\n").split("\t") for line in lines]
    labels = torch.tensor([float(one[0]) for one in fields[samples]])
    dense = torch.tensor([[float(v or 0) for v in one[1 : 1 + DENSE]] for one in fields[samples]])
    texts = [one[1 + DENSE + table] for table in range(TABLES)[tables] for one in fields]
    indices = torch.tensor([int(text, 16) % rows for text in texts if text], dtype=torch.int64)
    lengths = torch.tensor([int(text != "") for text in texts])
    return labels, dense.clamp(min=0).log1p(), indices, F.pad(lengths.cumsum(0), (1, 0))


class DLRM(nn.Module):
    """Whole MLPs on every rank, each table on one. Gives the logits of this rank's samples."""

    def __init__(self, rows: int, D: int, strategy: str, sparse: bool) -> None:
        super().__init__()
        self.bags = ShardedEmbeddingBag(TABLES, rows, D, strategy=strategy, sparse=sparse)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, D))
        width = D + TABLES * (TABLES + 1) // 2
        self.top = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.bags.weight.data.mul_(D**-0.5)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.cat([x[:, None], self.bags(indices, offsets)], 1)
        row, column = torch.triu_indices(TABLES + 1, TABLES + 1, 1, device=x.device)
        pairs = torch.bmm(features, features.mT)[:, row, column]
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


def train(
    lines, strategy, device, *, steps=20, batch=64, rows=1000, D=16, lr=0.1, sparse=False
) -> list[float]:
    """The loss of every step. All ranks read the same lines and begin with the same numbers."""
    torch.manual_seed(0)
    model = DLRM(rows, D, strategy, sparse).to(device)
    shared = [*model.bottom.parameters(), *model.top.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr)
    each, stream, losses = batch // dist.get_world_size(), cycle(lines), []
    samples = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    for _ in range(steps):
        given = batch_of([*islice(stream, batch)], model.bags.own_tables, samples, rows)
        labels, *features = (one.to(device) for one in given)
        loss = F.binary_cross_entropy_with_logits(model(*features), labels, reduction="sum") / batch
        optimizer.zero_grad()
        loss.backward()
        for parameter in shared:  # of tables they are whole: their owner saw the whole batch
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(total := loss.detach())
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="DLRM, fused beside unfused")
    parser.add_argument("--data", type=open, help="a file in Criteo's format; else generated")
    for name, value in (("steps", 20), ("batch", 64), ("rows", 1000), ("D", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sparse", action="store_true", help="sparse gradients of the tables")
    options = vars(parser.parse_args())
    data, count = options.pop("data"), options["steps"] * options["batch"]
    lines = [*islice(data, count)] if data else generated(count)
    if wrong := [line for line in lines or [""] if line.count("\t") != DENSE + TABLES]:
        parser.error(f"{wrong[0]!r} given, {1 + DENSE + TABLES} columns expected")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    plain, fused = (train(lines, name, device, **options) for name in ("sequential", "fused"))
    furthest = max(abs(a - b) for a, b in zip(plain, fused, strict=True))
    if dist.get_rank() == 0:
        for step, pair in enumerate(zip(plain, fused, strict=True)):
            print("step {:3} loss {:.6f} unfused {:.6f} fused".format(step, *pair))
        print(f"{report()}\nlosses are at most {furthest:.1e} apart, {CLOSE:.0e} allowed")
    dist.destroy_process_group()
    raise SystemExit(not furthest <= CLOSE)


if __name__ == "__main__":
    main()
