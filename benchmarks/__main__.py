"""``python -m benchmarks COMMAND``: measures what this repository claims, and writes the pages that say so."""

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {  # module and class, what the command does
    "select": ("select:Select", "finding masks"),
    "step": ("step:StepCost", "keeping masks: a training step on a CPU, the optimizer's step on a GPU"),
    "train": ("step:Train", "whole training steps of GPT-2 124M"),
    "divergence": ("recover_step:Divergence", "the loss of distillation from hidden states, forward and backward"),
    "export": ("export:Export", "the small file form"),
    "matvec": ("matvec:Matvec", "products with a pruned weight"),
    "decode": ("decode:Decode", "text from a pruned model, by our decoder and by model.generate"),
    "prune": ("prune:Prune", "WANDA and the gradient probe after training"),
    "level": ("prune:ProbeLevel", "a level of the probe on a random model of Mistral-7B's shape"),
    "repair": (
        "costs:RepairTime",
        "pruning with repair: time on a random model of Mistral-7B's shape, or on a trained one",
    ),
    "repair-quality": ("repair_study:RepairQuality", "quality of pruning with repair, beside other ways"),
    "recover-step": ("recover_step:RecoverStep", "a step of recovery beside a dense training step"),
    "recover-study": ("recover_study:RecoverQuality", "quality of recovery after pruning, beside controls"),
    "shrink-study": ("shrink_study:ShrinkQuality", "quality of smaller models, beside other ways, and after learning"),
    "shrink-time": ("costs:ShrinkTime", "shrinking: time and memory on a random model of Llama-2-7B's shape"),
    "shrink-speed": ("decode:ShrunkSpeed", "text from a shrunk model of 1 B weights beside the dense one"),
    "bits-study": ("bits_study:BitsQuality", "quality over bits a weight: dense, sparse and smaller models, quantised"),
    "programs-text": ("programs_text:ProgramsText", "text for programs-study: Python source, and answers of the model"),
    "programs-study": (
        "programs_study:ProgramsStudy",
        "a model that writes programs, made smaller: HumanEval, perplexity, bytes and speed",
    ),
    "experts": ("small_models:Experts", "quality without some of the experts, of small models that are trained for it"),
    "large": ("large:Large", "folders pruned block by block: memory and time beside models that are loaded whole"),
    "distributed": ("distributed:Distributed", "1, 2 and 4 ranks on a CPU; on a GPU one rank beside none"),
    "lora": ("small_models:Lora", "what masks cost a merge of LoRA adapters"),
    "wanda": ("wanda:Wanda", "one-shot WANDA beside llmcompressor's, in an environment that has both"),
    "page": ("page:Page", "pages of docs/evidence, tables of bits.md, experts.md and distributed.md, from all results"),
    "pictures": ("pictures:Pictures", "docs/pictures and the figures of README.md from all results"),
    "reference": ("reference:Reference", "docs/reference.md from the docstrings"),
    "evidence": ("probe:Evidence", "does the gradient probe help? the study behind docs/evidence/probe.md"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; bad input ends in one line and exit code 2."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks COMMAND [OPTIONS]\n")
        print(*(f"  {name:14} {about}" for name, (_, about) in COMMANDS.items()), sep="\n")
        return
    try:
        if name not in COMMANDS:
            raise ValueError(f"there is no such command; the commands are {', '.join(COMMANDS)}")
        import tyro

        module, _, command = COMMANDS[name][0].partition(":")
        options = getattr(import_module(f".{module}", __package__), command)
        tyro.cli(options, prog=f"python -m benchmarks {name}", args=rest).run()
    except (ValueError, OSError) as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"benchmarks {name}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
