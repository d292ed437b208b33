"""Fine-tune a Hugging Face model: weights from safetensors shards, dict batches, and FSDP by one option.

    pip install '.[finetune]'
    paceline run --nproc-per-node 2 examples/finetune.py
    paceline run --nproc-per-node 2 examples/finetune.py --fsdp

The text is a sequence of bytes, so no tokenizer is needed. Nothing is downloaded: rank 0 writes a small GPT-2
with random weights, in the form that models have on the Hugging Face hub. For a real model give its folder,
as from `huggingface_hub.snapshot_download`, with `--weights`. Each rank reads only the weights that it holds.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import paceline

IGNORED = -100  # a label that the model's loss leaves out


def sums(count: int) -> list[torch.Tensor]:
    """Lines such as "17+25=42", as bytes."""
    draw = random.Random(0)
    pairs = [(draw.randrange(20), draw.randrange(20)) for _ in range(count)]
    return [torch.tensor(list(f"{a}+{b}={a + b}.".encode())) for a, b in pairs]


def pad(lines: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = pad_sequence(lines, batch_first=True)
    mask = pad_sequence([torch.ones_like(line) for line in lines], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def write_small_model(folder: str) -> None:
    config = GPT2Config(
        vocab_size=128,
        n_positions=16,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="200KB")


def score(model, batch):
    out = model(**batch)
    # Each token is predicted from those before it, so the first label of a line is no target.
    tokens = (batch["labels"][:, 1:] != IGNORED).sum()
    return {"loss": (out.loss * tokens, tokens)}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--folder", default="runs/finetune")
    options.add_argument("--weights", help="folder of a model, with its config and safetensors")
    options.add_argument("--fsdp", action="store_true", help="shard the model over the ranks")
    args = options.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    lines = sums(1160)
    train, test = lines[:960], lines[960:]

    with paceline.join(seed=1) as job:
        weights = args.weights or f"{args.folder}/pretrained"
        if not args.weights:
            paceline.on_rank0(job, lambda: write_small_model(weights))
        with torch.device("meta"):  # without memory, until the weights are loaded
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights))
        if args.fsdp:
            model = paceline.fsdp(job, model, init="later")
        paceline.load_weights(model, weights)
        if not args.fsdp:
            model = paceline.ddp(job, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=pad)
        # Dropout masks belong to a micro-batch: with a fixed size they are equal on any number of ranks.
        batches = paceline.Batches(job, loader, global_batch=32, micro_batch=16)
        training = paceline.Training(job, model, optimizer, batches, count="tokens")
        training.report(args.folder, progress=True)

        for step in training.steps(epochs=args.epochs):
            for batch in step:
                out = model(**batch)
                tokens = (batch["labels"][:, 1:] != IGNORED).sum()
                step.backward(out.loss, count=tokens)
            step.update(clip_norm=1.0)
            training.log(loss=step.loss)

        training.export(f"{args.folder}/model.pth")
        held_out = DataLoader(test, batch_size=32, collate_fn=pad)
        result = paceline.evaluate(job, model, held_out, score)
        if job.rank == 0:
            print(f"loss {result.loss:.3f} on {result.num_samples} lines")


if __name__ == "__main__":
    main()
