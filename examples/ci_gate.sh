#!/usr/bin/env bash
# Starts a server, measures its model, compares it with the last run that passed, and fails if it became worse.
#
#   bash examples/ci_gate.sh RUNS COMMAND ...      COMMAND starts the server, at port $PORT (8000 by default)
#
# RUNS keeps `accepted`, the records to compare with, from one job to the next. What this job measures lies in `new`, and
# becomes `accepted` if it passes. OPTIONS are those of `refusion-eval run`, such as "--tasks gsm8k --data rows".
set -euo pipefail
runs=$1
shift
port=${PORT:-8000}
address=http://127.0.0.1:$port

PORT=$port "$@" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
for _ in $(seq "${WAIT:-60}"); do # it may have to load a model
    refusion-eval --quiet check --system "server:$address" 2>/dev/null && break
    sleep 1
done

rm -rf "$runs/new" # a run in an old folder would be continued
# shellcheck disable=SC2086 # several options
refusion-eval run --system "server:$address" --server-name "${SERVER_NAME:-staging}" --run-dir "$runs/new" \
    --batch-size "${REQUESTS:-4}" ${OPTIONS:---tasks gsm8k --limit 200}
if [ -d "$runs/accepted" ]; then
    refusion-eval compare "$runs/accepted" "$runs/new" --junit "$runs/junit.xml" \
        --fail-if "${FAIL_IF:-accuracy < -2 (p < 0.05)}"
fi
rm -rf "$runs/accepted"
mv "$runs/new" "$runs/accepted"
