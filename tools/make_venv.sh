#!/bin/sh
# Makes the virtual environment and installs the project with what tests and training need.
# usage: make_venv.sh PYTHON VENV      PIP_ARGS: extra arguments for pip
set -eu
python=$1
venv=$2

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
3.10 | 3.11 | 3.12 | 3.13) ;;
*)
    echo "error: Python $version is not supported; use 3.10 to 3.13: make PYTHON=python3.12 ..." >&2
    exit 1
    ;;
esac

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then # Debian keeps them in a package of their own
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    else
        echo "error: $python has no venv module; as root: apt-get install python3-venv" >&2
        exit 1
    fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing into $venv (torch is large: a few minutes on a slow line) ..."
export PIP_DISABLE_PIP_VERSION_CHECK=1
# shellcheck disable=SC2086  # PIP_ARGS is a list of words
"$venv/bin/python" -m pip install -q ${PIP_ARGS:-} -c constraints.txt torch
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install -q ${PIP_ARGS:-} -c constraints.txt -e '.[trainer,dev]'
touch "$venv/.installed"
