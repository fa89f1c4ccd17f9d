"""Parts of the workloads compute what they stand for: attention, masks, tables, experts, texts, stages."""

from __future__ import annotations

import argparse

import pytest
import torch
from parts.job import process_group
from parts.language import Block

from tests.workloads.scripts import TINY, load

amp = load("amp_transformer")


def test_scores_in_memory_are_the_same_attention() -> None:
    torch.manual_seed(0)
    fused, by_hand = Block(32, 4), Block(32, 4, amp.scores_in_memory)
    by_hand.load_state_dict(fused.state_dict())
    x = torch.randn(2, 24, 32)
    torch.testing.assert_close(by_hand(x), fused(x))


TINY["bert_pretrain"] += ("--log-every=10", "--warmup=2", "--lr=0.01")

bert = load("bert_pretrain")


def test_hidden_words_are_where_it_says_and_as_many_in_each_sentence() -> None:
    torch.manual_seed(0)
    text = bert.make_text(64, 40, 301, seed=1)
    assert ((text - 1) // 15 == (text[:, :1] - 1) // 15).all()  # one topic of 15 words a sentence
    tokens, places, words = bert.Masking(301, 40)(list(text))
    assert places.shape == (64, 6)
    torch.testing.assert_close(text.gather(1, places), words)
    torch.testing.assert_close(tokens.scatter(1, places, words), text)
    assert 0.7 < (tokens.gather(1, places) == bert.MASK).float().mean() < 0.9
    assert (tokens == bert.MASK).sum() == (tokens.gather(1, places) == bert.MASK).sum()


def test_padding_is_masked_and_changes_no_loss() -> None:
    torch.manual_seed(0)
    model = bert.Encoder(301, 80, 32, 4, 1).eval()
    text = list(bert.make_text(4, 20, 301, seed=1))
    tokens, places, _ = bert.Masking(301, 20)(text)
    torch.manual_seed(0)
    padded, _, _, padding = bert.Masking(301, 20, 80)(text)
    assert (padded.shape, padding.sum(1).tolist()) == ((4, 80), [60] * 4)
    padded[:, :20] = tokens
    with torch.no_grad():
        torch.testing.assert_close(model(padded, places, padding), model(tokens, places))


dlrm = load("dlrm_like")


def test_every_table_is_on_one_rank() -> None:
    for share_out, counts in ((dlrm.share_out, [3, 3, 2]), (dlrm.share_out_unevenly, [6, 1, 1])):
        owners = share_out(8, 3)
        assert sorted(table for tables in owners for table in tables) == list(range(8))
        assert [len(tables) for tables in owners] == counts


def test_ids_hashed_one_by_one_are_in_the_rows_of_those_hashed_at_once() -> None:
    ids = torch.randint(500, (4, 64, 4))
    torch.testing.assert_close(dlrm.hash_one_by_one(ids, 300), dlrm.hash_ids(ids, 300))


def test_features_exchanged_table_by_table_are_those_exchanged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    args = dlrm.parse([*TINY["dlrm_like"]])
    with process_group(args):
        found = [torch.randn(64, 8) for _ in range(4)]
        torch.testing.assert_close(dlrm.table_by_table(found, [4], args), dlrm.all_at_once(found, [4], args))


def test_clicks_are_the_same_for_every_epoch_and_others_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        clicks = dlrm.Clicks(dlrm.parse([*TINY["dlrm_like"], "--tables=4"]))
        numbers, ids, clicked = clicks[3]
        torch.testing.assert_close(ids, clicks[3][1])
        assert (numbers.shape, ids.shape, clicked.shape) == ((64, 13), (4, 64, 4), (64,))
        assert 0 <= int(ids.min()) <= int(ids.max()) < 500
        batches.append(ids)
    assert not torch.equal(*batches)


moe = load("moe_transformer")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return the options of a single rank that holds all experts."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    args: argparse.Namespace = moe.parse([*TINY["moe_transformer"], "--experts=6"])
    return args


def test_each_token_goes_through_its_experts_and_comes_back_to_its_place(alone: argparse.Namespace) -> None:
    with process_group(alone):
        layer = moe.Experts(alone).eval()
        x = torch.randn(50, 32)
        scores = layer.router(x).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        one_by_one = torch.stack(
            [
                sum(w * layer.experts[e](token) for w, e in zip(weights[n], chosen[n].tolist(), strict=True))
                for n, token in enumerate(x)
            ]
        )
        torch.testing.assert_close(layer(x), one_by_one)


pipeline = load("pipeline_transformer")


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_every_stage_and_layer_is_on_one_rank(schedule: str) -> None:
    stages = [s for rank in range(3) for s in pipeline.stages_of(rank, 3, schedule)]
    assert sorted(stages) == list(range(len(stages)))
    assert sum(pipeline.share_out(8, len(stages))) == 8


def test_the_uneven_split_burdens_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert pipeline.parse([*TINY["pipeline_transformer"], "--layers=8"]).split == [2, 2, 2, 2]
    assert pipeline.parse([*TINY["pipeline_transformer"], "--layers=8", "--fault=uneven_split"]).split == [1, 1, 1, 5]
    assert pipeline.parse([*TINY["pipeline_transformer"], "--layers=8", "--split=1,2,3,2"]).split == [1, 2, 3, 2]
    assert pipeline.parse([*TINY["pipeline_transformer"], "--layers=8", "--schedule=Naive"]).microbatches == 1
