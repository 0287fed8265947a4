"""``recover``: a pruned, shrunk or quantised model learns from the dense one."""

import copy
import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..eligible import unwrapped_model
from ..files.lock import without_empty_folders
from ..oneshot.progress import Progress, progress_line
from ..ranks import local
from .folder import last_checkpoint, settings_of, write_recovered
from .learned_scale import LearnedScale, check_codes
from .loss import Distillation, Figures
from .plan import Plan
from .result import Recovery
from .step_batches import HELD_OUT, Batches, Steps, random_kept
from .teacher import Teacher, check_apart, check_values, compiled_blocks, learning, loaded, warn_if_whole

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from .recovery_trainer import RecoveryTrainer, State

EVALUATIONS = 5  # of a run


def recover(
    model: nn.Module,
    teacher: nn.Module | str | Path | None,
    batches: Iterable[Any],
    *,
    steps: int,
    lr: float | None = None,
    hard: float = 0.0,
    train: str | Sequence[str] = (),
    held_out: int | Sequence[Any] = HELD_OUT,
    accumulate: int = 1,
    evaluations: int = EVALUATIONS,
    bf16: bool | None = None,
    compile: bool = False,
    offload_teacher: bool = False,
    out: str | Path | None = None,
    state: str | Path | None = None,
    args: "TrainingArguments | None" = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Recovery:
    """Train ``model`` in place to give the outputs of ``teacher``; zeros in its matrices stay exactly where they are.

    The loss is ``KL(teacher || student)`` at every token that is not padding, or at every label of a classifier, plus
    ``hard`` times the cross-entropy of the labels (for text, of the next tokens). If the model does not return logits,
    it is the mean squared difference of the outputs. ``teacher`` is a model, such as ``result.dense()`` of ``prune``,
    or a folder; with ``None`` the loss is the cross-entropy alone. Dropout is off, and batch norms use their running
    statistics.

    ``batches`` are those that ``prune`` takes; a step reads ``accumulate`` of them on each process, and a list or
    loader starts again at its end. The first ``held_out`` of them (at most a fifth of a list), or batches given there,
    are not trained on: the model ends in the state that is best on them. ``train``, globs over parameter names,
    restricts what learns. ``lr=None`` finds the learning rate in short trials, or takes 1e-3 if there are fewer
    than 300 steps. 16-bit models learn in float32 and end in their own dtype. A quantised model keeps its codes: the
    scales of its weights learn instead, and end in bfloat16.

    With ``state``, a folder, a run that was killed continues from its last checkpoint when you repeat the call. ``out``
    is a new folder to write the model to; without ``state``, checkpoints are beside it until the end. ``args`` are
    ``TrainingArguments`` for FSDP, trackers, the device and all else. Needs transformers and accelerate.
    """
    _check_numbers(steps, lr, hard, accumulate, evaluations)
    unfinished = None
    if out is not None:
        out = Path(out)
        if out.exists():
            raise ValueError(f"{out} is there already; choose another out")
        if state is None:
            state = unfinished = out.with_name(f".{out.name}.unfinished")
    student = unwrapped_model(model)
    check_values(student)
    hard = 1.0 if teacher is None and not hard else hard
    dense = loaded(teacher)
    if dense is not None:
        check_values(dense)
        check_apart(student, dense)
    plan = Plan(steps, lr)
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(random_kept(seed, {p.device for p in student.parameters() if p.is_cuda}))
        data = Batches(batches, held_out, seed)
        if state is not None:
            stack.enter_context(without_empty_folders(Path(state)))
        how = completed(args, student, steps, accumulate, bf16, state, seed)
        check_codes(student, is_sharded=bool(how.fsdp))
        dtypes = stack.enter_context(learning(student, train))
        distillation = Distillation(student, None, hard)
        if dense is not None:
            distillation.teacher = Teacher(dense, how.device, offload=offload_teacher)
            stack.enter_context(distillation.teacher.open(place=not how.fsdp))
            warn_if_whole(student, dense)
        from .recovery_trainer import RecoveryTrainer  # which loads transformers

        steps_of_rank = Steps(data, plan, accumulate, how.process_index, how.world_size)
        trainer = RecoveryTrainer(how, distillation, plan, steps_of_rank, data.held_out, dtypes, evaluations)
        report = stack.enter_context(progress_line(progress if how.process_index == 0 else False, "recover"))
        if report is not None:
            trainer.report = lambda step: report(step, steps, _in_words(trainer))
        with trainer.autocast():
            distillation.prepare(data.held_out, next(student.parameters()).device)
        if compile:
            stack.enter_context(compiled_blocks(student, dense))
        if state is not None:
            trainer.resumed_from = last_checkpoint(Path(state), settings_of(trainer, data, lr, train, seed))
        recovery = _run(trainer, began)
    if out is not None:
        source = Path(getattr(student, "name_or_path", None) or "")
        beside = source if (source / "config.json").is_file() else None
        write_recovered(out, student, recovery, source=beside, unfinished=unfinished)
    return recovery


def _check_numbers(steps: int, lr: float | None, hard: float, accumulate: int, evaluations: int) -> None:
    for name, value in {"steps": steps, "accumulate": accumulate, "evaluations": evaluations}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if lr is not None and not 0 < lr < math.inf:
        raise ValueError(f"lr must be a number above 0, or None to find it by trials, got {lr!r}")
    if not 0 <= hard < math.inf:
        raise ValueError(f"hard, the weight of the labels' cross-entropy, must be 0 or more, got {hard!r}")


def _run(trainer: "RecoveryTrainer", began: float) -> Recovery:
    from ..export.huggingface import quiet_transformers

    try:
        with quiet_transformers():
            trainer.train(resume_from_checkpoint=trainer.resumed_from)
        if trainer.state.global_step not in trainer.figures:
            trainer.evaluate()  # the batches ended early
        assert trainer.best is not None and trainer.initial is not None
        if trainer.best.step != trainer.state.global_step:
            trainer.restore_(trainer.best)
        trainer.fill_kept_zeros_()
        after = trainer.figures[trainer.best.step].figures
        if trainer.round_():  # what the model is rounded to is what is measured
            after, _ = trainer.measure(trainer.model_wrapped)
    except BaseException:
        if trainer.initial is not None:
            _undo(trainer.initial, trainer.learning, trainer.scales)
        raise
    finally:
        if trainer.pruner is not None:
            trainer.pruner.remove()
    plan, initial, learning, scales = trainer.plan, trainer.initial, trainer.learning, trainer.scales
    curve = [point for step, point in sorted(trainer.figures.items()) if step not in plan.trial_ends]
    num_zeros = torch.tensor(sum(int((local(p) == 0).sum()) for p in trainer.model.parameters() if p.ndim > 1))
    if trainer.is_sharded:
        num_zeros = num_zeros.to(trainer.args.device)
        torch.distributed.all_reduce(num_zeros)
    notes = [trainer.distillation.note] if trainer.distillation.note else []
    if not trainer.best.step:
        notes.append(f"Nothing was learned: no state was better than the first; give an lr below {plan.chosen:g}.")
    if num := len(trainer.scales):
        notes.append(f"Codes of {num:,} layer{'s' * (num > 1)} stay fixed; their scales learn.")
    assert initial is not None
    return Recovery(
        before=trainer.figures[0].figures,
        after=after,
        teacher=trainer.teacher_figures,
        lr=plan.chosen,
        lr_reason=plan.reason,
        curve=curve,
        best_step=trainer.best.step,
        steps=trainer.state.global_step,
        tokens=trainer.state.num_input_tokens_seen,
        seconds=time.perf_counter() - began,
        num_zeros=int(num_zeros),
        notes=notes,
        distance=str(trainer.distillation.distance),
        undo=lambda: _undo(initial, learning, scales),
    )


def _undo(initial: "State", learning: Sequence[nn.Parameter], scales: Sequence[LearnedScale]) -> None:
    initial.restore_(learning)
    for scale in scales:
        scale.follow_()
        scale.finish_()


def _in_words(trainer: "RecoveryTrainer") -> str:
    if not trainer.figures:
        return ""
    last: Figures = trainer.figures[max(trainer.figures)].figures
    teacher = trainer.teacher_figures
    parts = [] if last.kl is None else [f"held-out KL {last.kl:.4g}"]
    if last.accuracy is not None:
        of = f" (teacher {teacher.accuracy:.2%})" if teacher.accuracy else ""
        parts.append(f"accuracy {last.accuracy:.2%}{of}")
    elif last.perplexity is not None:
        of = f" (teacher {teacher.perplexity:.4g})" if teacher.perplexity else ""
        parts.append(f"perplexity {last.perplexity:.4g}{of}")
    return ", ".join(parts)


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
