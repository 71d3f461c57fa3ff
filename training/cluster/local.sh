#!/usr/bin/env bash
# Several processes on this machine, as a trial of a cluster: each is told who it is, as Slurm or an
# operator would tell it. From a checkout, inside its environment:
#
#   training/cluster/local.sh 2 --recipe digits --workdir runs/two
#
# The first number is how many; the rest goes to training.train. KERAS_BACKEND chooses the backend.
set -euo pipefail
processes=$1
shift
export KERAS_BACKEND=${KERAS_BACKEND:-tensorflow}
backend=$KERAS_BACKEND
first=${PORT:-29400}

if [ "$backend" = torch ]; then
    exec python -m torch.distributed.run --nproc-per-node "$processes" --master-port "$first" \
        -m training.train "$@"
fi

addresses=()
for ((i = 0; i < processes; i++)); do addresses+=("127.0.0.1:$((first + i))"); done
pids=()
for ((i = 0; i < processes; i++)); do
    if [ "$backend" = jax ]; then
        KERAS_DISTRIBUTION_JOB_ADDRESSES=$(IFS=, && echo "${addresses[*]}")
        export KERAS_DISTRIBUTION_JOB_ADDRESSES
        export KERAS_DISTRIBUTION_NUM_PROCESSES=$processes
        export KERAS_DISTRIBUTION_PROCESS_ID=$i
    else
        workers=$(printf '"%s",' "${addresses[@]}")
        export TF_CONFIG="{\"cluster\": {\"worker\": [${workers%,}]},
            \"task\": {\"type\": \"worker\", \"index\": $i}}"
    fi
    python -m training.train "$@" &
    pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT INT TERM
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
exit "$failed"
