"""How far a device's work is above its floor."""

from dlprof.result.figures import DeviceWork, WorkKind


def test_a_kind_is_above_its_own_floor_and_at_the_least_above_one_that_it_shares() -> None:
    own, shared = WorkKind("convolution", 1, 10.0, 4.0), WorkKind("normalization", 1, 30.0, 1.0, shared_ns=29.0)
    little = WorkKind("reductions", 1, 3.0, 0.0, shared_ns=3.0)
    work = DeviceWork((own, shared, little), 13.0, shared_floor_ns=8.0)
    assert work.ns == 43.0
    assert [work.above_ns(row) for row in work.rows] == [6.0, 21.0, 0.0]
