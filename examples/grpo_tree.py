"""GRPO on rollouts with shared prefixes: folding gives equal losses and gradients with fewer tokens and pairs.

Prints the savings of folding on published rollouts, then trains a tiny policy twice on four local processes.
Run: python examples/grpo_tree.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import apportion as ap
from apportion.demo.decoder import Decoder

RANKS, STEPS, RATE, CLIP, KL = 4, 3, 0.5, 0.2, 0.04
PROMPTS, PROMPT, VOCABULARY, STOP = 4, 20, 16, 0
BRANCHES = ((2, 8), (4, 24))  # like a tree search: per prompt 2 prefixes of 8 tokens, each with 4 endings
GROUP, ANSWER = 8, 32
TOLERANCE = 1e-6  # relative to the largest gradient
# fp64, so that rounding hides no mistake
MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp64", hidden=32, ffn=64, layers=2)


# ---- savings of folding: published rollouts have only lengths, so only prompts are shared


def print_savings():
    print(f"{'folding':17}{'tokens':>24}{'saved':>7}{'pairs':>30}{'saved':>7}")
    for path in sorted((Path(__file__).parent / "rollouts").glob("*.json")):
        groups = json.loads(path.read_text())["groups"]
        savings = [ap.trees.fold(group_of(*group)).saving for group in groups]
        tokens, folded, pairs, folded_pairs = np.sum(savings, axis=0).tolist()
        print(f"{path.stem:17}{tokens:12,}{folded:12,}{1 - folded / tokens:7.1%}", end="")
        print(f"{pairs:15,}{folded_pairs:15,}{1 - folded_pairs / pairs:7.1%}")


def group_of(prompt, answers):
    """Samples with these lengths that diverge after the prompt."""
    return [np.repeat([0, i], [prompt, answer]) for i, answer in enumerate(answers, 1)]


# ---- rollouts: samples of the policy, their log-probabilities and advantages


def new_policy():
    torch.manual_seed(0)
    return Decoder(MODEL, VOCABULARY).double()


@torch.no_grad()
def rollouts(policy):
    """Returns (samples, log-probabilities of their tokens, advantages); an answer ends with STOP."""
    tokens = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT))
    for copies, steps in BRANCHES:
        tokens = tokens.repeat_interleave(copies, 0)
        for _ in range(steps):
            next_tokens = log_probs_of(policy, tokens)[:, -1].exp().multinomial(1)
            tokens = torch.cat([tokens, next_tokens], 1)
    token_probs = log_probs_of(policy, tokens[:, :-1]).gather(2, tokens[:, 1:, None])[..., 0]
    is_answer = (tokens[:, PROMPT:-1] == STOP).cumsum(1) == 0
    lengths = (PROMPT + 1 + is_answer.sum(1)).tolist()
    samples = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    old = [
        torch.cat([row.new_zeros(1), row])[: len(ids)] for row, ids in zip(token_probs, samples, strict=True)
    ]
    rewards = torch.stack([(ids[PROMPT:] % 2).float().mean() for ids in samples]).view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return samples, old, advantages.flatten()


def log_probs_of(policy, tokens):
    """Log-probabilities of all next tokens: tokens [samples, length] -> [samples, length, vocabulary]."""

    def attention(q, k, v, kind):
        q, k, v = (x.view(*tokens.shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    positions = torch.arange(tokens.shape[1]).repeat(len(tokens))
    return policy(tokens.flatten(), positions, attention).log_softmax(-1).view(*tokens.shape, -1)


# ---- the loss, on the tokens of a rank


def grpo(log_probs, old, advantages, weights):
    """This rank's share of the clipped objective, with a penalty for leaving the old policy."""
    ratio = (log_probs - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    difference = old - log_probs
    return ((KL * (difference.exp() - difference - 1) - gain) * weights).sum()


def logits_of(policy, batch):
    def attention(q, k, v, kind):
        return ap.planned_attention(q, k, v, batch.handle, kind)

    return policy(batch.tokens, batch.position_ids, attention)


class FoldedSamples:
    """Trains on trees; values of samples are mapped to the rows that predict their tokens."""

    FIELDS = ()

    def __init__(self, samples, old, advantages, weights):
        groups = np.repeat(np.arange(PROMPTS), GROUP)
        self.dataset = ap.trees.fold(samples, groups)
        self.known = (old, advantages, weights)
        self.answers = [torch.arange(len(ids)) >= PROMPT for ids in samples]

    def loss(self, policy, batch):
        predictions = ap.trees.unfold(self.dataset, batch, self.answers)
        log_probs = predictions.log_probs(logits_of(policy, batch))
        return grpo(log_probs, *(predictions.take(values) for values in self.known))


class SeparateSamples:
    """Trains on separate samples; values of tokens are fields of the dataset."""

    FIELDS = ("old", "advantages", "shares")

    def __init__(self, samples, old, advantages, weights):
        self.dataset, self.lengths = self, [len(ids) for ids in samples]
        self.columns = list(zip(samples, old, advantages, weights, strict=True))

    def __len__(self):
        return len(self.columns)

    def __getitem__(self, index):
        ids, old, advantage, weight = self.columns[index]
        labels = torch.where(torch.arange(len(ids)) >= PROMPT, ids, -100)
        of_sample = {"advantages": advantage, "shares": weight}
        fields = {name: value.expand(len(ids)) for name, value in of_sample.items()}
        return {"input_ids": ids, "labels": labels, "old": old, **fields}

    def loss(self, policy, batch):
        log_probs = -cross_entropy(logits_of(policy, batch), batch.labels, reduction="none")
        counts = batch.labels != -100
        return grpo(*(x[counts] for x in (log_probs, *(batch.fields[name] for name in self.FIELDS))))


# ---- training


def train(task):
    """Returns (loss, gradient) of each step; each step has all samples."""
    policy, results = new_policy(), []
    lengths = [int(length) for length in task.dataset.lengths]
    per_rank = -(-sum(lengths) // RANKS)
    steps = [list(range(len(lengths)))] * STEPS
    shifted = ("labels", *task.FIELDS)
    cluster = ap.Cluster(nodes=1, ranks_per_node=RANKS)
    for batch in ap.PlannedLoader(task.dataset, cluster, MODEL, per_rank, sampler=steps, shifted=shifted):
        policy.zero_grad()
        loss = task.loss(policy, batch)
        loss.backward()
        gradient = parameters_to_vector([p.grad for p in policy.parameters()])
        for share in (loss.detach(), gradient):
            dist.all_reduce(share)
        with torch.no_grad():
            updated = parameters_to_vector(policy.parameters()) - RATE * gradient
            vector_to_parameters(updated, policy.parameters())
        results.append((loss.item(), gradient))
    return results


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    samples, old, advantages = rollouts(new_policy())  # identical in every process
    weights = torch.tensor([1 / (len(samples) * (len(ids) - PROMPT)) for ids in samples])
    tasks = [task(samples, old, advantages, weights) for task in (FoldedSamples, SeparateSamples)]
    folded, independent = (train(task) for task in tasks)
    if rank == 0:
        report(tasks[0].dataset, folded, independent)
    dist.destroy_process_group()


def report(forest, folded, independent):
    tokens, folded_tokens, pairs, folded_pairs = forest.saving
    print(
        f"{forest.samples} rollouts: {tokens} tokens fold to {folded_tokens}, {pairs} pairs to {folded_pairs}"
    )
    for step, ((loss, gradient), (plain_loss, expected)) in enumerate(zip(folded, independent, strict=True)):
        gap = ((gradient - expected).abs().max() / expected.abs().max()).item()
        print(
            f"step {step}: loss {loss:.6f} folded, {plain_loss:.6f} not; gradients differ by {gap:.0e} of the largest"
        )
        if gap > TOLERANCE or abs(loss - plain_loss) > TOLERANCE:
            raise SystemExit("folded and independent samples must agree")


if __name__ == "__main__":
    print_savings()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)
