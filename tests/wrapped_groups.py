"""Process groups as frameworks have them, of all ranks of the world."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import DEVICE
from torch.distributed import ProcessGroup

FORWARDED = [
    name
    for name in (
        "allgather", "_allgather_base", "all_gather_single", "allreduce", "alltoall_base",
        "barrier", "broadcast", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
        "_get_backend",
    )
    if hasattr(ProcessGroup, name)
]  # fmt: skip


def forwarding(inside: Callable[[Any], ProcessGroup]) -> Callable[[type], type]:
    """A class whose objects forward collectives to what is `inside` them."""

    def of(kind: type) -> type:
        for name in FORWARDED:

            def forward(self: Any, *given: Any, _name: str = name, **options: Any) -> Any:
                return getattr(inside(self), _name)(*given, **options)

            setattr(kind, name, forward)
        return kind

    return of


@forwarding(lambda self: self.group)
class Reloadable(ProcessGroup):
    """As slime's: no name, no devices; what is inside is destroyed and made anew."""

    def __init__(self, make: Callable[[], ProcessGroup]) -> None:
        self.make, self.group = make, make()
        super().__init__(rank=self.group.rank(), size=self.group.size())

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def destroy(self) -> None:
        dist.destroy_process_group(self.group)
        self.group = None

    def reload(self) -> None:
        self.group = self.make()


class Configured(Reloadable):
    """As torchft's: its rank is 0 everywhere, its name raises, torch never hears of what is inside
    and nobody destroys that.
    """

    def __init__(self, make: Callable[[], ProcessGroup]) -> None:
        super().__init__(make)
        ProcessGroup.__init__(self, 0, 1)

    def rank(self) -> int:
        return 0

    @property
    def group_name(self) -> str:
        raise ValueError("no name")

    def destroy(self) -> None:
        self.group = None


@forwarding(lambda self: self.held[0])
class Hidden(ProcessGroup):
    """It does not show what is inside."""

    def __init__(self) -> None:
        self.held = [listed()]
        super().__init__(self.held[0].rank(), self.held[0].size())

    def name(self) -> str:
        return self.held[0].name()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Named(Reloadable):
    """With the name of what is inside."""

    @property
    def group_name(self) -> str:
        return self.group.group_name


def listed() -> ProcessGroup:
    return dist.new_group([*range(dist.get_world_size())], timeout=timedelta(seconds=40))


_stores = 0


def unlisted() -> ProcessGroup:
    """Made of torch's parts, as `torch.distributed._dist2` and vLLM do; its store is its own."""
    global _stores
    _stores += 1
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"unlisted {_stores}", dist.distributed_c10d._get_default_store())
    group = ProcessGroup(store, rank, size)
    gpu = DEVICE == "cuda"
    backend = (
        dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        if gpu
        else dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=40))
    )
    kind = ProcessGroup.BackendType.NCCL if gpu else ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device(DEVICE), kind, backend)
    dist.barrier()  # a rank that lets go of it early would cut off one that still connects
    return group


def registered() -> ProcessGroup:
    """A framework's class that torch lists under a name, as `register` of torchft makes them."""

    class Listed(Reloadable):
        @property
        def group_name(self) -> str:
            return self.listed_as

        def _set_group_name(self, name: str) -> None:
            self.listed_as = name

    inside = listed()
    dist.Backend.register_backend(
        f"framework {id(inside)}", lambda *_: Listed(lambda: inside), devices=[DEVICE]
    )
    return dist.new_group([*range(dist.get_world_size())], backend=f"framework {id(inside)}")


MAKE: dict[str, Callable[[], ProcessGroup]] = {
    "reloadable": lambda: Reloadable(listed),
    "configured": lambda: Configured(unlisted),
    "twice wrapped": lambda: Named(lambda: Named(listed)),
    "named": lambda: Named(listed),
    "hidden": Hidden,
    "unlisted": unlisted,
    "registered": registered,
}
