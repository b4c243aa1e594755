# shellcheck shell=bash
# What eval.sh, train.sh, test.sh and scripts/release share: the virtual environment. To be sourced; `set_up`,
# `make_environment` and `add_extra` work in this folder and read dry_run (true or false).

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
    if $dry_run; then
        run "$@"
        return
    fi
    run "$@" >>"$venv/setup.log" 2>&1 || {
        tail -n 30 "$venv/setup.log" >&2
        echo "$(basename "$0"): set-up failed; the whole output is in $venv/setup.log" >&2
        exit 1
    }
}

counted() { # as quietly; says meanwhile how far pip or uv has come
    local watcher='' code=0
    $dry_run || { count & watcher=$!; }
    (quietly "$@") || code=$?
    # A watcher that is left after a failure would keep the output of the script open.
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
    [ "$code" = 0 ] || exit "$code"
}

seconds_between=20
count() { # ends with the script, which may fail meanwhile
    local found there
    while sleep "$seconds_between" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        found=$(grep -c '^Collecting ' "$venv/setup.log") || true
        there=$(find "$venv" -maxdepth 5 -name '*.dist-info' 2>/dev/null | wc -l)
        if [ "$there" -lt "$found" ]; then echo "  $found of about 110 libraries found"; else
            echo "  $((there)) of about 110 libraries installed"
        fi
    done
}

choose_index() { # TORCH==VERSION: says what will be installed; sets index, empty for the one that pip or uv has by itself
    index=${REFUSION_EVAL_TORCH_INDEX:-}
    local cpu_index=https://download.pytorch.org/whl/cpu size="0.5 GB to download, 2 GB on the disk"
    local large="3 GB to download, 6 GB on the disk"
    if [ "$index" = default ]; then
        index='' size=$large
    elif [ -n "$index" ]; then
        size="$size; with CUDA $large"
    elif [ "$(uname -s)" != Linux ]; then
        : # Elsewhere the default index has builds without CUDA.
    elif nvidia-smi -L >/dev/null 2>&1; then
        size=$large
    elif $dry_run || has_torch "$cpu_index" "$1"; then
        index=$cpu_index
        echo "  There is no NVIDIA GPU here, so PyTorch's CPU build is taken; REFUSION_EVAL_TORCH_INDEX=default takes CUDA's."
    else
        size="$size; with CUDA $large"
        echo "  $cpu_index cannot be used from here, so PyTorch comes from the default index."
    fi
    echo "  About 110 libraries ($size) in 2 to 10 minutes; what is in the cache of $installer is not downloaded."
}

