#!/bin/sh
# Prints the path of a Python of the locks' version (requirements/platform.json), or says on stderr how to get one.
# PYTHON=PATH: only this one is tried.
version=$(sed -n 's/.*"PYTHON_VERSION": {"default": "\([0-9.]*\)".*/\1/p' "$(dirname "$0")/../requirements/platform.json")

fits() { "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" >/dev/null 2>&1; }

if [ -n "$PYTHON" ]; then
    set -- "$PYTHON"
else
    pyenv=$(command -v pyenv || command -v python3) # in pyenv's bin or shims: of another user's, perhaps
    set -- "python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
        "${pyenv%/*/*}/versions/$version".*/bin/python \
        "$(uv python find --no-project "$version" 2>/dev/null)"
fi
for python; do
    if fits "$python"; then
        command -v "$python"
        exit
    fi
done
echo "error: Python $version was not found${PYTHON:+ at $PYTHON}: install it (a Debian or Ubuntu that has it:" \
    "'apt-get install python$version python$version-venv'; any system: 'uv python install $version' or" \
    "'pyenv install $version'), or run 'make setup PYTHON=<path of python$version>'." >&2
exit 1
