"""``recover``: a pruned, shrunk or quantised model learns from the dense one."""

import copy
import math
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..eligible import check_patterns, matches, plain_name, unwrapped_model
from ..files.json_file import read_json, write_json
from ..oneshot.blocks import blocks_of
from ..oneshot.progress import Progress, progress_line
from ..oneshot.samples import digest
from ..ranks import is_dtensor, local
from .folder import narrowed, write_recovered
from .loss import Distillation, Figures
from .plan import Plan
from .result import Point, Recovery
from .step_batches import HELD_OUT, Batches, Steps, random_kept
from .teacher import Teacher, weights_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from .recovery_trainer import RecoveryTrainer

EVALUATIONS, SAVES = 5, 10  # of a run
OF_ACCELERATE = ("forward", "_original_forward", "_is_accelerate_prepared")  # which it sets on a model
SETTINGS = "settings.json"  # in the folder of checkpoints: what they belong to


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
    """Train ``model`` in place to give the outputs of ``teacher``; zeros of its matrices stay exactly where they are.

    The loss is ``KL(teacher || student)`` at every token that is not padding, or at every label of a classifier, plus
    ``hard`` times the cross-entropy of the labels (of text, the next tokens). Where outputs are not logits it is their
    mean square difference. ``teacher`` is a model, ``result.dense()`` of ``prune``, or a folder; with ``None`` the loss
    is the cross-entropy alone. Dropout is off, and batch norms use their running statistics.

    ``batches`` are read as ``prune`` reads them, once or again and again, ``accumulate`` of them a step and process.
    The first ``held_out`` of them never train: on these the best state is chosen, which the model ends in. ``train``
    restricts what learns: globs over names of parameters. ``lr=None`` finds the learning rate by three short trials,
    where there are at least 300 steps; it is 1e-3 for fewer. 16-bit models learn in float32 and end in their own dtype.

    With ``state``, a folder, a run that was killed goes on from its last checkpoint when it is called again. ``out`` is
    a folder to write the model to, which must not exist; unless ``state`` says otherwise, checkpoints are beside it.
    ``args`` are ``TrainingArguments`` for all else: FSDP, trackers, the device. Needs transformers and accelerate.
    """
    _check_numbers(steps, lr, hard, accumulate, evaluations)
    unfinished = None
    if out is not None:
        out = Path(out)
        if out.exists():
            raise ValueError(f"{out} is there already; give another folder as out")
        if state is None:
            state = unfinished = out.with_name(f".{out.name}.unfinished")
    student = unwrapped_model(model)
    _check_values(student)
    hard = 1.0 if teacher is None and not hard else hard
    dense = _loaded(teacher)
    if dense is not None:
        _check_values(dense)
        _check_apart(student, dense)
    plan = Plan(steps, lr)
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(random_kept(seed, {p.device for p in student.parameters() if p.is_cuda}))
        data = Batches(batches, held_out, seed)
        if state is not None:
            stack.enter_context(_without_empty_folders(Path(state)))
        dtypes = stack.enter_context(_learning(student, train))
        how = _arguments(args, student, steps, accumulate, bf16, state, seed)
        distillation = Distillation(student, None, hard)
        if dense is not None:
            distillation.teacher = Teacher(dense, how.device, offload=offload_teacher)
            stack.enter_context(distillation.teacher.open(place=not how.fsdp))
            _warn_if_whole(student, dense)
        trainer = _trainer(student, how, distillation, plan, data, evaluations)
        report = stack.enter_context(progress_line(progress if how.process_index == 0 else False, "recover"))
        if report is not None:
            trainer.report = lambda step: report(step, steps, _in_words(trainer))
        with trainer.autocast():
            distillation.prepare(data.held_out, next(student.parameters()).device)
        if compile:
            stack.enter_context(compiled_blocks(student, dense))
        if state is not None:
            trainer.resumed_from = _resumed(Path(state), _settings(trainer, data, lr, train, seed))
        recovery = _run(trainer, dtypes, began)
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


