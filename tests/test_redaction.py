"""Secrets do not reach the disk, and what is trained does."""

from __future__ import annotations

import ast
import random
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlprof
from benchmarks.torture.secrets import SHAPES, Shape, random_shape
from dlprof.redaction import DROPPED, REDACTED, environment, is_secret, said, shown, source, text, words

SECRET_NAMES = """
--password --db-password --api-key --apikey HF_TOKEN WANDB_API_KEY awsSecretAccessKey NCCL_PSK TORCHX_PAT --auth
--github_token client.secret AWS_SESSION_TOKEN --pwd
"""
HARMLESS_NAMES = """
--lr --tokenizer --pad-token --eos_token --token-budget --tokens-per-batch --key-dim --sort-key --max-token --authors
--passes --path --patience --compass
"""
SECRET = "k4711Q0042v"


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_what_is_named_like_a_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS_NAMES.split())
def test_what_is_not(name: str) -> None:
    assert not is_secret(name)


def leaking(shape: Shape) -> list[str]:
    """Return what is recorded of a command with a secret in that shape, if it holds the secret."""
    command = ["python", "train.py", "--lr", "0.1", *shape.filled(SECRET), "--epochs", "3"]
    recorded = [words(command), *([words(command, keep=True)] if shape.named else [])]
    return [str(kept) for kept in recorded if SECRET in "".join(kept)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(shape.words))
def test_a_secret_in_a_command_is_left_out(shape: Shape) -> None:
    assert leaking(shape) == []


@given(st.integers(0, 2**64))
def test_so_are_those_in_shapes_that_nobody_thought_of(seed: int) -> None:
    assert leaking(random_shape(random.Random(seed))) == []


KEPT = """
python train.py --lr 0.1 --batch-size 64 --amp bf16 --device cuda:0 -n 4 -j8 --no-cache
python -m torch.distributed.run --standalone --nproc-per-node 2 /home/me/train.py --betas 0.9 0.999
python -u -m package.train --fp16 true --size 224x224
torchrun --nproc-per-node=gpu train.py --optimizer=adamw --scheduler cosine_with_warmup
python train.py optimizer.lr=1e-4 trainer.precision=bf16-mixed +trainer.devices=[0,1]
mpirun -np 4 python train.py --model resnet50 --compile max-autotune-no-cudagraphs
env OMP_NUM_THREADS=4 .venv/bin/python3.11 train.py --max-token 512
./train --steps 100
accelerate launch --num-processes 2 train.py --dtype torch.float16 --backend nccl
"""


@pytest.mark.parametrize("command", KEPT.strip().split("\n"))
def test_what_says_how_it_trains_is_kept(command: str) -> None:
    assert words(command.split()) == command.split()


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("python train.py data a b --name x y --lr 0.1", "python train.py … --name … --lr 0.1"),
        ("python -c pass 1 2", "python -c …"),
        ("bash -c 'python train.py'", "bash -c …"),
        ("env A=b python train.py -- --x", "env … python train.py -- --x"),
        ("python -m package.train -m note", "python -m package.train -m …"),
        ("python -mpackage.train --resume last.pt", "python -mpackage.train --resume …"),
        ("mysql -m note", "mysql -m …"),
        ("'/home/me/my train.py'", "…"),
        ("python train.py --pin 1234 --pin=1234 pin=1234", f"python train.py --pin {REDACTED} --pin={REDACTED} …"),
        # What follows a secret's name is its value, also with a dash.
        ("python train.py --token --lr 0.1", f"python train.py --token {REDACTED} …"),
    ],
)
def test_what_is_left_out_leaves_a_mark(command: str, kept: str) -> None:
    assert " ".join(words(shlex.split(command))) == kept


def test_a_file_of_any_name_is_a_script(tmp_path: Path) -> None:
    script = tmp_path / "my train.py"
    script.touch()
    assert words(["python", str(script), "x y"]) == ["python", str(script), DROPPED]


