"""torchrun on this machine, for `flux-megatron run`: its ranks end as every command does."""

from __future__ import annotations

import logging
import signal
import tempfile
from pathlib import Path

from flux_megatron.errors import BadInput, RunFailed


def run(ranks: int, command: list[str]) -> None:
    """`python -m flux_megatron.launch COMMAND` on each rank, until all have ended.

    `BadInput` with what a rank has refused, `RunFailed` for one that failed, `SystemExit` where a
    rank has said itself what it was given, and after a signal.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # we say it below
    with tempfile.TemporaryDirectory() as folder:
        refusal = Path(folder) / "refusal"
        words = ["--standalone", f"--nproc-per-node={ranks}", "-m", "flux_megatron.launch"]
        try:
            torchrun.run(torchrun.parse_args([*words, "--refusal", str(refusal), *command]))
        except ChildFailedError as error:
            if refusal.exists():
                raise BadInput(refusal.read_text()) from None
            rank, failure = error.get_first_failure()
            if failure.exitcode == BadInput.exit_status:
                raise SystemExit(failure.exitcode) from None
            raise RunFailed(f"rank {rank} {_end(failure.exitcode)}: see above") from None
        except SignalException as stopped:
            raise SystemExit(128 + stopped.sigval) from None


def _end(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
