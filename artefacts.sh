# eval.sh --artefacts: every table and figure of the paper from the runs before, ablations and sweeps. To be sourced by
# eval.sh, whose functions and options it uses. A part that fails is named and left out; the rest is made all the same.

make_part() { # one command of the package; what was there already stays
    run "$python" -m refusion_eval "$@" || {
        local code=$?
        [ "$code" = 3 ] || go_on_without "$code" "'$1 ${2##*/}' failed, and what needs it is missing"
        status=$code
    }
}

task_of() { # the benchmark of a figure: DEFAULT, or the first of those asked for if it is not among them
    local asked=${tasks//mini_/}
    case ",$asked," in ,, | *",$1,"*) printf '%s' "$1" ;; *) printf '%s' "${asked%%,*}" ;; esac
}

spec_of() { # writes a sweep for these checkpoints: FIGURE TASK FILE; fails if no system is left
    if [ "$model" = embedded ]; then # of the embedded family those that are there
        awk -v have=" $(embedded_systems | tr '\n' ' ')" '
            /^[^ ]/ { keep = 1 }
            /^  [a-z0-9_]+:$/ { name = $1; sub(":", "", name); keep = index(have, " " name " ") > 0 }
            keep' "refusion_eval/sweep/specs/mini_$1.yaml"
    else
        sed -e "s|{system: refusion}|{system: refusion, model: '$model'}\\
    settings: {fuse: false}|" -e "s|{system: qwen3}|{system: qwen3, model: '$baseline'}|" "refusion_eval/sweep/specs/$1.yaml"
    fi | sed "s|^tasks: .*|tasks: [$2]|" >"$3"
}

ablation() { # NAME TASKS SETTING...: ReFusion with other settings
    local run_dir=$refusion_run-$1 tasks=$2
    shift 2
    evaluate "$run_dir" --model "$model" --decoder refusion ${unfused[@]+"${unfused[@]}"} "$@" ||
        go_on_without $? "$run_dir failed"
}

stock_loop() { # the autoregressive system by transformers' generate, so that speed has both loops
    local run_dir=$results/runs/$(basename "$baseline")-autoregressive-generate arguments=(--no-thinking)
    [ "$baseline" != embedded ] || arguments=()
    evaluate "$run_dir" --model "$baseline" --decoder autoregressive ${arguments[@]+"${arguments[@]}"} --loop generate ||
        go_on_without $? "$run_dir failed, and speed-ups over it are missing"
}

make_sweep() { # FIGURE
    local folder=$results/sweeps/$family-$1 options=() task
    task=$(task_of mbpp)
    [ "$model" != embedded ] || task=$(task_of gsm8k) # of mini MBPP the tiny models answer every item right
    [ -z "$limit" ] || options+=(--limit "$limit")
    [ -z "$data" ] || options+=(--data "$data")
    [ -z "$sandbox" ] || options+=(--sandbox "$sandbox")
    $dry_run || { mkdir -p "$folder" && spec_of "$1" "$task" "$folder/$1.yaml"; }
    make_part sweep "$folder/$1.yaml" --out "$folder" ${options[@]+"${options[@]}"}
    if $dry_run || [ -f "$folder/sweep.csv" ]; then make_part plot "$1" "$folder" --task "$task" --out "$out"; fi
}

make_artefacts() {
    local model=${model:-embedded} out task reference options=()
    [ "$model" != published ] || model=GSAI-ML/ReFusion
    [ "$model" != embedded ] || baseline=embedded
    baseline=${baseline:-Qwen/Qwen3-8B}
    task=$(task_of mbpp)
    family=$(basename "$model")
    out=$results/$family/artefacts
    run mkdir -p "$out"
    ablation recompute_kv "$tasks" --set recompute_kv=true
    ablation left_to_right "$task" --set left_to_right=true
    make_part paper-table all "${run_dirs[@]}" --out "$out"
    make_part plot figure1 "${run_dirs[@]}" --task "$task" --out "$out"
    make_part claims "${run_dirs[@]}" --out "$out"
    make_part compare "$refusion_run" "$refusion_run-recompute_kv" --csv "$out/compare_recompute_kv.csv" \
        --markdown "$out/compare_recompute_kv.md"
    stock_loop
    write_table "$out"
    find_reference
    make_part speed "${run_dirs[@]}" --csv "$out/speed.csv" --markdown "$out/speed.md" ${reference[@]+"${reference[@]}"}
    make_part cost "${run_dirs[@]}" --csv "$out/cost.csv" --markdown "$out/cost.md"

    [ -z "$data" ] || options+=(--data "$data")
    [ -z "$limit" ] || options+=(--responses "$limit")
    make_part locality --model "$model" --out "$out/locality.csv" ${options[@]+"${options[@]}"}
    if $dry_run || [ -f "$out/locality.csv" ]; then make_part plot figure3 "$out/locality.csv" --out "$out"; fi

    local figure
    for figure in figure4 figure6 figure8; do make_sweep "$figure"; done
    for figure in figure5 figure9; do
        make_part plot "$figure" "$refusion_run" --task "$task" --out "$out"
    done
    make_part replay "$refusion_run" --task "$task" --out "$out/replay.gif"
    # Every sample is in the page, so it is too large for a folder that is kept in the repository.
    make_part report "${run_dirs[@]}" --out "$results/reports/$family.html" ${data:+--data "$data"} \
        ${reference[@]+"${reference[@]}"}
    # Results of variants trained on more and less data come from elsewhere.
    if [ -f "$results/$family/scaling.csv" ]; then
        make_part plot figure7 "$results/$family/scaling.csv" --out "$out"
    fi
    echo "Tables and figures: $out"
}
