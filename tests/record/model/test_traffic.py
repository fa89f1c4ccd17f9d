"""The bytes of operators, and of chains of elementwise ones, where they are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dlprof.record.collectors.flops import Traffic  # noqa: E402

N = 500
UNIT = 4 * N * N  # a square matrix in float32


def counted(work: Callable[[], object], optimizer: bool = False) -> dict[str, Any]:
    """Return what is counted of work; `by`: the bytes by operator."""
    traffic = Traffic()

    class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            traffic.see(func, args, out, optimizer=optimizer)
            return out

    with Seeing():  # type: ignore[no-untyped-call]
        work()
    facts = traffic.facts()
    return facts | {"by": {row["operator"].removeprefix("aten::"): row["bytes"] for row in facts["moved"]}}


def square() -> Any:
    return torch.ones(N, N)


def test_an_operator_reads_its_operands_once_and_writes_its_result() -> None:
    a, b = square(), square()
    row, scale = torch.ones(N), torch.tensor(2.0)
    by = counted(lambda: (a @ b, torch.relu(a), a + row, a.expand(3, N, N) * 2, a * scale, a.sum(), a.t(), a.view(-1)))[
        "by"
    ]
    assert by == {
        "mm": 3 * UNIT,
        "relu": 2 * UNIT,
        "add": 2 * UNIT + 4 * N,
        "mul": UNIT + 3 * UNIT + 2 * UNIT + 4,  # an expanded tensor is read once
        "sum": UNIT + 4,
    }


def test_what_is_overwritten_or_only_pointed_into_is_not_read_whole() -> None:
    table, a, b = torch.ones(10 * N, N, requires_grad=True), square(), square()
    ids, labels = torch.arange(N), torch.zeros(N, dtype=torch.long)
    picked = 8 * N + UNIT
    large = torch.ones(10 * N, N)
    by = counted(lambda: (functional.embedding(ids, table), a.copy_(b), a.zero_(), large.index_put_((ids,), b)))["by"]
    assert by["embedding"] == 8 * N + UNIT + picked  # rows of the table, as many as are asked for
    assert (by["copy_"], by["zero_"]) == (2 * UNIT, UNIT)
    assert by["index_put_"] == 2 * picked
    scores = torch.zeros(N, N, requires_grad=True)
    by = counted(lambda: torch.autograd.backward(functional.cross_entropy(scores, labels)))["by"]
    assert by["nll_loss_forward"] < UNIT / 10
    assert by["nll_loss_backward"] == pytest.approx(UNIT, rel=0.01)
    assert by["_log_softmax"] == 2 * UNIT


def test_copies_between_devices_are_no_work_of_theirs_and_scalars_may_be_on_the_host() -> None:
    a, scale = torch.ones(N, N, device="meta"), torch.tensor(2.0)
    found = counted(lambda: (a * scale, square().to("meta")))
    assert [(row["operator"], row["device"]) for row in found["moved"] if row["bytes"] > UNIT] == [
        ("aten::mul", "meta")
    ]


def test_a_fused_optimizer_touches_seven_values_a_parameter() -> None:
    parameter = torch.nn.Parameter(square())
    parameter.grad = square()
    adam = torch.optim.AdamW([parameter], fused=True)
    adam.step()
    found = counted(adam.step, optimizer=True)
    assert found["by"]["_fused_adamw_"] == pytest.approx(7 * UNIT, rel=1e-5)
    # What the optimizer does is no chain that a compiler of the model would fuse.
    assert (found["chained_bytes"], found["fused_bytes"]) == (0, 0)


def test_lists_of_tensors_count_as_their_tensors() -> None:
    a, b = [square(), square()], [square(), square()]
    found = counted(lambda: torch._foreach_add_(a, b))
    assert found["by"] == {"_foreach_add_": 6 * UNIT}
    assert (found["chained_bytes"], found["fused_bytes"]) == (6 * UNIT, 6 * UNIT)


# Matrices that a chain as one kernel reads and writes, beside those that its operators do, by itself and in front of a
# product or a sum, which read it.
CHAINS: dict[str, tuple[Callable[[Any, Any], Any], int, int]] = {
    # One reading of x, one writing of what the product reads.
    "three in a row": (lambda x, w: torch.relu(x * 2 + 1) @ w, 6, 2),
    # What was in a register for one is read again behind the product.
    "a skip around a product": (lambda x, w: ((y := torch.relu(x)) @ w + y).sum(), 2 + 3, 2 + 3),
    "the same, and two more": (lambda x, w: (((y := torch.relu(x)) @ w + y) * 2 + 1).sum(), 2 + 3 + 4, 2 + 3),
    "two readers of one": (lambda x, w: (((y := x * 2) + 1) * y) @ w, 2 + 2 + 3, 2),
    "in place": (lambda x, w: (x @ w).mul_(2).add_(1).sum(), 4, 2),
    "types": (lambda x, _: (x.to(torch.float64).to(torch.float32) * 2).sum(), 3 + 3 + 2, 2),
    # Nothing needs what nothing reads.
    "a result that nothing reads": (lambda x, _: x * 2, 2, 1),
    "a sum between": (lambda x, _: (x * x.sum()) @ x, 2, 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_reads_and_writes_once(name: str) -> None:
    chain, apart, fused = CHAINS[name]
    x, w = square(), square()
    found = counted(lambda: chain(x, w))
    assert found["chained_bytes"] == pytest.approx(apart * UNIT, rel=1e-3)
    assert found["fused_bytes"] == pytest.approx(fused * UNIT, rel=1e-3)


def test_memory_that_is_used_again_is_another_tensor() -> None:
    # The allocator gives a chain's memory to the next one: what it makes there is read, although its place was.
    x = square()
    found = counted(lambda: [torch.relu(x * 2).sum() for _ in range(10)])
    assert found["fused_bytes"] == pytest.approx((1 + 10) * UNIT, rel=1e-3)


def test_the_largest_operators_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.record.collectors.flops._MOST_COUNTED", 2)
    a = square()
    assert list(counted(lambda: (a.sum(), torch.relu(a), a @ a))["by"]) == ["mm", "relu"]
