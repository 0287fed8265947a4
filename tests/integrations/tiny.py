"""A tiny GPT-2 from its configuration, batches that depend on their number alone, and the bare loop."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, LENGTH, BATCH = 29, 8, 4
NUM_WEIGHTS = 2 * 12 * 16 * 16  # two layers of attention and feed-forward, width 16


def gpt2(seed=0, dropout=0.0, dtype=torch.float32):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


def sequence(number):
    """Tokens that count up from a random one, with noise."""
    generator = torch.Generator().manual_seed(number)
    tokens = (torch.randint(VOCAB, (1,), generator=generator) + torch.arange(LENGTH)) % VOCAB
    noise = torch.rand(LENGTH, generator=generator) < 0.1
    return torch.where(noise, torch.randint(VOCAB, (LENGTH,), generator=generator), tokens)


class Sequences(IterableDataset):
    """Sequences in order, without end."""

    def __iter__(self):
        number = 0
        while True:
            yield {"input_ids": sequence(number), "labels": sequence(number)}
            number += 1


class Some(Dataset):
    """The first sequences, to be shuffled."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return {"input_ids": sequence(number), "labels": sequence(number)}


def batch(number):
    tokens = torch.stack([sequence(number * BATCH + i) for i in range(BATCH)])
    return {"input_ids": tokens, "labels": tokens}


def bare_steps(model, optimizer, steps, accumulate, bf16):
    """What trainers do, in plain torch: accumulate, clip, step."""
    for step in range(steps):
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch(step * accumulate + part)).loss
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    """Parameters by name, copied."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_weights(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)
