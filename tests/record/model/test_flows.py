"""What of a real step's results is followed to what reads it: which products are needless, and which are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import facts

pytest.importorskip("torch", reason="recording needs torch")

# A function each, whose result is a part of the loss; `x` has 32 rows, and `pixels` 16 channels.
SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, interpolate, linear
torch.manual_seed(0)
torch.set_num_threads(1)
head, wide, thick = nn.Linear(64, 48), nn.Linear(64, 96), nn.Linear(64, 64)
weight, low, high = (nn.Parameter(torch.randn(n, k) / 64) for n, k in ((48, 64), (4, 64), (48, 4)))
full, other = (nn.Parameter(torch.randn(n, k) / 64) for n, k in ((40, 64), (48, 40)))
experts, drop, fixed = nn.ModuleList(nn.Linear(64, 72) for _ in range(4)), nn.Dropout(0.5), torch.randn(32, 64)
frozen, tall, noisy, fine = (nn.Linear(64, k).requires_grad_(False) for k in (80, 88, 104, 144))
partial, table = nn.Linear(64, 160).requires_grad_(False), torch.randn(64, 64)
often = nn.ModuleList(nn.Linear(64, k) for k in (112, 120, 128, 168))
norm = nn.BatchNorm1d(64)
recurrent, around = nn.GRU(64, 32), nn.Linear(96, 96)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 176, 0.0, batch_first=True, norm_first=True), 1)
fewer, more, large = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 32, 1), nn.Conv2d(16, 4, 3)
layers = [norm, experts, often, recurrent, encoder, around, head, wide, thick, fewer, more, large]
parameters = [weight, low, high, full, other, *(p for layer in layers for p in layer.parameters())]
optimizer = torch.optim.AdamW(parameters)
labels = torch.arange(32) % 48
few = torch.where(torch.arange(32) % 4 == 0, labels, -100)
mask = few != -100
adjacency = torch.eye(32).to_sparse_csr()

def picked_by_a_mask(x, pixels): return head(x)[mask].sum()
def picked_by_rows(x, pixels): return head(x)[:8].sum()
def ignored_by_the_loss(x, pixels): return cross_entropy((head(x) * 2).float(), few)
def twice_the_same_rows(x, pixels):
    y = head(x)
    return y[:8].sum() + y[:8].mean()
def of_a_whole_layer(x, pixels): return encoder(x.reshape(2, 16, 64))[:, 0].mean()
def nearly_all(x, pixels): return cross_entropy(head(x)[:-1], labels[1:])
def three_parts(x, pixels):
    q, k, v = wide(x).chunk(3, -1)
    return (q * k * v).sum()
def rows_of_each_class(x, pixels):
    y = head(x)
    return sum(y[labels % 4 == n].mean() for n in range(4))
def a_recurrent_layer(x, pixels): return recurrent(x[:, None])[0][-1].sum()
def a_cell_in_a_loop(x, pixels):
    rows, hidden = wide(x), torch.zeros(8, 96)
    for n in range(4):
        hidden = torch.tanh(around(hidden) + rows[8 * n : 8 * n + 8])
    return hidden.sum()
def a_sparse_matrix(x, pixels): return (adjacency @ head(x)).sum()
def one_value_of_each_row(x, pixels): return head(x).gather(1, labels[:, None]).sum()
def all_for_a_metric(x, pixels):
    y = head(x)
    return cross_entropy(y, few) + 0 * y.argmax(-1).float().mean()
def used_by_a_product(x, pixels): return thick(thick(x))[:, :8].mean() + thick(x - 1).relu().sum()
def one_hot_rows(x, pixels): return (torch.zeros(32, 64).scatter_(1, labels[:, None], 1) @ weight.t()).sum()
def one_hot_integers(x, pixels):
    ones = torch.zeros(32, 64, dtype=torch.long).scatter_(1, labels[:, None], 1)
    return linear(ones.float(), weight).sum()
def rows_with_other_values(x, pixels): return (torch.zeros(32, 64).scatter_(1, labels[:, None], x) @ weight.t()).sum()
def one_hot_times_numbers(x, pixels): return (torch.zeros(32, 64).scatter_(1, labels[:, None], 1) * x).sum()
def factors(x, pixels): return linear(x, weight + 0.5 * (high @ low)).sum()
def factors_apart(x, pixels): return (linear(x, weight) + 0.5 * (x @ low.t()) @ high.t()).sum()
def factors_of_full_rank(x, pixels): return linear(x, weight + other @ full).sum()
def a_normed_weight(x, pixels): return linear(x, weight / weight.norm()).sum()
def enlarged_before(x, pixels): return fewer(interpolate(pixels, scale_factor=2, mode="bilinear")).sum()
def enlarged_after(x, pixels): return interpolate(fewer(pixels), scale_factor=2, mode="bilinear").sum()
def enlarged_for_a_neighbourhood(x, pixels): return large(interpolate(pixels, scale_factor=2)).sum()
def enlarged_for_a_curve(x, pixels): return fewer(interpolate(pixels, scale_factor=2).relu()).sum()
def enlarged_for_more_channels(x, pixels): return more(interpolate(pixels, scale_factor=2)).sum()
def rows_times_zero(x, pixels):
    weights = torch.zeros(32, 4).scatter_(1, (labels % 4)[:, None], 0.5)
    return (torch.stack([e(x) for e in experts], 1) * weights[:, :, None]).sum()
def rows_times_weights(x, pixels):
    return (torch.stack([e(x) for e in experts], 1) * torch.rand(32, 4)[:, :, None]).sum()
def the_same_twice(x, pixels): return sum(often[0](x).mean() for _ in range(2))
def the_same_after_a_norm(x, pixels): return sum(often[3](norm(x)).mean() for _ in range(2))
def the_same_of_other_rows(x, pixels): return sum(often[1](x[n : n + 16]).mean() for n in (0, 16))
def drawn_anew(x, pixels): return sum(often[2](drop(x)).mean() for _ in range(2))
def the_same_in_each_step(x, pixels): return (frozen(fixed.expand(32, 64)) * x[:, :1].abs().exp().sin().cos()).mean()
def features(): return (fine(fixed).relu() * 0.1).mean()
def of_a_function_that_gives_the_same(x, pixels): return features() + x.mean()
def of_a_batch(x, pixels): return tall(x).mean()
def of_a_part(x, pixels): return partial(table[n : n + 32]).mean()
def of_what_is_written(x, pixels):
    fixed2.add_(1)
    return noisy(fixed2).mean()
def expert(x): return apart(x)
def of_another_function(x, pixels): return expert(x)[:8].mean()
def of_two_products(x, pixels): return (gate(x) * up(x))[:8].mean()
words = torch.zeros(300, 300).scatter_(1, torch.randint(300, (300, 4)), 1.0)
def an_identity(x, pixels): return (identity @ classes).sum()
def rows_of_words(x, pixels): return (words @ classes).sum()
def rows_with_a_tenth(x, pixels): return (tenth @ classes).sum()
def few_rows(x, pixels): return (identity[:100] @ classes).sum()
identity, tenth = torch.eye(300), (torch.rand(300, 300) > 0.9).float()
classes = nn.Parameter(torch.randn(300, 16))
fixed2, apart, gate, up = fixed.clone(), nn.Linear(64, 152), nn.Linear(64, 136), nn.Linear(64, 136)

cases = [f for name, f in list(globals().items()) if getattr(getattr(f, "__code__", None), "co_argcount", 0) == 2]
for n in range(14):
    x, pixels = torch.randn(32, 64), torch.randn(2, 16, 8, 8)
    optimizer.zero_grad()
    loss = sum(case(x + k, pixels + k) for k, case in enumerate(cases))
    loss.backward()
    optimizer.step()
"""
NEEDLESS = {
    "picked_by_a_mask": ("unused_rows", "aten::addmm", 0.25),
    "picked_by_rows": ("unused_rows", "aten::addmm", 0.25),
    "ignored_by_the_loss": ("unused_rows", "aten::addmm", 0.25),
    "twice_the_same_rows": ("unused_rows", "aten::addmm", 0.25),
    "used_by_a_product": ("unused_rows", "aten::addmm", 0.125),
    "one_hot_rows": ("one_hot", "aten::mm", 0.0),
    "one_hot_integers": ("one_hot", "aten::mm", 0.0),
    "an_identity": ("one_hot_given", "aten::mm", 1 / 300),
    "rows_of_words": ("sparse", "aten::mm", 4 / 300),
    "factors": ("low_rank", "aten::mm", 0.0),
    "rows_times_zero": ("unused_rows", "aten::addmm", 0.25),
    "of_another_function": ("unused_rows", "aten::addmm", 0.25),
    "of_two_products": ("unused_rows", "aten::addmm", 0.25),
    "the_same_twice": ("repeated", "aten::addmm", 0.0),
    "the_same_after_a_norm": ("repeated", "aten::addmm", 0.0),
    "the_same_in_each_step": ("constant", "aten::addmm", 0.0),
    "of_a_function_that_gives_the_same": ("constant", "aten::addmm", 0.0),
    "enlarged_before": ("upsampled", "aten::convolution", 0.25),
}


