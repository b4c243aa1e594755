#!/usr/bin/env bash
# From a fresh machine to a table: sets up .venv, runs ReFusion and its autoregressive baseline, prints accuracy and speed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$(dirname "${BASH_SOURCE[0]}")/artefacts.sh"

usage() {
    cat <<'TEXT'
Usage: bash eval.sh [options]

Without options: the tiny embedded models on the seven mini tasks, on any machine, in minutes.
With --model: that checkpoint on the real benchmarks. Run again to continue an interrupted run.

  --model M        ReFusion checkpoint: hub id or directory, for example GSAI-ML/ReFusion; with --system the checkpoint of
                   that one system, published (all that have a public checkpoint), or embedded
  --system S       systems of the paper by name, separated by commas (refusion-eval systems lists them), as they were
                   published; or all: the embedded family on the mini tasks
  --preset P       with --system: which of the decoders' settings tables (official, paper_implied, ...)
  --adapter A      with --system and --model: LoRA adapter, hub id or directory
  --baseline B     autoregressive checkpoint to compare with (default for --model: Qwen/Qwen3-8B)
  --no-baseline    run no baseline; the table then has no speed-up
  --tasks T        benchmarks, separated by commas: mmlu_pro,arc_challenge,gsm8k,math,gpqa,humaneval,mbpp
  --limit N        only the first N items of each task
  --data DIR       benchmark rows, DIR/<benchmark>/<split>.jsonl[.gz]
  --results DIR    where results go (default: results)
  --sandbox S      auto, or none to run model-written code without isolation
  --artefacts      also make every table and figure of the paper that these systems support, in
                   RESULTS/<model>/artefacts, and a page of all samples, RESULTS/reports/<model>.html; of the embedded
                   family within an hour. A real ReFusion then runs as the paper's algorithm, without fused forwards
  --setup          make the environment and stop
  --dry-run        print the commands instead of running them
  --help           this text

Environment: PYTHON (python3), REFUSION_EVAL_VENV (.venv), REFUSION_EVAL_TORCH_INDEX (package index for torch).
TEXT
}

checkpoint() { # a directory becomes absolute, a hub id stays
    if [ -d "$1" ]; then absolute "$1"; else printf '%s' "$1"; fi
}

model='' systems='' preset='' adapter='' baseline='' with_baseline=true tasks='' limit='' data='' results='' sandbox='' setup_only=false dry_run=false artefacts=false
while [ $# -gt 0 ]; do
    option=$1
    case $option in
        --model | --system | --preset | --adapter | --baseline | --tasks | --limit | --data | --results | --sandbox)
            [ $# -ge 2 ] && [ -n "$2" ] || fail "$option needs a value"
            value=$2
            shift 2
            ;;
        *) shift ;;
    esac
    case $option in
        --model) model=$(checkpoint "$value") ;;
        --system) systems=$value ;;
        --preset) preset=$value ;;
        --adapter) adapter=$(checkpoint "$value") ;;
        --baseline) baseline=$(checkpoint "$value") ;;
        --no-baseline) with_baseline=false ;;
        --tasks) tasks=$value ;;
        --limit)
            case $value in '' | 0* | *[!0-9]*) fail "--limit is '$value', it must be a whole number above 0" ;; esac
            limit=$value
            ;;
        --data)
            [ -d "$value" ] || fail "--data: there is no directory '$value'"
            data=$(absolute "$value")
            ;;
        --results) results=$(absolute "$value") ;;
        --sandbox)
            case $value in auto | none) sandbox=$value ;; *) fail "--sandbox is '$value', it must be auto or none" ;; esac
            ;;
        --setup) setup_only=true ;;
        --artefacts) artefacts=true ;;
        --dry-run) dry_run=true ;;
        --help | -h)
            usage
            exit 0
            ;;
        *) fail "unknown option '$option'" ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")"
table=tasks/settings/systems.yaml

