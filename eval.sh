#!/usr/bin/env bash
# From a fresh machine to a table: makes .venv, runs ReFusion and its autoregressive baseline, prints accuracy and speed.
# Everything after the environment is `refusion-eval suite`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
extra='' # what only some options need
case " $* " in *server*) extra=server ;; esac
start suite "$extra" "$@"
