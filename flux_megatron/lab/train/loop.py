"""The steps of a run on one rank: schedule, optimizer, metrics, checkpoints, an orderly end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from flux_megatron.lab.train import checkpoint, run_folder
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.data import gpt_dataset, microbatches
from flux_megatron.lab.train.model import Trainee, layer_context
from flux_megatron.lab.train.run_folder import counts_of_all_ranks, show
from flux_megatron.overlap.report import report, reset_report
from flux_megatron.symm.step_end import confirm_step


class StopRequest:
    """Remembers SIGTERM or SIGINT until the step is done; a second one ends the process."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)

    def agreed(self, device: torch.device) -> bool:
        """True on all ranks as soon as one of them got a signal. Collective."""
        flag = torch.tensor([int(self.requested)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def train(config: TrainConfig, out: Path, resume: bool, device: torch.device) -> bool:
    """Train on this rank, shown by rank 0; False if it was asked to stop earlier. Collective."""
    loop, shows = config.train, dist.get_rank() == 0
    if shows:
        run_folder.write_json(out / run_folder.CONFIG, config.model_dump(mode="json"))
    tensor_parallel.model_parallel_cuda_manual_seed(loop.seed)
    torch.manual_seed(loop.seed)
    dataset, trainee, step = gpt_dataset(config, out / "data"), Trainee(config, device), 0
    if resume and (found := run_folder.latest(out)):
        step = checkpoint.load(found, trainee)
    if resume and shows:
        run_folder.keep_metrics(out, step)
    if step >= loop.steps and (out / run_folder.SUMMARY).exists():
        return True  # a finished run was resumed: its record stays
    stop, stopped, first, started = StopRequest(), False, step + 1, time.monotonic()
    batches = microbatches(dataset, config, step * loop.global_batch, device)
    reset_report()
    while step < loop.steps and not stopped:
        with layer_context(config):
            row = one_step(config, trainee, batches)
        step += 1
        if shows:
            run_folder.append_metrics(out, {"step": step, **row, "first_step": first})
            if step % loop.log_every == 0 or step == loop.steps:
                facts = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"
                print(f"{config.layers} step {step}/{loop.steps}  {facts}", flush=True)
        stopped = stop.agreed(device)
        last = stopped or step == loop.steps
        if last or (loop.save_every and step % loop.save_every == 0):
            checkpoint.save(out, trainee, step)
    steps = step - first + 1
    counts = counts_of_all_ranks(config, steps * trainee.microbatches * config.eligible_calls())
    if shows:
        summary = {"first_step": first, "last_step": step, "seconds": time.monotonic() - started}
        _finish(config, out, summary | counts, device)
    return step >= loop.steps and not stopped


def one_step(
    config: TrainConfig, trainee: Trainee, batches: Iterator[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Train on the next global batch: its row of metrics.jsonl. Collective."""
    started, loop, seq_length = time.monotonic(), config.train, config.model.seq_length
    trainee.model.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    reduced = get_forward_backward_func()(
        forward_step_func=_forward_step, data_iterator=batches, model=[trainee.model],
        num_microbatches=trainee.microbatches, seq_length=seq_length,
        micro_batch_size=loop.micro_batch, forward_only=False,
    )  # fmt: skip
    rate = trainee.learning_rate()
    confirm_step()
    updated, grad_norm, _ = trainee.optimizer.step()
    if updated:
        trainee.scheduler.step(1)
    loss = torch.stack([part["loss"] for part in reduced]).mean()
    data_parallel = parallel_state.get_data_parallel_group()
    dist.all_reduce(loss, group=data_parallel)
    counts, value = report(), loss.item() / data_parallel.size()
    seconds = time.monotonic() - started
    return {
        "loss": value,
        "lr": rate,
        "grad_norm": None if grad_norm is None else float(grad_norm),
        "tokens_per_s": loop.global_batch * seq_length / seconds,
        "overlapped_share": counts.share if counts.total else None,
        "seconds": seconds,
    }


def _finish(config: TrainConfig, out: Path, summary: dict[str, Any], device: torch.device) -> None:
    rows, machine = run_folder.metrics(out), "CPU, kernels interpreted"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    summary |= {
        "final_loss": rows[-1]["loss"],
        "run": f"GPT of {config.model.num_layers} layers, hidden {config.model.hidden}, "
        f"TP {config.parallel.tp}, {config.train.dtype}, {dist.get_world_size()} x {machine}",
    }
    run_folder.write_json(out / run_folder.SUMMARY, summary)
    run_folder.draw(out / "loss.png", {config.layers: rows}, summary["run"])
    show(f"{config.layers} layers", summary)


def _forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch["loss_mask"]
        loss = (losses.float() * mask).sum() / mask.sum()
        # a copy, because the schedule divides the loss in place by the number of microbatches
        return loss, {"loss": loss.detach().clone()}

    return losses, mean_loss