decoder_of() { # of a system; nothing if there is no such system
    sed -n "s/^$1: {.*decoder: \([a-z0-9_]*\).*/\1/p" "$table"
}

embedded_systems() { # one name a line: the tiny checkpoints in the package
    local config
    for config in refusion_eval/embedded/*/config.json; do
        basename "$(dirname "$config")"
    done
}

embedded_arguments() { # of a tiny checkpoint; most have the name of their decoder
    case $1 in
        *_sft) printf '%s ' --model "embedded:$1" --decoder "${1%_sft}" ;;
        *) printf '%s ' --model embedded --decoder "$1" ;;
    esac
}

published_systems() { # one name a line: those with a public checkpoint
    sed -n 's/^\([a-z0-9_]*\): {.*pretrained:.*/\1/p' "$table"
}

has_preset() { # whether a decoder has such a settings table
    grep -q "^  $preset:" "tasks/settings/$1.yaml"
}

check_systems() { # sets names, and model if none is given
    local name known=''
    case $systems:$model in
        all: | all:embedded) names=($(embedded_systems)) model=embedded ;;
        all:*) names=($(published_systems)) ;;
        *) IFS=, read -r -a names <<<"$systems" ;;
    esac
    model=${model:-published}
    for name in "${names[@]}"; do
        if [ "$model" = embedded ]; then
            grep -qx "$name" <<<"$(embedded_systems)" || fail "--model embedded: there is no embedded checkpoint of '$name'"
        else
            [ -n "$(decoder_of "$name")" ] || fail "--system: there is no system '$name'; $table lists them"
        fi
        if [ -n "$preset" ] && [ "$model" != embedded ] && has_preset "$(decoder_of "$name")"; then known=yes; fi
    done
    case $model in
        embedded | published) [ -z "$adapter" ] || fail "--adapter needs --model with its checkpoint" ;;
        *) [ "${#names[@]}" = 1 ] || fail "--model $model is one checkpoint, and --system names ${#names[@]} systems" ;;
    esac
    [ -z "$preset" ] || [ -n "$known" ] || fail "--preset: no settings table of these systems is called '$preset'"
}

if $artefacts && [ -z "$model$systems" ]; then # everything that is embedded
    systems=all
fi
if [ -n "$systems" ]; then
    check_systems
elif [ -n "$preset$adapter" ] || [ "$model" = published ]; then
    fail "--preset, --adapter and --model published need --system"
fi
refusion_run='' # where the run of ReFusion that the artefacts are about lies
unfused=() suffix=''
if $artefacts; then
    [ -z "$systems" ] || [[ " ${names[*]} " == *" refusion "* ]] ||
        fail "--artefacts is about ReFusion: name refusion among --system, or leave --system out"
    # Of a real checkpoint the figures stand beside published ones, so forwards are those of the paper's algorithm.
    [ "${model:-embedded}" = embedded ] || { unfused=(--set fuse=false) suffix=-unfused; }
fi
set_up
if $setup_only; then
    exit 0
fi

common=()
[ -z "$limit" ] || common+=(--limit "$limit")
[ -z "$data" ] || common+=(--data "$data")
[ -z "$sandbox" ] || common+=(--sandbox "$sandbox")
results=${results:-results}
status=0
run_dirs=()

for_embedded() { # the embedded models are too small to share between threads, which would wait for each other
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}

evaluate() { # runs one system for the table; status 3 says that it finished but some samples failed
    local run_dir=$1 code=0
    shift
    run "$python" -m refusion_eval run --run-dir "$run_dir" "$@" ${tasks:+--tasks "$tasks"} \
        ${common[@]+"${common[@]}"} || code=$?
    case $code in
        0) ;;
        3) status=3 ;;
        *) return "$code" ;;
    esac
    run_dirs+=("$run_dir")
}

