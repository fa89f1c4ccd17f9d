"""Secrets do not reach the disk, and what is trained does."""

from __future__ import annotations

import pytest

from dlprof.redaction import REDACTED, environment, is_secret, text, words

SECRET = """
--password --db-password --api-key --apikey HF_TOKEN WANDB_API_KEY awsSecretAccessKey NCCL_PSK TORCHX_PAT --auth
--github_token client.secret AWS_SESSION_TOKEN --pwd
"""
HARMLESS = """
--lr --tokenizer --pad-token --eos_token --token-budget --tokens-per-batch --key-dim --sort-key --max-token --authors
--passes --path --patience --compass
"""


@pytest.mark.parametrize("name", SECRET.split())
def test_what_is_named_like_a_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS.split())
def test_what_is_not(name: str) -> None:
    assert not is_secret(name)


def test_a_commands_secrets_are_left_out_and_its_other_words_stay() -> None:
    command = [
        *("python", "train.py", "--password", "X", "--api-key=abc", "--lr", "0.1", "--data"),
        *("https://me:hunter2@host/data", "HF_TOKEN=abc", "--flag", "-p", "8080"),
    ]
    assert words(command) == [
        *("python", "train.py", "--password", REDACTED, f"--api-key={REDACTED}", "--lr", "0.1", "--data"),
        *(f"https://{REDACTED}@host/data", f"HF_TOKEN={REDACTED}", "--flag", "-p", "8080"),
    ]
    # A flag that takes no value does not hide what follows.
    assert words(["--token", "--lr", "1"]) == ["--token", "--lr", "1"]


def test_a_text_of_several_commands() -> None:
    said = 'run --secret xyz && curl -H "Authorization: Bearer zzz" http://a:b@c/ x=3 NCCL_PSK=7 url: http://d:80/'
    assert text(said) == (
        f'run --secret {REDACTED} && curl -H "Authorization: {REDACTED}" http://{REDACTED}@c/ x=3 NCCL_PSK={REDACTED}'
        " url: http://d:80/"
    )


def test_of_the_environment_only_what_shapes_training_is_kept() -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL_PSK": "s", "TORCHX_PAT": "s", "TORCH_PROXY": "s", "OMP_NUM_THREADS": "4"}
    assert environment(env | {"CUDA_TOKEN": "s", "HOME": "/h"}) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
