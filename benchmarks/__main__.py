"""``python -m benchmarks COMMAND``: measures what this repository claims, and writes the pages that say so."""

import sys
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = {  # module, what the command does
    "select": ("select", "finding masks"),
    "step": ("step", "keeping masks: a training step on a CPU, the optimizer's step on a GPU"),
    "train": ("train", "whole training steps of GPT-2 124M"),
    "export": ("export", "the small file form"),
    "matvec": ("matvec", "products with a pruned weight"),
    "prune": ("prune", "WANDA and the gradient probe after training"),
    "level": ("level", "a level of the probe on a random model of Mistral-7B's shape"),
    "repair": ("repair", "pruning with repair: a random model of Mistral-7B's shape, or a trained one"),
    "distributed": ("distributed", "1, 2 and 4 ranks on a CPU; on a GPU one rank beside none"),
    "lora": ("lora", "what masks cost a merge of LoRA adapters"),
    "wanda": ("wanda", "one-shot WANDA beside llmcompressor's, in an environment that has both"),
    "page": ("page", "docs/benchmarks.md and docs/distributed.md from all results"),
    "evidence": ("probe", "does the gradient probe help? the study behind docs/probe.md"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; bad input ends in one line and exit code 2."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks COMMAND [OPTIONS]\n")
        print(*(f"  {name:12} {about}" for name, (_, about) in COMMANDS.items()), sep="\n")
        return
    try:
        if name not in COMMANDS:
            raise ValueError(f"there is no such command; the commands are {', '.join(COMMANDS)}")
        command = import_module(f".{COMMANDS[name][0]}", __package__).Command
        _parsed(command, f"python -m benchmarks {name}", rest).run()
    except (ValueError, OSError) as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"benchmarks {name}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _parsed(command: Any, prog: str, args: Sequence[str]) -> Any:
    """The command with its options; argparse serves those with plain defaults where there is no tyro."""
    try:
        import tyro
    except ImportError:
        parser = ArgumentParser(prog)
        for option in fields(command):
            flag, kind = f"--{option.name.replace('_', '-')}", type(option.default)
            kind = Path if option.default is None else kind
            how: dict[str, Any] = {"action": BooleanOptionalAction} if kind is bool else {"type": kind}
            parser.add_argument(flag, default=option.default, **how)
        return command(**vars(parser.parse_args(args)))
    return tyro.cli(command, prog=prog, args=args)


if __name__ == "__main__":
    main()