@pytest.mark.long
def test_needless_products_are_found_and_no_others(tmp_path: Path) -> None:
    run_recorded(tmp_path, SCRIPT)
    flops = facts(tmp_path / "run/ranks/00000")["flops"]
    assert (flops["state"], flops["why"]) == ("counted", "")
    found = {row["function"].partition(".")[0]: row for row in flops["flows"]}
    assert {name: (row["kind"], row["operator"], row["used"]) for name, row in found.items()} == NEEDLESS
    assert len(found) == len(flops["flows"]) <= 20
    assert {name: row["calls"] for name, row in found.items() if row["calls"] > 1} == {
        "rows_times_zero": 4,
        "of_two_products": 2,
    }
    assert (found["the_same_twice"]["trains"], found["the_same_in_each_step"]["trains"]) == (True, False)
    assert found["ignored_by_the_loss"]["read_by"] == "aten::nll_loss_forward"
    # A multiple, and the sum with the weight: 48 x 64 values of 4 bytes, two and three of each.
    values = 48 * 64 * 4
    factors = found["factors"]
    assert (factors["factors"], factors["shape"]) == (["aten::mm", "48x4 4x64"], "32x64 64x48")
    assert factors["moved"] == {"aten::mul": 2 * values, "aten::add": 3 * values}
    assert (found["enlarged_before"]["times"], found["enlarged_before"]["flops"]) == (4.0, 2 * 2 * 4 * 256 * 16)
    text = (tmp_path / "train.py").read_text().splitlines()
    assert all(
        f"def {name}(" in text[row["line"] - 1]
        or name in ("twice_the_same_rows", "one_hot_integers", "rows_times_zero")
        for name, row in found.items()
    )


