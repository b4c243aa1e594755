#!/usr/bin/env bash
# Builds the documentation into build/site; a warning is an error. `bash docs.sh serve` shows it while it is written.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
case ${1:-build} in
    build) command=(build --strict) ;;
    serve) command=(serve) ;;
    *)
        echo "docs.sh: '$1' is neither build nor serve" >&2
        exit 2
        ;;
esac
source ./environment.sh
dry_run=false
set_up
add_extra docs
export NO_MKDOCS_2_WARNING=1
exec "$venv/bin/python" -m mkdocs "${command[@]}"
