#!/usr/bin/env bash
# Trains a model: sets up .venv with what training needs, then starts one process for each GPU, on one machine or many.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$root/environment.sh"

usage() {
    cat <<'TEXT'
Usage: bash train.sh --config NAME_OR_PATH [options]

Run again to continue an interrupted run. On several machines run it on each, with the same options but -r.

  --config C         a YAML file, or a configuration of the package by name: tiny, refusion_8b, refusion_qwen25_7b,
                     controlled_refusion, controlled_sft, controlled_llada, controlled_bd3lm
  --set S.K=VALUE    change a setting, for example data.files=train.jsonl or optimisation.lr=1e-5; may be repeated
  -n NODES           number of machines (default: 1)
  -r RANK            number of this machine, from 0
  -m MASTER[:PORT]   machine 0, as the others reach it (default port: 29500)
  --gpus N, --processes N
                     processes on this machine (default: one for each NVIDIA GPU, or one)
  --deepspeed        install DeepSpeed too, which parallelism=zero2 needs
  --check            check the settings and files, and stop
  --setup            make the environment and stop
  --dry-run          print the commands instead of running them
  --help             this text

Environment: PYTHON (python3), REFUSION_EVAL_VENV (.venv), REFUSION_EVAL_TORCH_INDEX (package index for torch).
TEXT
}

whole_number() { # option, value, lowest
    case $2 in '' | *[!0-9]*) fail "$1 is '$2', it must be a whole number of at least $3" ;; esac
    [ "$2" -ge "$3" ] || fail "$1 is '$2', it must be a whole number of at least $3"
}

config='' overrides=() num_nodes=1 node_rank='' master='' processes='' deepspeed=false check_only=false setup_only=false
dry_run=false
while [ $# -gt 0 ]; do
    option=$1
    case $option in
        --config | --set | -n | -r | -m | --gpus | --processes)
            [ $# -ge 2 ] && [ -n "$2" ] || fail "$option needs a value"
            value=$2
            shift 2
            ;;
        *) shift ;;
    esac
    case $option in
        --config) config=$value ;;
        --set)
            case $value in ?*=*) overrides+=(--set "$value") ;; *) fail "--set is '$value', write section.key=value" ;; esac
            ;;
        -n) whole_number "$option" "$value" 1 && num_nodes=$value ;;
        -r) whole_number "$option" "$value" 0 && node_rank=$value ;;
        -m) master=$value ;;
        --gpus | --processes) whole_number "$option" "$value" 1 && processes=$value ;;
        --deepspeed) deepspeed=true ;;
        --check) check_only=true ;;
        --setup) setup_only=true ;;
        --dry-run) dry_run=true ;;
        --help | -h)
            usage
            exit 0
            ;;
        *) fail "unknown option '$option'" ;;
    esac
done
$setup_only || [ -n "$config" ] || fail "--config is missing"
if [ "$num_nodes" -gt 1 ]; then
    [ -n "$node_rank" ] && [ -n "$master" ] || fail "-n $num_nodes needs -r RANK and -m MASTER on every machine"
    [ "$node_rank" -lt "$num_nodes" ] || fail "-r is '$node_rank', with -n $num_nodes it goes from 0 to $((num_nodes - 1))"
elif [ "${node_rank:-0}" != 0 ]; then
    fail "-r is '$node_rank', and there is one machine only; give -n"
fi
if [ -z "$processes" ]; then
    processes=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || processes=1
fi

here=$PWD
cd "$root" # where the environment is made; the run itself reads paths as seen from where the user stands
set_up
add_extra train
if $deepspeed; then add_extra deepspeed; fi
python=$(absolute "$python")
cd "$here"
if $setup_only; then
    exit 0
fi

training=(refusion_eval.training.run --config "$config" ${overrides[@]+"${overrides[@]}"})
# First, so that what is wrong is said once, and not within what torchrun says of a failed process.
run "$python" -m "${training[@]}" --check $((num_nodes * processes))
if $check_only; then
    exit 0
fi
if [ "$num_nodes" -gt 1 ]; then
    port=29500
    case $master in *:*) port=${master##*:} ;; esac
    where=(--nnodes "$num_nodes" --node-rank "$node_rank" --master-addr "${master%:*}" --master-port "$port")
else
    where=(--standalone)
fi
# A process' share of the machine's cores; torchrun would give each one.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
fi
run "$python" -m torch.distributed.run "${where[@]}" --nproc-per-node "$processes" -m "${training[@]}"
