"""Knowledge-graph embeddings (ComplEx) of drugs, genes and diseases, with ranking metrics as training goes."""

import argparse
import time

import numpy as np
import torch
from torch import nn


class Triples:
    def __init__(self, entities=12000, relations=12, count=60000, held_out=512, seed=0):
        rng = np.random.default_rng(seed)
        head = rng.integers(entities, size=count)
        relation = rng.integers(relations, size=count)
        tail = (head * 7 + relation * 1301 + rng.integers(0, 25, count)) % entities
        everything = np.stack([head, relation, tail], 1)
        self.entities, self.relations = entities, relations
        self.train, self.valid = torch.from_numpy(everything[held_out:]), torch.from_numpy(everything[:held_out])
        self.known = {}
        for h, r, t in everything.tolist():
            self.known.setdefault((h, r), []).append(t)

    def others(self, triples):
        """Places (row, entity) of the known tails other than the one asked for."""
        rows, tails = [], []
        for row, (h, r, t) in enumerate(triples.tolist()):
            rest = [other for other in self.known[h, r] if other != t]
            rows += [row] * len(rest)
            tails += rest
        return torch.tensor(rows, dtype=torch.long), torch.tensor(tails, dtype=torch.long)


class ComplEx(nn.Module):
    def __init__(self, entities, relations, rank=32):
        super().__init__()
        self.entity = nn.Embedding(entities, 2 * rank, sparse=True)
        self.relation = nn.Embedding(relations, 2 * rank, sparse=True)
        for table in (self.entity, self.relation):
            nn.init.normal_(table.weight, std=0.2)

    def query(self, head, relation):
        (a, b), (c, d) = self.entity(head).chunk(2, -1), self.relation(relation).chunk(2, -1)
        return torch.cat([a * c - b * d, a * d + b * c], -1)

    def forward(self, triples, corrupted):
        query = self.query(triples[:, 0], triples[:, 1])
        positive = (query * self.entity(triples[:, 2])).sum(-1)
        negative = torch.einsum("bd,bnd->bn", query, self.entity(corrupted))
        return positive, negative

    def all_tails(self, triples):
        return self.query(triples[:, 0], triples[:, 1]) @ self.entity.weight.T


class RankingEvaluator:
    def __init__(self, triples, batch=128, count_above=False):
        self.batch, self.count_above = batch, count_above
        self.chunks = [(chunk, triples.others(chunk)) for chunk in triples.valid.split(batch)]
        self.turn = 0

    @torch.no_grad()
    def __call__(self, model):
        chunk, others = self.chunks[self.turn % len(self.chunks)]
        self.turn += 1
        scores = model.all_tails(chunk)
        scores[others] = -1e9
        tail = chunk[:, 2:]
        if self.count_above:
            rank = (scores > scores.gather(1, tail)).sum(1) + 1
        else:
            order = torch.argsort(scores, dim=1, descending=True)  # the cause
            rank = (order == tail).nonzero()[:, 1] + 1  # the cause
        return (1 / rank.float()).mean().item(), (rank <= 10).float().mean().item()


def main(args):
    torch.manual_seed(0)
    triples = Triples()
    model = ComplEx(triples.entities, triples.relations)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    evaluate = RankingEvaluator(triples, count_above=args.fixed)
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        positives = triples.train[torch.randint(len(triples.train), (512,))]
        positive, negative = model(positives, torch.randint(triples.entities, (512, 32)))
        loss = nn.functional.softplus(-positive).mean() + nn.functional.softplus(negative).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.eval_every == 0:
            reciprocal, hits = evaluate(model)
    print(f"mrr {reciprocal:.4f} hits@10 {hits:.4f}")
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--eval-every", type=int, default=10)
    main(parser.parse_args())
