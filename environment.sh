# What eval.sh, train.sh and test.sh share: the virtual environment. To be sourced; `set_up` and `add_extra` work in this
# folder and read dry_run (true or false).

fail() {
    local script
    script=$(basename "$0")
    echo "$script: $*; bash $script --help lists the options" >&2
    exit 2
}

run() { # prints a command; runs it unless this is a dry run
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    $dry_run || "$@" </dev/null
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

find_python() { # sets venv and python
    venv=${REFUSION_EVAL_VENV:-.venv}
    python=$venv/bin/python
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or later is needed; name one with PYTHON=..."
}

set_up() { # makes the environment, unless it is there
    find_python
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

start() { # MODULE EXTRAS OPTION...: makes the environment and becomes a module of refusion_eval.scripts with these options
    local script here=$PWD module=refusion_eval.scripts.$1 extras=$2 option setup_only=false interpreter=${PYTHON:-python3}
    script=$(basename "$0")
    shift 2
    cd "$(dirname "${BASH_SOURCE[0]}")"
    dry_run=false
    for option in "$@"; do
        case $option in
            --dry-run) dry_run=true ;;
            --setup) setup_only=true ;;
            --help | -h) exec "$interpreter" -m "$module" --called-by "$script" "$here" '' run "$@" ;;
        esac
    done
    find_python
    # Before the minutes that an environment takes: a wrong option ends the script here.
    "$interpreter" -m "$module" --called-by "$script" "$here" "$python" check "$@" || exit
    set_up
    for option in $extras; do add_extra "$option"; done
    if $setup_only; then exit 0; fi
    if ! $dry_run; then interpreter=$python; fi
    exec "$interpreter" -m "$module" --called-by "$script" "$here" "$python" run "$@"
}
