"""The user's line of a stack is the innermost of their own files; without one, a library's or the backward's node."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.read.dumps.frames import Site, Sites, site_of
from tests.fixtures.dumps import BACKWARD, FORWARD, stack

LINEAR = "forward (/env/lib/python3.11/site-packages/torch/nn/modules/linear.py:125)"


def test_the_innermost_own_frame_and_what_it_called() -> None:
    assert site_of(FORWARD) == Site("forward (/home/me/job/model.py:10)", LINEAR)


def test_frames_of_c_between_those_of_python_are_passed_over() -> None:
    frames = stack(("run", "/home/me/a.py", 3), cpp=("at::empty_cuda", "THPVariable_empty"))
    frames.insert(2, {"name": "type_call", "filename": "/usr/local/src/Objects/typeobject.c", "line": 1679})
    assert site_of(frames) == Site("run (/home/me/a.py:3)", "")


def test_a_library_stands_for_itself_before_torch_does() -> None:
    library = ("forward", "/env/lib/python3.11/site-packages/transformers/models/llama.py", 300)
    torch = ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125)
    assert site_of(stack(torch, library)) == Site(f"forward ({library[1]}:300)", LINEAR)
    assert site_of(stack(torch)) == Site(LINEAR, LINEAR)


def test_without_python_the_backward_node_is_named() -> None:
    assert site_of(BACKWARD) == Site("backward of MulBackward0", "")
    assert site_of(stack(cpp=("torch::autograd::AccumulateGrad::apply(x)",))).line == "backward of AccumulateGrad"
    assert site_of(stack(cpp=("torch::autograd::Engine::thread_main()",))).line == "backward of some node"
    assert site_of(stack(cpp=("at::empty",))) == Site("", "")


@pytest.mark.parametrize(
    "frames", [None, "x", 3, {}, [], [None], [{"name": 3}], [{"name": "f", "filename": None, "line": 1}], [[[]]]]
)
def test_what_is_no_stack_has_no_site(frames: Any) -> None:
    assert site_of(frames) == Site("", "")


def test_a_long_name_is_cut() -> None:
    assert len(site_of([{"name": "f" * 10_000, "filename": "/" + "a" * 10_000 + ".py", "line": "x"}]).line) < 700


def test_each_stack_is_looked_at_once() -> None:
    sites = Sites()
    frames = list(FORWARD)
    first = sites.of(frames)
    frames.clear()
    assert sites.of(frames) is first
