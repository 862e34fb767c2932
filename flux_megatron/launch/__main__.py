"""One process of a run: `torchrun ... -m flux_megatron.launch pretrain_gpt.py ARGS --flux-overlap`.

The script is the user's own, and ARGS are Megatron's and ours; options for us come before it.
"""

from __future__ import annotations

import argparse
import os
import sys

from flux_megatron.errors import BadInput
from flux_megatron.launch.environment import CPU, ONE_QUEUE


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flux_megatron.launch", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: try it out without GPUs; kernels are interpreted",
    )  # fmt: skip
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    if given.device == "cpu":
        os.environ.update(CPU | ONE_QUEUE)
    from flux_megatron.integration import bootstrap

    try:
        bootstrap.enter(given.script, given.arguments)
    except BadInput as error:
        parser.error(str(error))
    if given.device == "cpu":
        from flux_megatron.train.cpu_pretrain import pretend_gpu

        pretend_gpu()
    bootstrap.run()


if __name__ == "__main__":
    main(sys.argv[1:])
