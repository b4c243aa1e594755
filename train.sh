#!/usr/bin/env bash
# Trains a model: makes .venv with what training needs, then starts one process for each GPU, on one machine or several.
# Everything after the environment is `refusion-eval train`; --deepspeed installs DeepSpeed too, which zero2 needs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
start train train "$@"
