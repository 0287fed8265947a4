"""The settings of transformers' Trainer for a recovery."""

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import TrainingArguments


def completed(
    args: "TrainingArguments | None",
    student: nn.Module,
    steps: int,
    accumulate: int,
    bf16: bool | None,
    state: str | Path | None,
    seed: int,
) -> Any:
    """The Trainer's settings: those given, with what this function decides."""
    if args is None:
        device = next(student.parameters()).device
        args = training_arguments(state or tempfile.gettempdir(), device.type, bf16, seed)
    else:
        args = copy.copy(args)
        args.bf16 = args.bf16 if bf16 is None else bf16
        args.output_dir = args.output_dir if state is None else str(state)
    args.max_steps, args.gradient_accumulation_steps = steps, accumulate
    args.max_grad_norm = 0.0  # the optimizer's own step clips, where gradients are masked
    args.lr_scheduler_type = "constant"  # the plan says the rate of each step
    args.eval_strategy, args.save_strategy = "no", "no" if state is None else "steps"
    args.save_steps, args.save_total_limit, args.load_best_model_at_end = steps, 1, False
    args.logging_nan_inf_filter, args.disable_tqdm, args.remove_unused_columns = False, True, False
    if args.fsdp_plugin_args:  # whole states are gathered for the folder at the end alone
        plugin: Any = dict(args.fsdp_plugin_args)
        args.fsdp_plugin_args = plugin | {"state_dict_type": "SHARDED_STATE_DICT"}
    args.ignore_data_skip = True  # the batches of a step are known without reading those before it
    return args


def training_arguments(
    folder: str | Path, device: str, bf16: bool | None = None, seed: int = 0, **more: Any
) -> "TrainingArguments":
    """Settings of the Trainer for one process a device; products are in bfloat16 on GPUs that have it."""
    try:
        from transformers import TrainingArguments
    except ImportError as error:
        raise ImportError("prunus.recover needs transformers and accelerate: pip install prunus[hf]") from error
    is_mixed = device == "cuda" and torch.cuda.is_bf16_supported() if bf16 is None else bf16
    args = TrainingArguments(str(folder), use_cpu=device == "cpu", bf16=is_mixed, report_to="none", seed=seed, **more)
    args._n_gpu = min(1, args.n_gpu)
    return args
