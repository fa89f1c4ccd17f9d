"""The ranks of a large run, as result.json holds them."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from dlprof.result import Result
from dlprof.result.figures import Member
from dlprof.result.stored import from_json, to_json
from tests.fixtures import results


def test_members_are_read_as_they_were_written() -> None:
    members = (Member(0, "node-1", "stage 0"), Member(1, "node-1", "stage 1", "computation", 3.0, 2.0))
    result: Result = replace(results.ddp(), members=members)
    assert from_json(msgspec.json.decode(msgspec.json.encode(to_json(result)))).members == members
