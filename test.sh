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
check pytest -n 2 --dist loadfile "$@"

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
