#!/bin/sh
# Measure orbaxkit on the accelerator at hand, in under four minutes: sh tests/device/run.sh [--tiny]
#
# Needs this checkout and a Python with JAX for the device ($PYTHON, else python3). Of what else orbaxkit needs, what is
# missing is taken from the wheels in $WHEELS (.whl), if there are any, else from pip's index, into a temporary folder.
# The last line printed is JSON; it goes to $OUT too, a file or a folder. Ends with 1 where a ratio is too low.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}

missing=$("$python" - <<'PYTHON'
import importlib.metadata, re, tomllib
with open("pyproject.toml", "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"]
for name in (re.match(r"[\w.-]+", text)[0] for text in needed):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(name)
PYTHON
)
case " $(echo $missing) " in
*" jax "*)
    echo "no JAX is here for $python; install it for the device: pip install 'jax[cuda13]' or 'jax[tpu]'" >&2
    exit 2
    ;;
esac

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "$missing" ]; then
    echo "installing for this run:" $missing >&2
    if ls "$wheels"/*.whl >/dev/null 2>&1; then
        "$python" -m pip install -q --target "$site" --no-deps --no-index --find-links "$wheels" $missing
    else
        "$python" -m pip install -q --target "$site" --no-deps $missing
    fi
fi
PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" timeout 240 "$python" tests/device/ratios.py "$@"
