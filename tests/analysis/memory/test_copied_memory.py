"""Workers that copy what they read: seen in their private memory, and told from workers that grow by themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.rules.copied_memory import RULE
from tests.fixtures import runs, traces
from tests.fixtures.claims import case, claims
from tests.fixtures.runs import MS, light

MB, GB, SECOND, N = 10**6, 10**9, 10**9, 40
OBJECTS = [{"class": "Rows", "name": "rows", "kind": "list", "length": 3_000_000}]


def read(
    own: Callable[[int], int],
    every: Callable[[int], int] = lambda _: 4 * GB,
    left: int = 10 * GB,
    **facts: Any,
) -> Callable[[Path], Path]:
    """Return what makes a rank of a step a second, whose two workers hold so much in second n, of their own and all."""

    def make(folder: Path) -> Path:
        loaders = [{"role": "train", "num_workers": 2, "objects": OBJECTS, "dataset": "Rows"}]
        run = runs.recorded(
            folder, (None, [light(k, 900 * MS) for k in range(N)], {**runs.CPU, "loaders": loaders, **facts})
        )
        lines: list[dict[str, Any]] = [
            {"at_ns": traces.BASE_NS + k * SECOND, "children": 2, "anonymous_bytes": 2 * GB}
            | {"children_anonymous_bytes": every(k)}
            | ({"children_private_bytes": own(k)} if own(k) and not k % 2 else {})
            for k in range(N)
        ]
        (run / "ranks/00000/processes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        (run / "hosts/node-1").mkdir(parents=True)
        host = {"at_ns": traces.BASE_NS + SECOND, "memory_available_bytes": left}
        (run / "hosts/node-1/host.jsonl").write_text(json.dumps(host) + "\n")
        return run

    return make


def copies(n: int) -> int:
    return 100 * MB + n * 50 * MB


@pytest.mark.parametrize(
    ("make", "told"),
    [
        case("copied", read(copies), scope="risk", saving=0.0, ranks=(0,),
             says=("each of 2 workers has copied 950 MB", "all of them 50 MB a step", "Up to 2 GB more", "fits as well",
                   "hold the list `rows` of `Rows`, 3,000,000 objects, in an array")),
        case("more than fits", read(copies, left=GB), says="enough for 20 steps: it may not fit"),
        case("more than the container has", read(copies, cpu={"memory_limit_bytes": 5 * GB}), says="enough for 20"),
        case("workers grow by themselves", read(copies, lambda n: 4 * GB + n * 50 * MB), state="clear"),
        case("little of a large host", read(copies, left=200 * GB), state="clear", summary="the workers have copied"
             " 1.90 GB of shared memory"),
        case("copied and let go", read(lambda n: copies(n % 6)), state="clear"),
        case("copied at the start alone", read(lambda n: copies(min(n, 12))), state="clear"),
        case("not read", read(lambda _: 0), state="not_measured"),
    ],
)  # fmt: skip
def test_rule(tmp_path: Path, make: Callable[[Path], Path], told: dict[str, Any]) -> None:
    claims(RULE, make(tmp_path), told)
