"""The steps of a run on one rank: schedule, optimizer, metrics, checkpoints, an orderly end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.pipeline_parallel import get_forward_backward_func

from flux_megatron.lab.train import checkpoint, plot, run_folder
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.data import gpt_dataset, microbatches
from flux_megatron.lab.train.model import Trainee, layer_context
from flux_megatron.lab.train.rank_counts import count_lines, counts_of_all_ranks
from flux_megatron.overlap.report import report, reset_report
from flux_megatron.symm.step import confirm_step


def train(config: TrainConfig, out: Path, resume: bool, device: torch.device) -> bool:
    """Train on this rank; False if it was asked to stop earlier. Collective."""
    if dist.get_rank() == 0:
        run_folder.record(config, out)
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    dataset = gpt_dataset(config, out / "data")
    with layer_context(config):
        loop = Loop(config, out, Trainee(config, device), dataset, device)
        if resume:
            loop.resume()
        return loop.run()


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


class Loop:
    """One run on this rank, from `step` (already done) to the configured number of steps."""

    def __init__(
        self, config: TrainConfig, out: Path, trainee: Trainee, dataset: GPTDataset,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.config, self.out, self.trainee, self.device = config, out, trainee, device
        self.dataset, self.step = dataset, 0
        self.num_microbatches = config.microbatches(dist.get_world_size())

    def resume(self) -> None:
        """Continue from the newest checkpoint; where there is none, from step 0. Collective."""
        if (found := run_folder.latest(self.out)) is not None:
            self.step = checkpoint.load(found, self.trainee)
        if dist.get_rank() == 0:
            run_folder.keep_metrics(self.out, self.step)

    def run(self) -> bool:
        """Train, shown by rank 0; True unless it was asked to stop earlier."""
        loop, first, started, stopped = self.config.train, self.step + 1, time.monotonic(), False
        if self.step >= loop.steps and (self.out / run_folder.SUMMARY).exists():
            return True  # a finished run was resumed: its record stays
        consumed = self.step * loop.global_batch
        stop, batches = (
            StopRequest(),
            microbatches(self.dataset, self.config, consumed, self.device),
        )
        reset_report()
        while self.step < loop.steps and not stopped:
            row = {**self.one_step(batches), "first_step": first}
            if dist.get_rank() == 0:
                run_folder.append_metrics(self.out, row)
                if self.step % loop.log_every == 0 or self.step == loop.steps:
                    print(
                        f"{self.config.layers} step {self.step}/{loop.steps}  {_facts(row)}",
                        flush=True,
                    )
            stopped = stop.agreed(self.device)
            last = stopped or self.step == loop.steps
            if last or (loop.save_every and self.step % loop.save_every == 0):
                checkpoint.save(self.out, self.trainee, self.step)
        self._finish(first, time.monotonic() - started)
        return self.step >= loop.steps and not stopped

    def one_step(self, batches: Any) -> dict[str, Any]:
        """Train on the next global batch: its row of metrics.jsonl. Collective."""
        started, trainee, loop = time.monotonic(), self.trainee, self.config.train
        seq_length = self.config.model.seq_length
        trainee.model.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step, data_iterator=batches, model=[trainee.model],
            num_microbatches=self.num_microbatches, seq_length=seq_length,
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
        self.step += 1
        counts, value = report(), loss.item() / data_parallel.size()
        seconds = time.monotonic() - started
        return {
            "step": self.step,
            "loss": value,
            "lr": rate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "tokens_per_s": loop.global_batch * seq_length / seconds,
            "overlapped_share": counts.share if counts.total else None,
            "seconds": seconds,
        }

    def _finish(self, first: int, seconds: float) -> None:
        config, ranks, counts = self.config, dist.get_world_size(), counts_of_all_ranks()
        if dist.get_rank():
            return
        rows, steps = run_folder.metrics(self.out), self.step - first + 1
        eligible = ranks * config.eligible_calls(steps, self.num_microbatches)
        machine = "CPU, kernels interpreted"
        if self.device.type == "cuda":
            machine = torch.cuda.get_device_name(self.device)
        summary = {
            "layers": config.layers,
            "run": f"GPT of {config.model.num_layers} layers, hidden {config.model.hidden}, "
            f"TP {config.parallel.tp}, {config.train.dtype}, {ranks} ranks, {machine}",
            "first_step": first,
            "last_step": self.step,
            "final_loss": rows[-1]["loss"],
            "seconds": seconds,
            "eligible": eligible,
            "silent": config.silent_calls(eligible, counts),
            **counts,
        }
        run_folder.write_json(self.out / run_folder.SUMMARY, summary)
        plot.draw(self.out / "loss.png", rows, f"{config.layers} layers: {summary['run']}")
        done = f"{config.layers} layers: steps {first} to {self.step} in {seconds:.1f} s"
        print("\n".join([done, *count_lines(summary)]), flush=True)


def _facts(row: dict[str, Any]) -> str:
    facts = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"
    if row["grad_norm"] is not None:  # a step of float16 that skips its update has none
        facts += f"  grad norm {row['grad_norm']:.3f}"
    share = row["overlapped_share"]
    return facts if share is None else f"{facts}  overlapped {share:.0%}"


def _forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch["loss_mask"]
        loss = (losses.float() * mask).sum() / mask.sum()
        # a copy, because the schedule divides the loss in place by the number of microbatches
        return loss, {"loss": loss.detach().clone()}

    return losses, mean_loss
