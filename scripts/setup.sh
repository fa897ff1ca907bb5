#!/bin/sh
# Make .venv ready: fastgen with its development tools and every plugin under plugins/, all editable.
# Quick when nothing changed: the stamp holds a checksum of what the set-up depends on, and then pip is not called.
# PYTHON chooses the interpreter; without it, the first of the usual names that is new enough.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.ready
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON: no such program"
        "$PYTHON" -c "$new_enough" 2>/dev/null ||
            fail "fastgen needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1 | head -n 1). Choose another: make ${goal:-test} PYTHON=python3.12"
        echo "$PYTHON"
        return
    fi
    for name in python3 python python3.13 python3.12 python3.11; do
        if "$name" -c "$new_enough" >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    fail "fastgen needs Python 3.11 or newer; python3 is $(python3 --version 2>&1 | head -n 1). Name one: make ${goal:-test} PYTHON=/path/to/python3.12"
}

wanted() { # everything that decides what is installed; the folder, because editable installs and scripts hold its path
    {
        pwd
        cat pyproject.toml constraints.txt scripts/setup.sh
        for project in plugins/*/pyproject.toml; do
            [ ! -f "$project" ] || { echo "$project"; cat "$project"; }
        done
    } | cksum
}

version() { "$1" -c 'import sys; print(sys.version)' 2>/dev/null || echo none; }

checksum=$(wanted)
if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$checksum" ]; then
    # An interpreter named by the caller that is not this environment's means: build it again with that one.
    [ -n "${PYTHON:-}" ] || exit 0
    python=$(find_python)
    [ "$(version "$python")" != "$(version $venv/bin/python)" ] || exit 0
else
    python=$(find_python)
fi

rm -f $stamp
if [ "$(version $venv/bin/python)" = none ] || { [ -n "${PYTHON:-}" ] && [ "$(version "$python")" != "$(version $venv/bin/python)" ]; }; then
    echo "Creating $venv with $("$python" --version)"
    "$python" -m venv --clear $venv ||
        fail "$python cannot create a virtual environment; on Debian and Ubuntu install its venv package (apt install python3-venv)"
fi

set -- -e '.[dev]'
for project in plugins/*/pyproject.toml; do
    [ ! -f "$project" ] || set -- "$@" -e "$(dirname "$project")"
done
quiet=-qq
[ ! -t 1 ] || quiet= # on a terminal pip shows its progress, elsewhere its errors alone
echo "Installing fastgen, its development tools and the plugins into $venv (some minutes the first time: torch is large)"
$venv/bin/python -m pip install $quiet --disable-pip-version-check --constraint constraints.txt "$@"
echo "$checksum" >$stamp
