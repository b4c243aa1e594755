#!/usr/bin/env bash
# Sets up .venv with the development tools and runs every check. Arguments go to pytest: bash test.sh tests/store -x
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

source ./environment.sh
dry_run=false
set_up
add_extra dev

failed=()
check() {
    echo "== $*"
    "$venv/bin/python" -m "$@" || failed+=("$1")
}
check ruff check .
check ruff format --check .
check mypy
check refusion_eval.supply_chain --vulnerabilities
# One thread a process: small tests gain nothing from more, and the machine's cores go to the processes.
export OMP_NUM_THREADS=1
# Slow ones only where they are asked for: -m slow, or -m '' for all.
check pytest -n 2 --dist loadfile -m "not slow" "$@"

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