go_on_without() { # what is there is worth its table even if a system failed, unless the user interrupted it
    [ "$1" -lt 128 ] || exit "$1"
    status=$1
    echo "eval.sh: $2; run the same command again to continue it" >&2
}

find_reference() { # sets reference: options that name the run which speed-ups are relative to, where one has to be named
    reference=()
    # Of the two autoregressive systems of the embedded family it is the backbone.
    [[ " ${run_dirs[*]} " != *" $results/runs/embedded-autoregressive "* ]] ||
        reference=(--baseline embedded-autoregressive)
}

write_table() {
    local reference
    find_reference
    run mkdir -p "$1"
    run "$python" -m refusion_eval table "${run_dirs[@]}" --csv "$1/results.csv" --markdown "$1/table.md" \
        ${reference[@]+"${reference[@]}"}
}

check_baseline() { # the first run may take hours; that the second can begin is known in seconds
    run "$python" -m refusion_eval check --model "$baseline" --decoder autoregressive || {
        echo "eval.sh: name another baseline with --baseline, or run without one with --no-baseline" >&2
        exit 1
    }
}

evaluate_baseline() {
    evaluate "$results/runs/$(basename "$baseline")-autoregressive" --model "$baseline" --decoder autoregressive \
        --no-thinking || go_on_without $? "the baseline failed, so the table has no speed-up"
}

evaluate_systems() { # those that --system names, one after the other, then one table
    local name arguments run_dir
    [ -z "$baseline" ] || check_baseline
    for name in "${names[@]}"; do
        if [ "$model" = embedded ]; then
            for_embedded
            evaluate "$results/runs/embedded-$name" $(embedded_arguments "$name") ||
                go_on_without $? "$name failed"
            [ "$name" != refusion ] || refusion_run=$results/runs/embedded-refusion
            continue
        fi
        arguments=(--system "$name")
        run_dir=$results/runs/$name
        if [ "$model" != published ]; then
            arguments+=(--model "$model")
            [ -z "$adapter" ] || arguments+=(--adapter "$adapter")
            run_dir=$results/runs/$(basename "$model")-$name
        fi
        if [ -n "$preset" ] && has_preset "$(decoder_of "$name")"; then
            arguments+=(--preset "$preset")
            run_dir+=-$preset
        elif [ -n "$preset" ]; then
            echo "eval.sh: $name has no settings table '$preset' and runs with its own" >&2
        fi
        if [ "$name" = refusion ]; then
            arguments+=(${unfused[@]+"${unfused[@]}"})
            run_dir+=$suffix
            refusion_run=$run_dir
        fi
        evaluate "$run_dir" "${arguments[@]}" || go_on_without $? "$name failed"
    done
    [ -z "$baseline" ] || evaluate_baseline
    [ "${#run_dirs[@]}" -gt 0 ] || $dry_run || exit "$status"
    name=$systems
    write_table "$results/${name//,/+}${preset:+-$preset}"
}

evaluate_refusion() { # ReFusion and its autoregressive baseline
    local model=${model:-embedded} name
    name=$(basename "$model")
    if [ "$model" = embedded ]; then
        for_embedded
    elif $with_baseline; then
        baseline=${baseline:-Qwen/Qwen3-8B}
    fi
    if $with_baseline && [ -n "$baseline" ]; then
        check_baseline
    fi
    refusion_run=$results/runs/$name-refusion$suffix
    evaluate "$refusion_run" --model "$model" --decoder refusion ${unfused[@]+"${unfused[@]}"} || exit
    if $with_baseline && [ -n "$baseline" ]; then
        evaluate_baseline
    elif $with_baseline; then
        evaluate "$results/runs/embedded-autoregressive" --model embedded --decoder autoregressive ||
            go_on_without $? "the baseline failed, so the table has no speed-up"
    fi
    write_table "$results/$name"
}

if [ -n "$systems" ]; then evaluate_systems; else evaluate_refusion; fi
if $artefacts; then make_artefacts; fi
exit "$status"