# Likewise, of convolutions: kernels that are long, or the product of lines, and others.
CONVOLUTIONS = """
import torch
from torch import nn
from torch.nn.functional import conv1d, conv2d, conv3d, conv_transpose1d
torch.set_num_threads(1)
layer, taps = nn.Conv2d(16, 6, 7), nn.Parameter(torch.randn(1, 1, 96))
trained, bell = nn.Parameter(torch.ones(16, 1, 5, 5)), torch.exp(-torch.linspace(-2, 2, 7) ** 2)
optimizer = torch.optim.SGD([taps, trained, *layer.parameters()], 0.1)

def many_taps(x): return conv1d(x.reshape(1, 1, -1), taps).mean()
def many_taps_of_a_row(x): return conv2d(x.reshape(1, 1, 1, -1), taps[:, :, None]).mean()
def a_box(x): return conv2d(x, torch.ones(16, 1, 5, 5), groups=16).mean()
def a_bell(x): return conv3d(x[:, None], (bell[:, None] * bell * bell[:5, None, None])[None, None]).mean()

def few_taps(x): return conv1d(x.reshape(1, 1, -1), taps[:, :, :31]).mean()
def few_taps_of_a_row(x): return conv2d(x.reshape(1, 1, 1, -1), taps[:, :, None, :31]).mean()
def transposed(x): return conv_transpose1d(x.reshape(1, 1, -1), taps).mean()
def a_large_square(x): return conv2d(x.reshape(1, 1, 64, 32), taps[:, :, :64].reshape(1, 1, 8, 8)).mean()
def a_triangle(x): return conv2d(x, torch.ones(16, 1, 5, 5).tril(), groups=16).mean()
eye = torch.cat([torch.ones(15, 1, 5, 5), torch.eye(5)[None, None]])
def one_that_is_no_box(x): return conv2d(x, eye, groups=16).mean()
def a_small_box(x): return conv2d(x, torch.ones(16, 1, 3, 3), groups=16).mean()
def a_line(x): return conv2d(x, torch.ones(16, 1, 1, 7), groups=16).mean()
def nothing_at_all(x): return conv2d(x, torch.zeros(16, 1, 5, 5), groups=16).mean()
def a_box_that_is_trained(x): return conv2d(x, trained, groups=16).mean()
def a_box_of_all_channels(x): return conv2d(x, torch.ones(3, 16, 5, 5)).mean()
def seven_by_seven(x): return layer(x).mean()

cases = [f for name, f in list(globals().items()) if getattr(getattr(f, "__code__", None), "co_argcount", 0) == 1]
for n in range(14):
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    optimizer.zero_grad()
    sum(case(x + k) for k, case in enumerate(cases)).backward()
    optimizer.step()
"""


