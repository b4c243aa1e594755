#!/usr/bin/env bash
# Sets up .venv with the development tools and runs every check. Arguments go to pytest: bash test.sh tests/store -x
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

bash eval.sh --setup || exit 1
venv=${REFUSION_EVAL_VENV:-.venv}
if ! cmp -s "$venv/set-up" "$venv/set-up-dev"; then
    echo "Installing the development tools"
    "$venv/bin/python" -m pip install -e '.[dev]' -c constraints.txt >>"$venv/setup.log" 2>&1 || {
        tail -n 30 "$venv/setup.log" >&2
        exit 1
    }
    cp "$venv/set-up" "$venv/set-up-dev"
fi

failed=()
check() {
    echo "== $*"
    "$venv/bin/python" -m "$@" || failed+=("$1")
}
check ruff check .
check ruff format --check .
check mypy
# One thread a process: small tests gain nothing from more, and the machine's cores go to the processes.
export OMP_NUM_THREADS=1
check pytest "$@"

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
