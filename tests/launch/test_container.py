"""Containers of a site: the options of srun or enroot, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from flux_megatron.launch import launching, site
from flux_megatron.launch.container import Container
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.launching import Request

FOLDERS = [Path("/run"), Path("/data")]


def test_pyxis_gets_options_of_srun():
    one = Container(image="a#b:c", mounts=("/x:/y:ro+rprivate", "/data:/d"), workdir="/w")
    *options, name = one.words("flux", FOLDERS).split()
    assert options == [
        "'--container-image=a#b:c'",
        "--container-mounts=/x:/y:ro+rprivate,/data:/d,/run:/run",
        "--container-workdir=/w",
    ]
    assert re.fullmatch(r'--container-name=flux_megatron-[0-9a-f]{8}-"\$SLURM_JOB_ID"', name)


def test_enroot_starts_the_command():
    one = Container(
        runtime="enroot", image="/a.sqsh", images={"te": "/te.sqsh"}, mounts=("/x:/y:ro",)
    )
    assert one.words("te", FOLDERS).split() == [
        "enroot", "start", "--rw",
        "--env", "SLURM_JOB_ID", "--env", "SLURM_JOB_NUM_NODES", "--env", "SLURM_NODEID",
        "--env", "SLURM_RESTART_COUNT", "--env", "SLURMD_NODENAME",
        "--mount=/x:/y:none:x-create=auto,rbind,ro",
        "--mount=/run:/run:none:x-create=auto,rbind",
        "--mount=/data:/data:none:x-create=auto,rbind",
        "/te.sqsh",
    ]  # fmt: skip
    assert one.words("flux", FOLDERS).endswith(" /a.sqsh")


WRONG = {
    "container: {image: a, imge: b}": "container.imge: Extra inputs",
    "container: {image: images/a.sqsh}": "'images/a.sqsh' given, an absolute path expected",
    "container: {image: a b}": "container.image",
    "container: {image: a, mounts: [data:/d]}": "/HOST[:/CONTAINER[:FLAG+FLAG]] expected",
    "container: {image: a, mounts: ['/a,/b']}": "/HOST[:/CONTAINER[:FLAG+FLAG]] expected",
    "container: {image: a, workdir: w}": "container.workdir",
    "container: {image: a, runtime: docker}": "Input should be 'pyxis' or 'enroot'",
    "container: {image: a, images: {fluks: b}}": "container.images.fluks",
    "container: {runtime: enroot, image: 'a.io#b/c:1'}": "a squashfs file (.sqsh) or the name of",
    "container: {runtime: enroot, images: {te: b/c}}": "a squashfs file (.sqsh) or the name of",
    "container: {images: {flux: b}}": "none in container.images for ['megatron']",
    "silent_s: 0": "silent_s: Input should be greater than or equal to 1",
    "retries: -1": "retries",
    "srun: [a]": "srun: Input should be a valid dict",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_site_is_refused(text, tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    with pytest.raises(LaunchError) as refusal:
        launching.prepare(Request("cpu/tiny", run=tmp_path / "run", site=file))
    assert WRONG[text] in str(refusal.value)


def test_python_of_a_container_is_its_own(tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text("container: {image: a}")
    assert site.load(file).python == "python3"
    file.write_text("container: {image: a}\npython: /env/bin/python")
    assert site.load(file).python == "/env/bin/python"


def test_data_and_checkout_are_mounted_and_srun_gets_the_sites_options(tmp_path):
    for name in ("Megatron-LM", "texts"):
        (tmp_path / name).mkdir()
    (tmp_path / "texts" / "a.idx").touch()
    file = tmp_path / "site.yaml"
    file.write_text("container: {image: a}\nsrun: {network: x, quiet: null}")
    request = Request("paper/gpt3-175b_h800-nvlink", run=tmp_path / "run", site=file,
                      checkout=tmp_path / "Megatron-LM",
                      data=(str(tmp_path / "texts" / "a"),))  # fmt: skip
    job = launching.prepare(request).job
    for folder in ("run", "Megatron-LM", "texts"):
        assert f"{tmp_path / folder}:{tmp_path / folder}" in job
    assert "(--network=x --quiet --container-" in job


def test_variables_of_the_clusters_network_come_before_the_sites(tmp_path):
    overrides = ("cluster.environment.NCCL_IB_HCA=mlx5", "cluster.environment.NCCL_DEBUG=INFO")
    request = Request(
        "cpu/tiny", run=tmp_path, overrides=overrides, environment=("NCCL_DEBUG=WARN",)
    )
    script = launching.prepare(request).commands[0].script()
    assert "export NCCL_IB_HCA=mlx5\n" in script
    assert "export NCCL_DEBUG=WARN\n" in script
