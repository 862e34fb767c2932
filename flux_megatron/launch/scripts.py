"""The scripts of a run: command.sh, which starts the ranks of an arm on one node through torchrun,
and job.sbatch, which starts job.py with the settings of a launch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import jinja2

from flux_megatron.integration import parser_signature
from flux_megatron.launch import (
    CPU,
    ONE_QUEUE,
    megatron_arguments,
    slurm_options,
)
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.job import Settings
from flux_megatron.launch.site import Site
from flux_megatron.launch.slurm_options import Options
from flux_megatron.launch.workload import Arm, Cluster, Workload

PREFLIGHT_S = 300  # after which a node that is silent is unfit
STOP_BEFORE_S = 300  # before the time limit, for ranks to finish their step and save
TIME = "04:00:00"  # where the site names no limit
NO_CHECKOUT = Path("path/to/Megatron-LM")  # in print alone: nothing is written without one
JOB = Path(__file__).parent / "job.py"

# below an arm's folder: changes with every checkpoint
PROGRESS = {
    "train": "train/checkpoints/latest",
    "pretrain_gpt": "checkpoints/latest_checkpointed_iteration.txt",
}


@dataclass(frozen=True)
class RunOptions:
    """What a launch adds to an experiment.

    `run` is the run's folder, `checkout` that of Megatron-LM. `data` is a folder of text for
    program train, else prefixes of indexed data sets. `save_interval` 0: no checkpoints.
    """

    run: Path
    site: Site
    checkout: Path | None = None
    data: tuple[str, ...] = ()
    save_interval: int = 0

    def folders(self) -> list[Path]:
        """What a rank reads and writes, whatever container it is in."""
        data = [path for path in map(Path, self.data) if path.is_absolute()]
        data = [path if os.path.isdir(path) else path.parent for path in data]
        return [self.run, *([self.checkout] if self.checkout else []), *data]


def files(experiment: Experiment, arm: Arm, options: RunOptions, folder: Path) -> dict[str, str]:
    """The texts of the arm's `folder`. `LaunchError` for arguments that Megatron's parser, of the
    release that the experiment names, would refuse.
    """
    workload, every = experiment.arms[arm], options.save_interval
    cluster, texts = workload.cluster, {}
    doctor = ["--gpus", str(0 if cluster.gpu == "cpu" else cluster.gpus_per_node), "--quiet"]
    if experiment.program == "train":
        data = Path(options.data[0]) if options.data else None
        texts["train.yaml"] = megatron_arguments.train_config(workload, data, every)
        program, directory, shown_rank = ["-m", "flux_megatron.cli", "train"], folder, "0"
        arguments = ["--config", str(folder / "train.yaml"), "--out", str(folder / "train")]
        on_resume = ["--resume"]
    else:
        save, directory = folder / "checkpoints", options.checkout or NO_CHECKOUT
        arguments = megatron_arguments.render(
            workload, data=options.data, cache=folder / "data", save=save, save_interval=every
        )
        arguments += experiment.extra_arguments[arm]
        if wrong := parser_signature.check(arguments, experiment.megatron_lm):
            raise LaunchError("\n".join(f"arm {arm}: {one}" for one in wrong))
        program, needed = megatron_arguments.program(workload, directory, arguments)
        doctor += ["--megatron-lm", str(directory), *needed]
        shown_rank = "$((ranks - 1))"  # Megatron logs on the last rank of all
        on_resume = megatron_arguments.resume(save) if every else []
    health = {"--allreduce-gbps": cluster.health.allreduce_gbps, "--sm-mhz": cluster.health.sm_mhz}
    least = [text for name, bound in health.items() if bound for text in (name, f"{bound:g}")]
    texts["command.sh"] = render(
        "command.sh.j2",
        arm=arm,
        site=options.site,
        folder=folder,
        variables=variables(workload, options.run) | options.site.environment,
        doctor=doctor,
        preflight=["--gpus", str(cluster.gpus_per_node), "--link", cluster.link.kind, *least],
        preflight_s=PREFLIGHT_S,
        program=program,
        arguments=arguments,
        on_resume=on_resume,
        ranks=workload.parallel.world_size,
        on_gpus=cluster.gpu != "cpu",
        shown_rank=shown_rank,  # of a node: its output is on the terminal too
        directory=directory,
    )
    return texts


def variables(workload: Workload, run: Path) -> dict[str, str]:
    """What every arm of an experiment sets alike; a site's own variables are added to them.

    Caches are in the run's folder, which every container sees; of the home folder that is not so.
    """
    cache, on_cpu = run / "cache", workload.cluster.gpu == "cpu"
    plans = os.environ.get("FLUX_MEGATRON_CACHE")  # those of `flux-megatron tune`
    return {
        **ONE_QUEUE,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # logs are read while the run goes on
        "PYTHONFAULTHANDLER": "1",  # a rank that gets SIGABRT first writes its stack
        "FLUX_MEGATRON_CACHE": os.path.abspath(plans) if plans else str(cache / "plans"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        **(CPU if on_cpu else {"NCCL_DEBUG": "WARN"}),  # it says why it fails
        **workload.cluster.environment,
    }


def job(experiment: Experiment, options: RunOptions, names: Sequence[str], resume: bool) -> str:
    """The text of job.sbatch, which trains the arms of these `names`, such as round-1/flux, in
    turn. The site's options win. `LaunchError` for those with which it would not train.
    """
    cluster, site = experiment.cluster, options.site
    ours: Options = {
        "job-name": experiment.name.replace("/", "-"),
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "time": TIME,
        "open-mode": "append",  # a job that queues up again keeps what it has said
        "output": f"{str(options.run).replace('%', '%%')}/slurm-%j.out",
        "requeue": True,
    }
    if cluster.gpu != "cpu":  # 0: all of a node's
        ours |= {"gpus-per-node": cluster.gpus_per_node, "exclusive": True, "mem": 0}
    if options.save_interval or len(names) > 1:  # an arm that is done is progress too
        ours["signal"] = f"B:USR1@{STOP_BEFORE_S}"
    if site.sbatch.get("gres"):
        ours.pop("gpus-per-node", None)
    all_options = ours | site.sbatch
    slurm_options.refuse_stopped(all_options)
    settings = Settings(
        run=str(options.run),
        arms=[*names],
        mode="resume" if resume else "start",
        progress=PROGRESS[experiment.program],
        srun={arm: site.reach(arm, options.folders()) for arm in experiment.arms},
        preflight_s=PREFLIGHT_S if site.preflight and cluster.gpu != "cpu" else None,
        retries=site.retries,
        silent_s=site.silent_s,
    )
    as_json = partial(json.dumps, ensure_ascii=False)
    lines = [f"{as_json(key)}: {as_json(value)}" for key, value in settings._asdict().items()]
    return render(
        "job.sbatch.j2",
        options=map(_directive, slurm_options.words(all_options)),
        program=options.run / JOB.name,
        settings="{\n" + ",\n".join(lines) + "\n}",
    )


def _directive(option: str) -> str:
    """An option as #SBATCH wants it: on its line, a text with other characters in quotes."""
    if not option.isprintable():
        raise LaunchError(f"{option!r} given to sbatch, a text of one line expected")
    name, equals, text = option.partition("=")
    if not re.fullmatch(r"[\w%+,./:@=\[\]-]*", text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return name + equals + text


def check_options(site: Site, cluster: Cluster) -> None:
    """`LaunchError` for an option of the site that the ranks of this job cannot live with."""
    expected = {"nodes": cluster.nodes, "ntasks-per-node": 1}
    if cluster.gpu != "cpu":
        expected["gpus-per-node"] = cluster.gpus_per_node
    for name, value in expected.items():
        given = site.sbatch.get(name, value)
        if given is None and name == "gpus-per-node":  # of a Slurm that knows no GPUs
            continue
        said = "null" if given is None else str(given)
        if said.rpartition(":")[2] != str(value):  # a type of GPU may stand before the number
            raise LaunchError(
                f"--sbatch {name}={said} given, {name}={value} expected: the experiment has "
                f"{cluster.nodes} x {cluster.gpus_per_node} ranks; --set cluster.nodes=N changes it"
            )
    if site.sbatch.get("array"):
        raise LaunchError("--sbatch array given: one job trains all arms, --arm chooses among them")


def render(template: str, **values: object) -> str:
    """A template of this package with `values`."""
    return _engine().get_template(template).render(**values)


@lru_cache(maxsize=1)
def _engine() -> jinja2.Environment:
    """Its filters `sh` and `lines` quote for bash."""
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters |= {"sh": _quoted, "lines": _lines}
    return engine


def _quoted(arguments: str | Path | Sequence[str]) -> str:
    return shlex.join([str(arguments)] if isinstance(arguments, str | Path) else arguments)


def _lines(arguments: Sequence[str]) -> list[str]:
    """Each option with its values as one line for bash."""
    return [shlex.join(option) for option in parser_signature.options(arguments)]