def _check_values(model: nn.Module) -> None:
    if any(getattr(module, "is_packed", False) for module in model.modules()):
        raise ValueError("the model's layers are sparse and cannot learn: call unsparsify_(model) first")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; load the weights first")


def _loaded(teacher: nn.Module | str | Path | None) -> nn.Module | None:
    if isinstance(teacher, str | Path):
        from ..export.huggingface import load_any_model

        return load_any_model(Path(teacher))
    if teacher is not None and not isinstance(teacher, nn.Module):
        raise ValueError(
            f"teacher is a model, a folder or None, got {type(teacher).__name__}; for a Result, give result.dense()"
        )
    return None if teacher is None else unwrapped_model(teacher)


def _check_apart(student: nn.Module, teacher: nn.Module) -> None:
    own = {local(p).untyped_storage().data_ptr(): name for name, p in student.named_parameters() if p.numel()}
    for parameter in teacher.parameters():
        if parameter.numel() and (name := own.get(local(parameter).untyped_storage().data_ptr())):
            raise ValueError(
                f"teacher and student share {name}, so the teacher would learn too; give result.dense(), or a model "
                "that was loaded by itself"
            )


def _warn_if_whole(student: nn.Module, teacher: nn.Module) -> None:
    """A student that is neither sparse nor smaller."""
    sizes = [sum(p.numel() for p in each.parameters()) for each in (student, teacher)]
    has_zeros = any(not bool(local(p).detach().all()) for p in student.parameters() if p.ndim > 1)
    if sizes[0] >= sizes[1] and not has_zeros:
        warnings.warn(
            "the student has no zeros and as many weights as its teacher: nothing was pruned, or its zeros were "
            "filled; give the pruned model",
            stacklevel=3,
        )


