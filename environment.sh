# What eval.sh, train.sh and test.sh share: the options' helpers and the virtual environment. To be sourced; the functions
# below `set_up` work in this folder and read dry_run (true or false).

fail() {
    local script
    script=$(basename "$0")
    echo "$script: $*; bash $script --help lists the options" >&2
    exit 2
}

absolute() { # a path as seen from where the user stands
    case $1 in
        /*) printf '%s' "$1" ;;
        *) printf '%s/%s' "$PWD" "$1" ;;
    esac
}

child='' starting=false missed='' asked_by='' asked_at='' num_signals=0 # the process that runs; the last signal to end it, and in which second

hand_on() { # a signal to the process that runs, which knows what to finish first; when it has ended, so does the script
    num_signals=$((num_signals + 1))
    # Some senders signal the script both alone and with its group; twice in a second is meant once.
    if [ "$asked_by:$asked_at" = "$1:$SECONDS" ]; then return 0; fi
    asked_by=$1 asked_at=$SECONDS
    if [ -n "$child" ]; then
        kill -s "$1" "$child" 2>/dev/null || :
    elif $starting; then # it may run already, under a number that is not known yet
        missed=$1
    else
        exit $((128 + $(kill -l "$1")))
    fi
}

pause() { # Ctrl-Z
    num_signals=$((num_signals + 1))
    [ -z "$child" ] || kill -s STOP "$child"
    kill -s STOP $$
    [ -z "$child" ] || kill -s CONT "$child"
}

for name in HUP INT QUIT TERM; do trap "hand_on $name" "$name"; done
trap pause TSTP

attended() { # runs a command so that signals to the script alone reach it too
    local code before
    # In a process group of its own, or a key such as Ctrl-C would reach it twice; without one it would ignore Ctrl-C.
    starting=true
    set -m
    "$@" </dev/null &
    set +m
    child=$! starting=false
    if [ -n "$missed" ]; then kill -s "$missed" "$child" 2>/dev/null || :; fi
    while
        code=0 before=$num_signals
        wait "$child" || code=$?
        [ "$before" != "$num_signals" ] # a signal ends the waiting, not the process
    do :; done
    child=''
    [ -z "$asked_by" ] || exit $((code > 128 ? code : 128 + $(kill -l "$asked_by")))
    return "$code"
}

run() { # prints a command; runs it unless this is a dry run
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    $dry_run || attended "$@"
}

quietly() { # as run, with the output in a log that is shown if the command fails
    run "$@" >>"$venv/setup.log" 2>&1 || {
        tail -n 30 "$venv/setup.log" >&2
        echo "$(basename "$0"): set-up failed; the whole output is in $venv/setup.log" >&2
        exit 1
    }
}

warn_of_cuda() { # without a GPU the gigabytes of CUDA libraries are of no use
    if [ -z "${REFUSION_EVAL_TORCH_INDEX:-}" ] && ! nvidia-smi -L >/dev/null 2>&1 &&
        "$python" -m pip install --quiet --dry-run --ignore-installed --report - "$1" 2>/dev/null | grep -q '"nvidia-'; then
        echo "  no NVIDIA GPU here, and pip brings PyTorch with CUDA (gigabytes, works on the CPU too); for the small CPU build"
        echo "  set REFUSION_EVAL_TORCH_INDEX to the CPU index that PyTorch's installation page names"
    fi
}

stamp() { # changes whenever the environment has to be made anew
    "${PYTHON:-python3}" - <<'TEXT'
import hashlib, pathlib, sys
# Even an editable install copies the start-up files.
start_up = ("_refusion_eval_autoload.py", "refusion_eval_autoload.pth", "refusion_eval_autoload.start")
names = ("pyproject.toml", "hatch_build.py", "constraints.txt", *start_up)
parts = [pathlib.Path(name).read_bytes() for name in names]
print(hashlib.sha256(b"".join([*parts, sys.version.encode(), str(pathlib.Path.cwd()).encode()])).hexdigest())
TEXT
}

set_up() { # makes the environment, unless it is there
    venv=${REFUSION_EVAL_VENV:-.venv}
    python=$venv/bin/python
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or later is needed; name one with PYTHON=..."
    if [ -f "$venv/set-up" ] && [ "$(cat "$venv/set-up")" = "$(stamp)" ]; then
        return
    fi
    local torch
    torch=$(grep '^torch==' constraints.txt)
    echo "Setting up $venv (the first time takes minutes; the details go to $venv/setup.log)"
    if [ -e "$venv" ] && [ ! -f "$venv/setup.log" ]; then
        fail "$venv exists and was not made by this script: move it away, or name another place with REFUSION_EVAL_VENV"
    fi
    $dry_run || { rm -rf "$venv" && mkdir -p "$venv" && : >"$venv/setup.log"; }
    run "${PYTHON:-python3}" -m venv "$venv" ||
        fail "no virtual environment could be made; on Debian and Ubuntu install python3-venv"
    if $dry_run; then
        run "$python" -m pip install "$torch"
        run "$python" -m pip install -e . -c constraints.txt
        return
    fi
    warn_of_cuda "$torch"
    echo "  installing $torch"
    quietly "$python" -m pip install "$torch" ${REFUSION_EVAL_TORCH_INDEX:+--index-url "$REFUSION_EVAL_TORCH_INDEX"}
    echo "  installing refusion_eval and what it needs"
    quietly "$python" -m pip install -e . -c constraints.txt
    stamp >"$venv/set-up"
}

add_extra() { # one of pyproject.toml's extras, on top of what set_up made
    if [ -f "$venv/set-up-$1" ] && cmp -s "$venv/set-up" "$venv/set-up-$1"; then
        return
    fi
    if $dry_run; then
        run "$python" -m pip install -e ".[$1]" -c constraints.txt
        return
    fi
    echo "  installing what the extra '$1' needs"
    quietly "$python" -m pip install -e ".[$1]" -c constraints.txt
    cp "$venv/set-up" "$venv/set-up-$1"
}
