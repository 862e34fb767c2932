"""Metrics of overlap in Megatron-LM's log: a line after its own, and scalars in its writers.

Megatron-LM's training loop finds the functions that are replaced by their names in its module.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
from collections import Counter
from typing import Any

from flux_megatron.integration.comparison import Comparison, alternate
from flux_megatron.integration.coverage import count_layers
from flux_megatron.integration.replaced import around
from flux_megatron.integration.step_check import confirm_steps
from flux_megatron.overlap.report import report

TRAINING = "megatron.training.training"


def install(compare: int | None, chosen: tuple[str, ...] | None = None) -> None:
    """Log, count the layers that were `chosen`, None for all, and alternate blocks of `compare`
    iterations if given. Another call changes nothing.

    A program without Megatron-LM's training loop logs nothing; `ValueError` if it is to compare.
    """
    training = sys.modules.get(TRAINING)
    if training is not None:
        _install(training, compare, chosen)
    elif compare:
        raise ValueError(f"--flux-compare given, but {TRAINING}, whose loop it needs, is not there")


@functools.cache
def _install(training: Any, compare: int | None, chosen: tuple[str, ...] | None) -> None:
    confirm_steps(training)
    count_layers(training, chosen)
    comparison = alternate(training, compare) if compare else None
    log_with(training, comparison)
    if comparison is not None:
        atexit.register(_log_at_exit, comparison)


def log_with(training: Any, comparison: Comparison | None) -> None:
    """Let `training_log` of this module log our metrics too, when it logs."""
    signature = inspect.signature(training.training_log)
    log = MetricsLog(training, comparison)

    @around(training, "training_log")
    def logging_ours(original: Any, *given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        log.iterations += 1
        arguments = signature.bind(*given, **named).arguments
        iteration = arguments["iteration"]
        # 0.16 and newer log the first iteration of a run too
        first = arguments.get("is_first_iteration", False)
        if first or iteration % training.get_args().log_interval == 0:
            log.write(iteration)
        return result


class MetricsLog:
    """Logs the calls since its last line; counts are those of the rank that Megatron logs on."""

    def __init__(self, training: Any, comparison: Comparison | None) -> None:
        self._training = training
        self._comparison = comparison
        self._before = report()
        self.iterations = 0  # since the last line
        self._pairs = 0  # of blocks, when the comparison was last logged

    def write(self, iteration: int) -> None:
        now, before = report(), self._before
        self._before = now
        calls, overlapped = now.total - before.total, now.overlapped - before.overlapped
        fallbacks = Counter(now.fallbacks) - Counter(before.fallbacks)
        new = [f"{p}: {why}" for p, why in sorted(fallbacks.keys() - before.fallbacks.keys())]
        workspace, layers = now.workspace_bytes / 2**20, now.layers
        self.iterations = 0
        self._training.print_rank_last(
            (f" flux: ours {layers.ours} of {layers.total} layers |" if layers else " flux:")
            + f" {overlapped} of {calls} calls overlapped | {fallbacks.total()} fallbacks"
            + (f" ({'; '.join(new)})" if new else "")
            + f" | workspace {workspace:.1f} MiB"
        )
        scalars = {
            "flux/overlapped-calls": overlapped,
            "flux/fallbacks": fallbacks.total(),
            "flux/workspace-MiB": workspace,
        }
        if layers is not None:
            scalars |= {"flux/layers-ours": layers.ours, "flux/layers": layers.total}
        self._write_scalars(scalars, iteration)
        self._log_comparison()

    def _write_scalars(self, scalars: dict[str, float], iteration: int) -> None:
        writer = self._training.get_tensorboard_writer()
        wandb_writer = self._training.get_wandb_writer()
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb_writer is not None:
            wandb_writer.log(scalars, iteration)

    def _log_comparison(self) -> None:
        result = self._comparison.result() if self._comparison else None
        if result is not None and result.pairs > self._pairs:
            self._pairs = result.pairs
            self._training.print_rank_last(f" flux: {result}")


def _log_at_exit(comparison: Comparison) -> None:
    """On the last rank, as before; torch.distributed may be gone by now."""
    result = comparison.result()
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    if int(os.environ.get("RANK", "0")) == last:
        pair = "no pair of blocks was completed, so stock and fused are not compared"
        print(f" flux: {result or pair}", flush=True)
