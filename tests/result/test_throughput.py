"""What so many samples cost follows from the rate, the GPUs and their power; what is not known stays unknown."""

from dlprof.result.figures import Cost, Throughput


def test_what_samples_tokens_and_an_epoch_cost() -> None:
    t = Throughput(200.0, 40_000.0, 20.0, "loader", gpus=4, power_w=1200.0, epoch_samples=72_000, epoch_s=360.0)
    assert t.of_samples(720_000) == Cost(3600.0, 4.0, 1200.0 * 3600)
    assert t.of_tokens(4e6) == Cost(100.0, 400 / 3600, 120_000.0)
    assert t.epoch == Cost(360.0, 0.4, 432_000.0)


def test_what_is_not_known_has_no_cost() -> None:
    t = Throughput(None, 10.0, None, "script")
    assert (t.of_samples(5), t.epoch) == (None, None)
    assert t.of_tokens(20) == Cost(2.0)
