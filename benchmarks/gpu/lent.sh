#!/bin/sh
# One call on a machine that is lent for minutes: the advice first, then what no GPU has run or passed yet.
#
#     sh benchmarks/gpu/lent.sh OUT [--minutes 9] [--resume EARLIER] [...]
#
# Every check keeps the time that those after it need at least. What follows OUT goes to `python -m benchmarks.gpu`; a
# second --only or --minutes replaces the one here. Wheels in $WHEELS (default: wheels) are installed beside, for this
# call. PYTHON chooses the interpreter that has torch.
set -eu
out=$1
shift
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
set -- --only advice overhead calls tests live fix faults ranks copies "$@"
wheels=${WHEELS:-wheels}
if [ -d "$wheels" ]; then
    site=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl
    PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
exec "$python" -m benchmarks.gpu --out "$out" "$@"