has_torch() { # INDEX TORCH==VERSION: whether the index answers within seconds and has this build for this Python
    "${PYTHON:-python3}" - "$1/torch/" "${2/==/-}" 2>/dev/null <<'TEXT'
import signal, sys, urllib.request
url, build = sys.argv[1:]
signal.alarm(10)  # the timeout below does not cover the search for the name's address
page = urllib.request.urlopen(url, timeout=5).read().decode()
sys.exit(f">{build}+cpu-cp{sys.version_info[0]}{sys.version_info[1]}-" not in page)
TEXT
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

find_python() { # sets venv, python, installer and install
    venv=${REFUSION_EVAL_VENV:-.venv}
    python=$venv/bin/python
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or later is needed; name one with PYTHON=..."
    installer=pip install=("$python" -m pip install)
    # uv reads nothing of pip's configuration, so an index or a folder of wheels that is named there needs pip.
    if command -v uv >/dev/null &&
        ! "${PYTHON:-python3}" -m pip config list 2>/dev/null | grep -qE '(index-url|no-index|find-links)='; then
        installer=uv install=(uv pip install --python "$python")
    fi
}

make_environment() { # WHAT...: the virtual environment anew, with PyTorch and what pip is told to install
    local torch
    torch=$(grep '^torch==' constraints.txt)
    echo "Setting up $venv with $installer; the details go to $venv/setup.log"
    choose_index "$torch"
    $dry_run || { rm -rf "$venv" && mkdir -p "$venv" && : >"$venv/setup.log"; }
    run "${PYTHON:-python3}" -m venv "$venv" ||
        fail "no virtual environment could be made; on Debian and Ubuntu install python3-venv"
    echo "  installing $torch"
    counted "${install[@]}" "$torch" ${index:+--index-url "$index"}
    echo "  installing refusion_eval and what it needs"
    counted "${install[@]}" "$@" -c constraints.txt
    echo "  compiling the forward for this processor"
    quietly "$python" -P -c "from refusion_eval.models.native import compile_forwards; compile_forwards()"
}

set_up() { # makes the environment, unless it is there
    find_python
    if [ -f "$venv/set-up" ] && [ "$(cat "$venv/set-up")" = "$(stamp)" ]; then
        return
    fi
    if [ -e "$venv" ] && [ ! -f "$venv/setup.log" ]; then
        fail "$venv exists and was not made by this script: move it away, or name another place with REFUSION_EVAL_VENV"
    fi
    make_environment -e .
    $dry_run || stamp >"$venv/set-up"
}

add_extra() { # one of pyproject.toml's extras, on top of what set_up made
    if [ -f "$venv/set-up-$1" ] && cmp -s "$venv/set-up" "$venv/set-up-$1"; then
        return
    fi
    echo "  installing what the extra '$1' needs"
    quietly "${install[@]}" -e ".[$1]" -c constraints.txt
    $dry_run || cp "$venv/set-up" "$venv/set-up-$1"
}

start() { # COMMAND EXTRAS OPTION...: makes the environment and becomes this command of refusion-eval with these options
    local here=$PWD command=$1 extras=$2 option setup_only=false helping=false before=''
    local words=(-m refusion_eval "$command")
    shift 2
    cd "$(dirname "${BASH_SOURCE[0]}")" || exit
    # Paths mean where the user stands; results lie beside the script unless another folder is named.
    if [ "$command" = suite ] && [ "$here" != "$PWD" ]; then words+=(--root "$PWD"); fi
    dry_run=false
    for option in "$@"; do
        if [ "$before" = --extra ]; then
            grep -q "^$option = \[" pyproject.toml || fail "--extra $option: pyproject.toml has no such extra"
            before='' extras="$extras $option" && continue
        fi
        case $command$option in
            *--extra) before=$option && continue ;;
            *--setup) setup_only=true && continue ;;
            train--deepspeed) extras="$extras deepspeed" && continue ;;
            *--dry-run) dry_run=true ;;
            *--help | *-h) helping=true ;;
        esac
        words+=("$option")
    done
    [ -z "$before" ] || fail "--extra needs the name of an extra of pyproject.toml, such as server"
    find_python
    if $helping; then
        say_help
    else
        set_up
        for option in $extras; do add_extra "$option"; done
        if $setup_only; then exit 0; fi
    fi
    [[ $python == /* ]] || python=$PWD/$python
    cd "$here" || exit
    if [ -x "$python" ]; then
        exec "$python" "${words[@]}"
    elif ! $helping; then # a dry run without an environment, which alone knows the commands
        run "$python" "${words[@]}"
    fi
}

say_help() { # the options of the script; those of the command follow once the environment is there
    cat <<TEXT
Usage: bash $(basename "$0") [OPTION]...

  --setup         Make the environment and stop. Once it is there, --help shows all other options too.
  --extra NAME    Also install what this extra of pyproject.toml needs, such as server or train.

Environment: PYTHON (python3), REFUSION_EVAL_VENV (.venv), REFUSION_EVAL_TORCH_INDEX (index of PyTorch's builds;
\`default\` is that of pip or uv; unset, a Linux machine without an NVIDIA GPU gets the CPU build).

TEXT
}
