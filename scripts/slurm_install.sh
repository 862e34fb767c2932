#!/usr/bin/env bash
# Installs the Slurm that tests/slurm starts for itself: Debian's slurm-wlm, as root. Does nothing
# where there is one. Where it cannot, it says what to do, and those tests are skipped.
set -euo pipefail

PATH=$PATH:/usr/sbin
missing=0
for program in slurmctld slurmd sbatch srun; do
    command -v "$program" >/dev/null || missing=1
done
[ "$missing" = 1 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "No Slurm: as root, on Debian: apt-get install --no-install-recommends slurm-wlm" >&2
    exit 1
fi
echo "Installing slurm-wlm ..."
export DEBIAN_FRONTEND=noninteractive
apt-get --quiet=2 update
apt-get --quiet=2 install --yes --no-install-recommends slurm-wlm >/dev/null