@contextmanager
def _without_empty_folders(folder: Path) -> Iterator[None]:
    """Folders that are made for this one go if nothing was written."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def _learning(student: nn.Module, train: str | Sequence[str]) -> Iterator[dict[nn.Parameter, torch.dtype]]:
    """What ``train`` names learns, in float32; then flags and dtypes are as before, and no kept weight is zero.

    Yields the dtypes that parameters had.
    """
    globs = [train] if isinstance(train, str) else list(train)
    named = {plain_name(name): p for name, p in student.named_parameters()}
    check_patterns(globs, named)
    flags, dtypes = ({p: getattr(p, name) for p in named.values()} for name in ("requires_grad", "dtype"))
    modes = {module: module.training for module in student.modules()}
    wrapping = {name: vars(student).get(name) for name in OF_ACCELERATE}
    try:
        for name, parameter in named.items():
            learns = parameter.is_floating_point() and (not globs or matches(name, globs))
            parameter.requires_grad_(learns)
            if learns and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        yield dtypes
    finally:
        for name, value in wrapping.items():
            vars(student).pop(name, None)
            if value is not None:
                vars(student)[name] = value
        for parameter, flag in flags.items():
            parameter.grad = None
            if parameter.dtype != dtypes[parameter] and not is_dtensor(parameter):
                parameter.data = narrowed(parameter.data, dtypes[parameter])
            parameter.requires_grad_(flag)
        for module, mode in modes.items():
            module.training = mode


def _arguments(
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


def _trainer(
    student: nn.Module, args: Any, distillation: Distillation, plan: Plan, data: Batches, evaluations: int
) -> "RecoveryTrainer":
    from .recovery_trainer import RecoveryTrainer

    def spread(num: int) -> list[int]:
        first, length = plan.num_trial_steps, plan.steps - plan.num_trial_steps
        return [first + -(-length * (i + 1) // num) for i in range(num)]

    steps = Steps(data, plan, args.gradient_accumulation_steps, args.process_index, args.world_size)
    when = {"evaluate_at": spread(evaluations), "save_at": spread(SAVES)}
    return RecoveryTrainer(student, args, distillation, plan, steps, data.held_out, **when, report=lambda step: None)


@contextmanager
def compiled_blocks(*models: nn.Module | None) -> Iterator[None]:
    """Blocks of the models compiled: equal ones share a graph."""
    blocks: list[nn.Module] = []
    for model in models:
        if model is not None:
            blocks += blocks_of(model, weights_of(model))
    try:
        for block in blocks:
            block.compile()
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def _settings(trainer: "RecoveryTrainer", data: Batches, lr: float | None, train: Any, seed: int) -> dict[str, Any]:
    """What a run that goes on must have in common with the one that began."""
    student, teacher = trainer.distillation.student, trainer.distillation.teacher
    return {
        "steps": trainer.plan.steps,
        "lr": lr,
        "hard": trainer.distillation.hard,
        "train": [train] if isinstance(train, str) else list(train),
        "seed": seed,
        "accumulate": trainer.args.gradient_accumulation_steps,
        "held_out": digest(data.held_out),
        "student": fingerprint(student),
        "teacher": None if teacher is None else fingerprint(teacher.model),
    }


def fingerprint(model: nn.Module) -> str:
    """A digest of some values of every parameter, by which another model is noticed."""
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().reshape(-1)[:: max(1, p.numel() // 64)].float().cpu() for p in model.parameters()]
    return digest([names, values])


def _resumed(folder: Path, settings: dict[str, Any]) -> str | None:
    """The last complete checkpoint in the folder, if there is one; ValueError where it is of another run."""
    path = folder / SETTINGS
    if path.is_file():
        known = read_json(path)
        if other := [name for name, value in settings.items() if known.get(name) != value]:
            raise ValueError(
                f"{folder} holds a run with another {other[0]} ({known.get(other[0])}, now {settings[other[0]]}); "
                "go on with the same, or remove the folder to begin anew"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    steps = sorted((int(p.name.partition("-")[2]) for p in folder.glob("checkpoint-*") if p.is_dir()), reverse=True)
    for step in steps:
        state = folder / f"checkpoint-{step}" / "trainer_state.json"
        try:
            if read_json(state)["global_step"] == step:
                return str(state.parent)
        except (ValueError, KeyError, OSError):  # killed while it was written
            continue
    return None


def _run(trainer: "RecoveryTrainer", dtypes: Mapping[nn.Parameter, torch.dtype], began: float) -> Recovery:
    from ..export.huggingface import quiet_transformers
    from .recovery_trainer import State

    try:
        with quiet_transformers():
            trainer.train(resume_from_checkpoint=trainer.resumed_from)
        if trainer.state.global_step not in trainer.figures:
            trainer.evaluate()  # the batches ended early
        assert trainer.best is not None and trainer.initial is not None
        if trainer.best.step != trainer.state.global_step:
            trainer.best.restore_(trainer.learning)
        trainer.fill_kept_zeros_()
        after = trainer.figures[trainer.best.step].figures
        if narrow := [p for p in trainer.learning if p.dtype != dtypes.get(p, p.dtype)]:
            for parameter in narrow:  # what the model is rounded to is what is measured
                parameter.data = narrowed(parameter.data, dtypes[parameter]).to(parameter.dtype)
            after, _ = trainer.measure(trainer.model_wrapped)
    except BaseException:
        if trainer.initial is not None:
            trainer.initial.restore_(trainer.learning)
        raise
    finally:
        if trainer.pruner is not None:
            trainer.pruner.remove()
    plan, initial, learning = trainer.plan, trainer.initial, trainer.learning
    curve = [
        Point(step, measured.num_tokens, measured.figures.kl, measured.figures.loss, measured.figures.accuracy)
        for step, measured in sorted(trainer.figures.items())
        if step not in plan.trial_ends
    ]
    num_zeros = torch.tensor(sum(int((local(p) == 0).sum()) for p in trainer.model.parameters() if p.ndim > 1))
    if trainer.is_sharded:
        num_zeros = num_zeros.to(trainer.args.device)
        torch.distributed.all_reduce(num_zeros)
    notes = [trainer.distillation.note] if trainer.distillation.note else []
    assert isinstance(initial, State)
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
        undo=lambda: initial.restore_(learning),
    )


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