def test_all_is_kept_on_request_but_for_secrets() -> None:
    command = ["python", "train.py", "--data", "/mnt/a", "--note", "a b", "--api-key", "x", "https://h/p", "c=d"]
    assert words(command, keep=True) == [REDACTED if word == "x" else word for word in command]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Authorization: Bearer x", f"Authorization: {REDACTED}"),
        ("run --secret x && true", f"run --secret {REDACTED}"),
        ("https://me:x@host/data", f"https://{REDACTED}"),
        ("me:x@host/data", f"{REDACTED}@host/data"),
        *((same, same) for same in ("url: http://d:80/", "expandable_segments:True", "the key to it", "eth0,me@host")),
    ],
)
def test_a_text(before: str, after: str) -> None:
    assert text(before) == after


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("login(\"hunter2\", api_key='x y z', n=12)  # hunter2", "login(\"…\", api_key='…', n=12)  "),
        ('x = batch["input_ids"].to("cuda:0", dtype="float32")',) * 2,
        ("DataLoader(data, batch_size=64, multiprocessing_context='spawn')",) * 2,
        ('f"{d["key"]} {x}" + login("hunter2")', 'f"…" + login("…")'),
        ('d = {"{": 1}; login("hunter2")', 'd = {"{": 1}; login("…")'),
        ('a = """x\n  hunter2 \\""" "\n""" + b', 'a = """…\n\n""" + b'),
        ("'it\\'s hunter2' + y", "'…' + y"),
        ("rb'hunter2' + y", "rb'…' + y"),
        ("x = 'hunter2\ny = z", "x = '…\ny = z"),
        ("login(['hunter'])", "login(['…'])"),
        ("login(pin=1234, n=1234, id=12345678901)", "login(pin=…, n=1234, id=…)"),
        ("{'password': 1234}", "{'…': …}"),
        ("L['mode'] == 'hunter2'", "L['mode'] == '…'"),
        ("tensor 'ids' size mismatch at index 0. expected 4, actual 5",) * 2,
    ],
)
def test_of_source_names_and_numbers_are_kept(line: str, kept: str) -> None:
    assert source(line) == kept


@given(st.lists(st.sampled_from(["'", '"', '"""', "\\", "{", "}", "#", "\n", "f", "r", "x = ", " ", "(", "1", "é"])))
def test_any_source_keeps_its_lines(parts: list[str]) -> None:
    code = "".join(parts)
    assert source(code).count("\n") == code.count("\n")


class _WithoutValues(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("", kind=None) if not isinstance(node.value, (bool, type(None))) else node

    def visit_JoinedStr(self, _node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("", kind=None)


def test_real_source_is_the_same_program_but_for_its_values() -> None:
    paths = sorted(Path(dlprof.__file__).parent.rglob("*.py"))
    assert len(paths) > 100
    for path in paths[::25]:
        code = path.read_text()
        texts = (code, source(code).replace(DROPPED, "0"))
        before, after = (ast.dump(_WithoutValues().visit(ast.parse(one))) for one in texts)
        assert before == after, path


def test_what_a_job_prints_of_its_arguments_is_left_out() -> None:
    command = ["python", "train.py", "--note", "hunter2", "--pin=1234", "--lr", "0.1"]
    printed = "train.py: error: unrecognized arguments: --pin=1234 hunter2, with --lr 0.1"
    assert said(printed, command) == "train.py: error: unrecognized arguments: … …, with --lr 0.1"


def test_of_the_environment_only_what_shapes_training_is_kept() -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL_PSK": "s", "TORCHX_PAT": "s", "TORCH_PROXY": "s", "OMP_NUM_THREADS": "4"}
    assert environment(env | {"CUDA_TOKEN": "s", "HOME": "/h"}) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("loader.num_workers", 4, 4),
        ("loader.multiprocessing_context", "fork", "fork"),
        ("env.NCCL_ALGO", "Ring", "Ring"),
        ("env.MY_THREADS", "4", "4"),
        ("env.MY_NOTE", "hunter2", DROPPED),
        ("env.MY_TOKEN", "4", REDACTED),
    ],
)
def test_of_what_is_overridden_settings_are_kept(name: str, value: int | str, kept: int | str) -> None:
    assert shown(name, value) == kept
