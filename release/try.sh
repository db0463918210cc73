#!/usr/bin/env bash
# Install a wheel as a user would, run its demo, and take it away again: nothing of it may be left.
#     release/try.sh dist/sidelight-*.whl [PYTHON]
set -euo pipefail
wheel=$(realpath "$1") python=${2:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"$python" --version
"$python" -m venv env
env/bin/python -m pip install -q --disable-pip-version-check "$wheel"
env/bin/python -m sidelight --version
env/bin/sidelight demo --duration 5 --quiet --listen off --out demo > report
head -4 report
find env -type f | sort > installed
env/bin/python -m pip uninstall -q -y sidelight
find env -type f | sort > remaining
for path in $(comm -23 installed remaining | grep -v __pycache__ | cut -d/ -f1-5 | uniq); do
  test ! -e "$path" || { echo "left behind: $path"; exit 1; }
done
