"""How ``prunus recover`` and ``prunus prune --recover`` spend a budget of tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..recovery import Recovery, recover
from ..trained.data import TrainingBatches, in_batches, text_config
from ..trained.model import TrainedModel
from .console import print
from .shared_options import number_of

LENGTH = 512  # tokens of a window, or the model's longest
PER_STEP = 49_152  # tokens of a step, where the budget has that many steps
FEWEST_BATCHES = 8  # of little data, in a round
FEWEST_STEPS = 100  # below, steps are smaller
PER_PASS = {"cuda": 8192, "cpu": 2048}  # tokens of one pass


@dataclass(frozen=True)
class BatchOptions:
    size: int
    length: int
    accumulate: int
    steps: int


def batch_options(
    budget: str, trained: TrainedModel, args: Any, *, length: int = 0, batch: int = 0, step_tokens: int = 0
) -> BatchOptions:
    """How the budget is spent: 49,152 tokens a step, or less, so that there are 100 steps."""
    number, samples = number_of(budget), trained.evaluated
    is_text = isinstance(samples, Tensor) or "input_ids" in (samples or {})
    longest = getattr(text_config(trained.model), "max_position_embeddings", None) if is_text else None
    length = (length or min(LENGTH, longest or LENGTH)) if is_text else 1
    if isinstance(samples, dict) and is_text:
        length = samples["input_ids"].shape[1]
    assert trained.samples is not None
    num_samples = len(trained.samples.of_length(length))
    size = batch or max(1, min(PER_PASS[args.device.type] // length if is_text else 32, num_samples // FEWEST_BATCHES))
    per_step = step_tokens or min(PER_STEP if is_text else 128, max(size * length, number // FEWEST_STEPS))
    accumulate = max(1, round(per_step / (size * length * args.world_size)))
    steps = max(1, round(number / (size * length * args.world_size * accumulate)))
    return BatchOptions(size, length, accumulate, steps)


def recovered(command: Any, trained: TrainedModel, teacher: nn.Module, args: Any, options: BatchOptions) -> Recovery:
    assert trained.samples is not None and trained.evaluated is not None
    batches = TrainingBatches(trained.samples.of_length(options.length), options.size, command.seed)
    held_out = in_batches(trained.evaluated, options.size)
    names = ("lr", "hard", "train", "offload_teacher", "compile", "seed")
    how = {name: getattr(command, name) for name in names if hasattr(command, name)}
    how |= {"held_out": held_out, "accumulate": options.accumulate, "state": args.output_dir, "args": args}
    rounds = options.steps * options.accumulate * args.world_size / len(batches)
    if args.process_index == 0 and rounds > 1.5:
        print(f"The data is read {rounds:.1f} times: more data or a smaller --budget may recover more.")
    return recover(trained.model, teacher, batches, steps=options.steps, **how)
