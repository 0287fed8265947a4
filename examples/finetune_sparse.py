"""Fine-tune a sparse Hugging Face model and keep its zeros: prune in one shot, then train under the Trainer.

Needs prunus[hf]. Without --model a tiny Llama is made on the spot, so that the program runs anywhere:

python examples/finetune_sparse.py --out tuned
python examples/finetune_sparse.py --model path/to/model --text book.txt --steps 500 --out tuned
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from prunus import prune
from prunus.integrations.huggingface import PruneCallback


class Windows(Dataset):
    """Windows of ``length`` tokens, which are their own labels."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def load(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """Model and tokens."""
    if args.model:
        tokens = AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"]
        return AutoModelForCausalLM.from_pretrained(args.model), torch.tensor(tokens)
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes))
    return model, torch.tensor(list(Path(__file__).read_bytes()))  # this file, byte by byte


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path)
    options.add_argument("--text", type=Path)
    options.add_argument("--sparsity", type=float, default=0.5)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--length", type=int, default=64)
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    if args.model and not args.text:
        options.error("--model needs --text, to calibrate and to fine-tune on")

    model, tokens = load(args)
    data = Windows(tokens, args.length)
    samples = [data.windows[start : start + 4] for start in range(0, min(len(data), 32), 4)]
    print(prune(model, samples, args.sparsity))

    keep_zeros = PruneCallback(masks="zeros")  # no schedule: the zeros that are there stay
    arguments = TrainingArguments(
        str(args.out / "checkpoints"), max_steps=args.steps, per_device_train_batch_size=4, learning_rate=1e-4,
        save_strategy="no", report_to=[], logging_steps=max(1, args.steps // 4),
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[keep_zeros])
    trainer.train()
    assert keep_zeros.pruner is not None
    print(keep_zeros.pruner.report())
    trainer.save_model(str(args.out))  # plain weights with exact zeros; prunus export makes them small


if __name__ == "__main__":
    main()
