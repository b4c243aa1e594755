# eval.sh --artefacts: every table and figure of the paper from the runs before, ablations and sweeps. To be sourced by
# eval.sh, whose functions and options it uses. A part that fails is named and left out; the rest is made all the same.

make_part() { # one command of the package; what was there already stays
    run "$python" -m refusion_eval "$@" || {
        local code=$?
        [ "$code" = 3 ] || go_on_without "$code" "'$1 ${2##*/}' failed, and what needs it is missing"
        status=$code
    }
}

spec_of() { # writes a sweep for these checkpoints: FIGURE FILE; fails if no system is left
    if [ "$model" = embedded ]; then # of the embedded family those that are there
        awk -v have=" $(embedded_systems | tr '\n' ' ')" '
            /^[^ ]/ { keep = 1 }
            /^  [a-z0-9_]+:$/ { name = $1; sub(":", "", name); keep = index(have, " " name " ") > 0 }
            keep' "refusion_eval/sweep/specs/mini_$1.yaml" >"$2"
    else
        sed -e "s|{system: refusion}|{system: refusion, model: '$model'}|" \
            -e "s|{system: qwen3}|{system: qwen3, model: '$baseline'}|" "refusion_eval/sweep/specs/$1.yaml" >"$2"
    fi
}

ablation() { # NAME SETTING...: ReFusion with other settings
    local run_dir=$results/runs/$family-refusion-$1
    shift
    evaluate "$run_dir" --model "$model" --decoder refusion "$@" || go_on_without $? "$run_dir failed"
}

make_sweep() { # FIGURE
    local folder=$results/sweeps/$family-$1 options=() task=mbpp
    [ "$model" != embedded ] || task=gsm8k # the tiny models answer every mini MBPP item right, whatever the settings
    [ -z "$limit" ] || options+=(--limit "$limit")
    [ -z "$data" ] || options+=(--data "$data")
    [ -z "$sandbox" ] || options+=(--sandbox "$sandbox")
    $dry_run || { mkdir -p "$folder" && spec_of "$1" "$folder/$1.yaml"; }
    make_part sweep "$folder/$1.yaml" --out "$folder" ${options[@]+"${options[@]}"}
    if $dry_run || [ -f "$folder/sweep.csv" ]; then make_part plot "$1" "$folder" --task "$task" --out "$out"; fi
}

make_artefacts() {
    local model=${model:-embedded} out options=()
    [ "$model" != published ] || model=GSAI-ML/ReFusion
    baseline=${baseline:-Qwen/Qwen3-8B}
    family=$(basename "$model")
    out=$results/$family/artefacts
    run mkdir -p "$out"
    ablation recompute_kv --set recompute_kv=true
    ablation left_to_right --set left_to_right=true --tasks mbpp
    write_table "$out"
    make_part paper-table all "${run_dirs[@]}" --out "$out"
    make_part plot figure1 "${run_dirs[@]}" --out "$out"
    make_part claims "${run_dirs[@]}" --out "$out"

    [ -z "$data" ] || options+=(--data "$data")
    [ -z "$limit" ] || options+=(--responses "$limit")
    make_part locality --model "$model" --out "$out/locality.csv" ${options[@]+"${options[@]}"}
    if $dry_run || [ -f "$out/locality.csv" ]; then make_part plot figure3 "$out/locality.csv" --out "$out"; fi

    local figure
    for figure in figure4 figure6 figure8; do make_sweep "$figure"; done
    for figure in figure5 figure9; do
        make_part plot "$figure" "$results/runs/$family-refusion" --out "$out"
    done
    # Results of variants trained on more and less data come from elsewhere.
    if [ -f "$results/$family/scaling.csv" ]; then
        make_part plot figure7 "$results/$family/scaling.csv" --out "$out"
    fi
    echo "Tables and figures: $out"
}
