#!/usr/bin/env bash
# A run on all workers of a Cloud TPU VM that is there, by gcloud: this commit is installed, the
# command runs, and worker 0's run folder is fetched. NOT TRIED ON A TPU VM: what it asks of gcloud
# and its flags are held against what they should be, by tests, and no more.
#
#   examples/tpu_vm.sh NAME ZONE RUN [FLAG OF `shardwise train`...]
#
# Of a slice with several workers all must see the run folder: on a disk that they share, or in a
# bucket that each has mounted (Cloud Storage FUSE). Ctrl-C ends gcloud here, not what runs there.
set -euo pipefail
name=$1 zone=$2 run=$3
shift 3

# Only what a commit holds is installed.
[ -z "$(git status --porcelain --untracked-files=no)" ] || {
  echo "tpu_vm.sh: there are changes that no commit holds: commit them." >&2
  exit 2
}
archive=$(mktemp -d)/shardwise-$(git rev-parse --short=12 HEAD).tar.gz
git archive --prefix=shardwise/ -o "$archive" HEAD

vm() {  # a command of gcloud's for this TPU VM
  local what=$1
  shift
  gcloud compute tpus tpu-vm "$what" "$@" "--zone=$zone"
}
on_all() {  # a command on every worker, whose shell reads one string
  vm ssh "$name" --worker=all "--command=$(printf '%q ' "$@")"
}

vm scp "$archive" "$name:" --worker=all
on_all python3 -m pip install --user uv
on_all python3 -m uv venv --clear --python 3.12 shardwise-venv
on_all python3 -m uv pip install --python shardwise-venv/bin/python 'jax[tpu]' "./${archive##*/}"
status=0
on_all shardwise-venv/bin/python -m shardwise train --run "$run" "$@" || status=$?
# What it wrote is worth having also where it failed.
mkdir -p "$(dirname "$run")"
vm scp --recurse "$name:$run" "$(dirname "$run")" --worker=0
exit $status
