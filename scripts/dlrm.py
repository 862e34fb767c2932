"""Trains a small DLRM (Naumov et al., 2019) on data in Criteo's format; docs/dlrm.md.

torchrun --nproc-per-node 2 scripts/dlrm.py                       a GPU for each rank
TRITON_INTERPRET=1 torchrun --nproc-per-node 2 scripts/dlrm.py    no GPU: interpreted, slow
"""

from __future__ import annotations

import argparse
import math
import os
import random
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flux_megatron import report
from flux_megatron.nn import ShardedEmbeddingBag

DENSE, TABLES = 13, 26  # columns of a line, behind its label
CLOSE = 1e-5  # losses in fp32: docs/decisions/0007


def generated(count: int, seed: int = 0) -> list[str]:
    """Lines as Criteo's: label, 13 integers, 26 categories of eight hex digits; some are missing.
    Half of the categories are a few frequent ones. The label depends on the first of both kinds.
    """
    made = random.Random(seed)

    def line() -> str:
        dense = [made.choice(["", str(made.randint(-2, 200))]) for _ in range(DENSE)]
        rare = [made.getrandbits(32) for _ in range(TABLES)]
        kinds = [value % 4 if made.random() < 0.5 else value for value in rare]
        chance = 0.2 + 0.3 * (kinds[0] % 2) + 0.3 * (dense[0] != "")
        texts = ["" if made.random() < 0.05 else f"{kind:08x}" for kind in kinds]
        return "\t".join([str(int(made.random() < chance)), *dense, *texts])

    return [line() for _ in range(count)]


def batch_of(lines: list[str], tables: slice, samples: slice, rows: int) -> tuple[Tensor, ...]:
    """Labels and dense features of this rank's samples; of its tables, indices and offsets of the
    whole batch. A missing category is an empty bag.
    """
    fields = [line.rstrip("\n").split("\t") for line in lines]
    labels = torch.tensor([float(one[0]) for one in fields[samples]])
    dense = torch.tensor([[math.log1p(max(float(value or 0), 0)) for value in one[1 : 1 + DENSE]]
                          for one in fields[samples]])  # fmt: skip
    column = range(1 + DENSE, 1 + DENSE + TABLES)[tables]
    texts = [one[place] for place in column for one in fields]
    indices = torch.tensor([int(text, 16) % rows for text in texts if text], dtype=torch.int64)
    lengths = torch.tensor([int(text != "") for text in texts])
    return labels, dense, indices, F.pad(lengths.cumsum(0), (1, 0))


def mlp(*sizes: int) -> nn.Sequential:
    pairs = zip(sizes, sizes[1:], strict=False)
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Whole MLPs on every rank, each table on one."""

    def __init__(self, rows: int, D: int, strategy: str) -> None:
        super().__init__()
        self.bags = ShardedEmbeddingBag(TABLES, rows, D, strategy=strategy)
        self.bottom = mlp(DENSE, 64, D)
        self.top = mlp(D + (TABLES + 1) * TABLES // 2, 64, 1)
        with torch.no_grad():
            self.bags.weight.mul_(1 / math.sqrt(D))

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Logits of this rank's samples."""
        x = self.bottom(dense)
        features = torch.cat([x[:, None], self.bags(indices, offsets)], 1)
        row, column = torch.triu_indices(TABLES + 1, TABLES + 1, 1, device=x.device)
        products = torch.bmm(features, features.mT)[:, row, column]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def train(
    lines: list[str], strategy: str, device: torch.device, *, steps: int = 20, batch: int = 64,
    rows: int = 1000, D: int = 16, lr: float = 0.1,
) -> list[float]:  # fmt: skip
    """The loss of every step. All ranks read the same lines and begin with the same numbers."""
    torch.manual_seed(0)
    model = DLRM(rows, D, strategy).to(device)
    shared = [*model.bottom.parameters(), *model.top.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr)
    each, stream, losses = batch // dist.get_world_size(), cycle(lines), []
    samples = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    for _ in range(steps):
        given = batch_of([*islice(stream, batch)], model.bags.own_tables, samples, rows)
        labels, dense, indices, offsets = (one.to(device) for one in given)
        logits = model(dense, indices, offsets)
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / batch
        optimizer.zero_grad()
        loss.backward()
        for parameter in shared:  # of tables they are whole: their owner saw the whole batch
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a file in Criteo's format; else generated")
    for name, value in (("steps", 20), ("batch", 64), ("rows", 1000), ("D", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args())
    device = torch.device("cpu")
    if on_gpu := torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    data = options.pop("data")
    lines = data.read_text().splitlines() if data else generated(4 * options["batch"])
    plain, fused = (train(lines, name, device, **options) for name in ("sequential", "fused"))
    furthest = max(abs(a - b) for a, b in zip(plain, fused, strict=True))
    if dist.get_rank() == 0:
        for step, pair in enumerate(zip(plain, fused, strict=True)):
            print("step {:3} loss {:.6f} unfused {:.6f} fused".format(step, *pair))
        print(f"{report()}\nfurthest apart {furthest:.1e}: {'equal' * (furthest <= CLOSE)}")
    dist.destroy_process_group()
    raise SystemExit(not furthest <= CLOSE)


if __name__ == "__main__":
    main()
