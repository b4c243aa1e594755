#!/usr/bin/env bash
# Trains a model: makes .venv with what training needs, then starts one process for each GPU, on one machine or several.
# Everything after the environment is `refusion-eval train`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
extras=train
case " $* " in *' --deepspeed '*) extras='train deepspeed' ;; esac
start train "$extras" "$@"
