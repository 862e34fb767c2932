"""The steps of a run on one rank: schedule, optimizer, metrics, checkpoints, an orderly end."""

from __future__ import annotations

import math
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.pipeline_parallel import get_forward_backward_func
from rich.console import Console

from flux_megatron.errors import RunFailed
from flux_megatron.lab.train import checkpoint, curves, run_folder
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.data import microbatches
from flux_megatron.lab.train.display import StepDisplay, summary_table
from flux_megatron.lab.train.model import Trainee
from flux_megatron.lab.train.rank_counts import counts_of_all_ranks
from flux_megatron.overlap.report import report, reset_report
from flux_megatron.symm.step import confirm_step


class LossNotFinite(RunFailed):
    """Training has diverged. The last checkpoint is from before that."""


class StopRequest:
    """Remembers SIGTERM or SIGINT until the step is done; a second one acts as if without us."""

    def __init__(self) -> None:
        self.requested = False
        self.defaults = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, _: object) -> None:
        self.requested = True
        signal.signal(number, self.defaults[signal.Signals(number)])

    def agreed(self, device: torch.device) -> bool:
        """True on all ranks as soon as one of them got a signal. Collective."""
        flag = torch.tensor([int(self.requested)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


class Loop:
    """One run on this rank, from `step` (already done) to the configured number of steps."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        trainee: Trainee,
        dataset: GPTDataset,
        device: torch.device,
    ) -> None:
        self.config, self.out, self.trainee, self.device = config, out, trainee, device
        self.dataset = dataset
        self.data_parallel = parallel_state.get_data_parallel_world_size()
        self.num_microbatches = config.microbatches(self.data_parallel)
        self.step = self.consumed = 0
        self.forward_backward = get_forward_backward_func()

    def resume(self) -> None:
        """Continue from the newest checkpoint; where there is none, from step 0. Collective."""
        found = run_folder.latest(self.out)
        if found is not None:
            self.step, self.consumed = checkpoint.load(found, self.trainee)
        if dist.get_rank() == 0:
            run_folder.keep_metrics(self.out, self.step)

    def run(self, console: Console | None) -> bool:
        """Train, shown on `console` by rank 0; True unless it was asked to stop earlier."""
        loop, first, started, stopped = self.config.train, self.step + 1, time.monotonic(), False
        if self.step >= loop.steps and (self.out / "summary.json").exists():
            return True  # a finished run was resumed: its record stays
        stop = StopRequest()
        rank = parallel_state.get_data_parallel_rank()
        batches = microbatches(
            self.dataset, self.config, rank, self.data_parallel, self.consumed, self.device
        )
        reset_report()
        shown = StepDisplay(console, self.config, self.step) if console else nullcontext()
        with run_folder.naming_a_full_disk(self.out), shown as display:
            while self.step < loop.steps and not stopped:
                row = {**self._one_step(batches), "first_step": first}
                if display is not None:
                    run_folder.append_metrics(self.out, row)
                    display.show(row)
                self._refuse_bad(row)
                stopped = stop.agreed(self.device)
                last = stopped or self.step == loop.steps
                if last or (loop.save_every and self.step % loop.save_every == 0):
                    checkpoint.save(self.out, self.trainee, self.step, self.consumed)
        with run_folder.naming_a_full_disk(self.out):
            self._finish(console, first, time.monotonic() - started)
        return self.step >= loop.steps

    def _refuse_bad(self, row: dict[str, Any]) -> None:
        """`LossNotFinite`, on all ranks, which have the same numbers. Gradients that are not finite
        have spoiled the weights; a step of float16 that skips its update has no norm.
        """
        if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"] or 0.0):
            return
        kept = run_folder.whole_names(self.out / "checkpoints")
        raise LossNotFinite(
            f"step {self.step}: loss {row['loss']}, gradient norm {row['grad_norm']}, finite ones "
            f"expected (lr {row['lr']:g}); {kept[-1] if kept else 'no checkpoint'} is kept: train "
            "anew with a smaller train.lr, or look at the data"
        )

    def _one_step(self, batches: Any) -> dict[str, Any]:
        started, trainee, model = time.monotonic(), self.trainee, self.config.model
        trainee.model.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        reduced = self.forward_backward(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=[trainee.model],
            num_microbatches=self.num_microbatches,
            seq_length=model.seq_length,
            micro_batch_size=self.config.train.micro_batch,
            forward_only=False,
        )
        rate = trainee.learning_rate()
        confirm_step()
        updated, grad_norm, _ = trainee.optimizer.step()
        if updated:
            trainee.scheduler.step(1)
        loss = torch.stack([part["loss"] for part in reduced]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        self.step += 1
        self.consumed += self.config.train.global_batch
        counts, value = report(), loss.item() / self.data_parallel
        seconds = time.monotonic() - started
        return {
            "step": self.step,
            "loss": value,
            "lr": rate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "tokens_per_s": self.config.train.global_batch * model.seq_length / seconds,
            "overlapped_share": counts.share if counts.total else None,
            "seconds": seconds,
        }

    def _finish(self, console: Console | None, first: int, seconds: float) -> None:
        counts = counts_of_all_ranks()
        if console is None:
            return
        rows, steps = run_folder.metrics(self.out), self.step - first + 1
        eligible = 0
        if self.config.layers == "flux":
            per_rank = self.config.eligible_calls(steps, self.num_microbatches)
            eligible = per_rank * dist.get_world_size()
        summary = {
            "layers": self.config.layers,
            "run": _title(self.config, self.device),
            "first_step": first,
            "last_step": self.step,
            "final_loss": rows[-1]["loss"],
            "seconds": seconds,
            "eligible": eligible,
            "silent": self.config.silent_calls(eligible, counts),
            **counts,
        }
        run_folder.write_json(self.out / "summary.json", summary)
        curves.draw(self.out / "loss.png", rows, f"{self.config.layers} layers: {summary['run']}")
        console.print(summary_table(f"{self.config.layers} layers", summary))


def _title(config: TrainConfig, device: torch.device) -> str:
    """The model and the machine, for a picture."""
    model, ranks = config.model, dist.get_world_size()
    machine = f"{ranks} ranks on a CPU, kernels interpreted"
    if device.type == "cuda":
        machine = f"{ranks} x {torch.cuda.get_device_name(device)}"
    return (
        f"GPT of {model.num_layers} layers, hidden {model.hidden}, TP {config.parallel.tp}, "
        f"{config.train.dtype}, {machine}"
    )


def _forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch["loss_mask"]
        loss = (losses.float() * mask).sum() / mask.sum()
        # a copy, because the schedule divides the loss in place by the number of microbatches
        return loss, {"loss": loss.detach().clone()}

    return losses, mean_loss