def test_convolutions_that_another_form_may_be_cheaper_than_are_found_and_no_others(tmp_path: Path) -> None:
    run_recorded(tmp_path, CONVOLUTIONS)
    flops = facts(tmp_path / "run/ranks/00000")["flops"]
    assert (flops["state"], flops["why"]) == ("counted", "")
    text = (tmp_path / "train.py").read_text().splitlines()
    found = {row["function"]: row for row in flops["flows"]}
    assert {name: (row["kind"], row["shape"]) for name, row in found.items()} == {
        "many_taps": ("long_kernel", "1x1x2048 1x1x96"),
        "many_taps_of_a_row": ("long_kernel", "1x1x1x2048 1x1x1x96"),
        "a_box": ("separable", "2x16x8x8 16x1x5x5"),
        "a_bell": ("separable", "2x1x16x8x8 1x1x5x7x7"),
    }
    assert len(flops["flows"]) == 4
    assert all(f"def {name}(" in text[row["line"] - 1] for name, row in found.items())


# Likewise, of scores that are masked: how many of them a mask leaves, in the form that it is filled in.
MASKED = """
import torch
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.randn(8, 8))
optimizer = torch.optim.SGD([weight], 0.1)
rows = torch.arange(256)
near = (rows[:, None] >= rows) & (rows[:, None] - rows < 32)
causal, long = rows[:, None] >= rows, rows < 50
low = torch.finfo(torch.float32).min

def a_window(s): return s.masked_fill(~near, float("-inf"))
def in_place(s): return s.clone().masked_fill_(~near[None], -1e9)
def by_where(s): return torch.where(near, s, torch.tensor(low))
def turned_round(s): return torch.where(~near, low, s)
def a_causal_mask(s): return s.masked_fill(~causal, low)
def padding(s): return s.masked_fill(~(causal & long), low)
def zeros(s): return s.masked_fill(~near, 0.0)
def other_rows(s): return s[:, :100].masked_fill(~near[:100], low)
def few(s): return s[:, :64, :64].masked_fill(~near[:64, :64], low)

cases = [f for name, f in list(globals().items()) if getattr(getattr(f, "__code__", None), "co_argcount", 0) == 1]
for n in range(14):
    x = torch.randn(2, 256, 8)
    optimizer.zero_grad()
    sum(case((x + k) @ weight @ x.mT).softmax(-1).square().mean() for k, case in enumerate(cases)).backward()
    optimizer.step()
"""


def test_scores_of_which_most_are_masked_are_found_and_no_others(tmp_path: Path) -> None:
    run_recorded(tmp_path, MASKED)
    flows = facts(tmp_path / "run/ranks/00000")["flops"]["flows"]
    found = {row["function"]: row["used"] for row in flows if row["kind"] == "masked"}
    # Of 256 keys a window leaves 32 at most.
    left = pytest.approx(sum(min(n + 1, 32) for n in range(256)) / 256**2, rel=0.02)
    assert found == dict.fromkeys(("a_window", "in_place", "by_where", "turned_round"), left)


# Buffers that DistributedDataParallel sends are put together in each step; a mask is made by the script.
SENT = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=0, world_size=1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("one", torch.randn(256, 256))
        self.register_buffer("other", torch.randn(256, 256))
    def forward(self, x):
        return self.layer(x).mean()

net = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
rows = torch.arange(512)
for n in range(14):
    optimizer.zero_grad()
    loss = net(torch.randn(4, 8))
    mask = (rows[:, None] >= rows).float()
    (loss * mask.mean()).backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def test_what_a_wrapper_puts_together_to_send_is_not_the_scripts(tmp_path: Path) -> None:
    run_recorded(tmp_path, SENT)
    flows = facts(tmp_path / "run/ranks/00000")["flops"]["flows"]
    text = (tmp_path / "train.py").read_text().splitlines()
    assert {row["kind"] for row in flows} == {"constant"}
    assert all("mask" in text[row["line"] - 1] for row in flows)
