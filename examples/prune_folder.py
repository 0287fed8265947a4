"""Prune a Hugging Face folder in one shot, repair it, compare its outputs with the dense model's, and save it small.

Needs prunus[hf]. Without --model a tiny Llama is made on the spot, so that the program runs anywhere:

python examples/prune_folder.py --out small
python examples/prune_folder.py --model path/to/model --text book.txt --sparsity 0.5 --out small
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from prunus import load_model, prune, save_model


@torch.no_grad()
def perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    losses = [model(input_ids=window, labels=window).loss for window in windows.split(1)]
    return float(torch.stack(losses).mean().exp())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path)
    options.add_argument("--text", type=Path)
    options.add_argument("--sparsity", type=float, default=0.5)
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--length", type=int, default=64)
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    if args.model and not args.text:
        options.error("--model needs --text to calibrate on")

    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
        tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"])
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes)).eval()
        tokens = torch.tensor(list(Path(__file__).read_bytes()))  # this file, byte by byte
    windows = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    held_out, windows = windows[-max(1, len(windows) // 10) :], windows[: -max(1, len(windows) // 10)]

    dense = perplexity(model, held_out)
    result = prune(model, windows[: args.samples].split(8), args.sparsity)
    print(result)
    print(f"perplexity {dense:.3f} dense, {perplexity(model, held_out):.3f} pruned")
    save_model(model, args.out, masks=result.masks, source=args.model)
    again = load_model(args.out)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    stored = sum(path.stat().st_size for path in args.out.glob("*.safetensors"))
    print(f"{args.out}: {stored:,} bytes, every bit comes back")


if __name__ == "__main__":
    main()
