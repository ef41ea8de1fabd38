#!/bin/sh
# One entry for everything: sets an environment up where none is active, then becomes the program that was asked for.
set -eu

repo=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
lock=$repo/.venv.lock

usage() {
    cat <<'TEXT'
usage: sh run.sh demo [words]        the three steps and the comparison on the embedded data (words go to the demo)
       sh run.sh test [words]        the tests (words go to pytest; paths are relative to the checkout)
       sh run.sh python [words]      Python in the environment, for example sh run.sh python -m alpaca_rlhf.inference.chat --help
       sh run.sh [launcher words] script.py [flags]
                                     a step program under the DeepSpeed launcher, for example
                                     sh run.sh --num_gpus 2 main.py --deepspeed --zero_stage 2

Without an active environment it makes .venv in the checkout and installs requirements.txt there, once; in an active
one it installs what differs from requirements.txt. ALPACA_RLHF_INSTALL=no leaves the active environment as it is.
TEXT
}

say() {
    printf '%s\n' "run.sh: $*" >&2
}

die() {
    say "error: $*"
    exit 1
}

# Set $python to the first interpreter that is new enough.
find_python() {
    too_old=
    for python in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        version=$("$python" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null) || continue
        if new_enough; then
            return
        fi
        too_old=${too_old:-$version}
    done
    if [ -n "$too_old" ]; then
        die "Python 3.10 or newer is needed and only $too_old was found: install a newer Python (python3) first"
    fi
    die "Python was not found: install Python 3.10 or newer (Debian, Ubuntu: apt-get install python3 python3-venv) first"
}

new_enough() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# Whether every pin of requirements.txt is what the active environment has (a local part such as +cpu does not matter).
pins_satisfied() {
    "$python" -c '
import importlib.metadata, re, sys
pin = re.compile(r"([\w.-]+)==(\S+)(?:\s*;\s*python_version\s*(>=|<)\s*\"3\.(\d+)\")?$")
for line in open(sys.argv[1], encoding="utf-8"):
    line = line.split("#")[0].strip()
    if not line:
        continue
    name, version, relation, minor = pin.match(line).groups()
    if relation and (sys.version_info[1] >= int(minor)) != (relation == ">="):
        continue
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(1)
    if found.split("+")[0] != version:
        sys.exit(1)
' "$repo/requirements.txt"
}

# One set-up at a time. The lock is a link that names its owner, so it appears with its content in one step.
take_lock() {
    told=
    while ! ln -s "$$" "$lock" 2>/dev/null; do
        if [ ! -L "$lock" ]; then
            if [ ! -w "$repo" ]; then
                die "$repo cannot be written and the requirements are not installed: copy the checkout to a place of your own"
            fi
            continue # the owner has just finished
        fi
        owner=$(readlink "$lock") || continue
        if ! kill -0 "$owner" 2>/dev/null; then
            # The owner is gone. Only who moves its link away may drop it; a younger lock goes back.
            if mv "$lock" "$lock.$$" 2>/dev/null; then
                if [ "$(readlink "$lock.$$")" = "$owner" ]; then
                    rm -f "$lock.$$"
                else
                    mv "$lock.$$" "$lock"
                fi
            fi
            continue
        fi
        if [ -z "$told" ]; then
            say "waiting for the set-up that process $owner is doing (if there is none, remove $lock)"
            told=yes
        fi
        sleep 1
    done
    trap 'rm -f "$lock"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

drop_lock() {
    rm -f "$lock"
    trap - EXIT INT TERM HUP
}

# Install the pins into the environment of $python, which lives in $1.
install_pins() {
    "$python" -c 'import pip' 2>/dev/null ||
        die "the environment $1 has no pip: run '$python -m ensurepip' (Debian, Ubuntu: apt-get install python3-pip) first"
    say "installing the pinned requirements into $1 (some minutes; 1.7 GB, more with a CUDA build of torch)"
    log=$1/alpaca_rlhf_install.log
    if ! "$python" -m pip install --disable-pip-version-check -r "$repo/requirements.txt" >"$log" 2>&1; then
        reason=$(grep -i '^ *error' "$log" | tail -n 1)
        if grep -qiE 'name resolution|new connection|max retries|network is unreachable|connection refused|timed out' "$log"; then
            die "the package index cannot be reached, check the network and try again (all of pip's output: $log)"
        fi
        die "pip could not install the requirements: ${reason:-no reason given} (all of pip's output: $log)"
    fi
}

use_active_environment() {
    prefix=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    python=$prefix/bin/python
    if [ ! -x "$python" ]; then
        die "the active environment $prefix has no bin/python: deactivate it, or activate another one"
    fi
    new_enough || die "the active environment $prefix has a Python older than 3.10: activate another one, or none"
    if [ "${ALPACA_RLHF_INSTALL:-yes}" = no ] || pins_satisfied; then
        return
    fi
    take_lock
    pins_satisfied || install_pins "$prefix"
    drop_lock
}

use_own_environment() {
    prefix=$repo/.venv
    stamp=$prefix/requirements.stamp
    digest=$(cksum <"$repo/requirements.txt")
    if ! stamped; then
        find_python
        base=$python
        take_lock
        stamped || make_environment
        drop_lock
    fi
    python=$prefix/bin/python
    VIRTUAL_ENV=$prefix
    export VIRTUAL_ENV
}

stamped() {
    [ -x "$prefix/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]
}

make_environment() {
    python=$prefix/bin/python
    if ! "$python" -c 'import pip' 2>/dev/null; then # missing, half made, or its Python is gone
        "$base" -c 'import venv, ensurepip' 2>/dev/null ||
            die "Python's venv module is missing: install it (Debian, Ubuntu: apt-get install python3-venv) and try again"
        say "making an environment in $prefix"
        rm -rf "$prefix"
        reason=$("$base" -m venv "$prefix" 2>&1) || die "$base could not make an environment in $prefix: $reason"
    fi
    rm -f "$stamp"
    install_pins "$prefix"
    printf '%s\n' "$digest" >"$stamp"
}

if [ $# -eq 0 ]; then
    usage >&2
    exit 2
fi
case $1 in -h | --help)
    usage
    exit 0
    ;;
esac

if [ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then
    use_active_environment
else
    use_own_environment
fi
# The programs of the environment (ninja, for DeepSpeed) have to be found too, even if nobody activated it.
PATH=$prefix/bin:$PATH
PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
export PATH PYTHONPATH

case $1 in
demo)
    shift
    exec "$python" -m alpaca_rlhf.demo.run "$@"
    ;;
test)
    shift
    cd "$repo"
    # One process a core, a file of tests whole in one of them; -n 0 is one after the other.
    exec "$python" -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
    ;;
python)
    shift
    exec "$python" "$@"
    ;;
*)
    exec "$python" -m alpaca_rlhf.runtime.launcher "$@"
    ;;
esac
