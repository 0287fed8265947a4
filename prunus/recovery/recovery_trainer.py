"""The training of a recovery, on the Trainer of transformers."""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, cast

try:
    from accelerate.utils import DistributedType
    from transformers import (
        PreTrainedModel,
        PrinterCallback,
        ProgressCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError("prunus.recover needs transformers and accelerate: pip install prunus[hf]") from error

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from ..eligible import plain_name
from ..masking import unwrapped
from ..oneshot.samples import Tree, moved
from ..optim import AdamWPrune
from ..pruner import Pruner
from ..ranks import is_dtensor, local
from .learned_scale import learned_scales
from .loss import Counts, Distillation, Figures, figures_of
from .plan import LR, Plan
from .result import Point
from .step_batches import Steps
from .teacher import narrowed

BETAS = (0.9, 0.99)
MAX_NORM = 1.0
SAVES = 10  # of a run
SCALE_RATE = 8.0  # times the learning rate: that of the logarithms of scales
BEST = "best-{rank}.safetensors"
WEIGHTS = "weights.safetensors"  # what learns, of models that transformers cannot save whole


class State:
    """Values of the parameters that learn, in main memory; of sharded ones those of this rank."""

    def __init__(self, parameters: Sequence[nn.Parameter], step: int = 0) -> None:
        self.step = step
        self.values = [local(p).detach().to("cpu", copy=True) for p in parameters]

    @torch.no_grad()
    def restore_(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, values in zip(parameters, self.values, strict=True):
            local(parameter).copy_(values)

    def save(self, path: Path) -> None:
        """By number: names may share a tensor."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({str(i): values.contiguous() for i, values in enumerate(self.values)}, path)

    def load_(self, path: Path) -> None:
        values = load_file(path)
        self.values = [values[str(i)].view_as(own) for i, own in enumerate(self.values)]


class RecoveryTrainer(Trainer):
    """Trains by a ``Distillation``, with the zeros of every matrix held at zero.

    Masks are the zeros that the weights have when the training begins, or goes on from a checkpoint. Of weights on
    grids only the ``scales`` learn.
    """

    model: nn.Module  # pyrefly: ignore[bad-override-mutable-attribute]
    optimizer: Any

    def __init__(
        self,
        args: TrainingArguments,
        distillation: Distillation,
        plan: Plan,
        steps: Steps,
        held_out: Sequence[Tree],
        dtypes: Mapping[nn.Parameter, torch.dtype],
        evaluations: int,
    ) -> None:
        super().__init__(distillation.student, args, callbacks=[_Driver(self)])
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.model_accepts_loss_kwargs = True  # the loss is divided by the places of all batches of a step
        self.distillation, self.plan, self.steps, self.held_out = distillation, plan, steps, held_out
        self.dtypes, self.scales = dtypes, learned_scales(self.model, dtypes)  # dtypes that parameters end in
        self.evaluations = evaluations
        self.report: Callable[[int], None] = lambda step: None
        self.saves = args.save_strategy != "no"
        self.figures: dict[int, Point] = {}  # of the student, by step
        self.teacher_figures = Figures(None)
        self.pruner: Pruner | None = None
        self.initial: State | None = None  # what trials go back to
        self.best: State | None = None
        self.resumed_from: str | None = None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.fsdp_plugin_args and state.distributed_type == DistributedType.MULTI_CPU:
            # Accelerate shards models on accelerators alone; torch's fully_shard works on the CPU too
            from accelerate.utils import FullyShardedDataParallelPlugin

            plugin: dict[str, Any] = dict(self.args.fsdp_plugin_args)
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)
            state._shared_state["distributed_type"] = state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def get_train_dataloader(self) -> DataLoader:
        # its own generator: a run that goes on makes one more loader, and must not draw more random numbers
        return DataLoader(self.steps, batch_size=None, collate_fn=lambda batch: batch, generator=torch.Generator())

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            learning = self.learning_of(model or self.model)
            self.optimizer = AdamWPrune(learning, LR, BETAS, weight_decay=0.0, max_norm=MAX_NORM)
            logs = [scale.log for scale in self.scales]
            factors = {p: torch.tensor(SCALE_RATE, dtype=torch.float64, device=p.device) for p in logs}
            self.optimizer.lr_factors = factors
        return self.optimizer

    def _get_learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return getattr(unwrapped(self.optimizer), "grad_norm", None)  # the step clips by it

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Tree], Any]:
        if not (batches := list(islice(epoch_iterator, num_batches))):
            self.control.should_training_stop = True
        num = torch.zeros(3, dtype=torch.float64, device=device)
        for batch in batches:
            num += torch.tensor(self.distillation.counts(batch), device=device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(num)
        counts = Counts(*(num / self.args.world_size).tolist())  # since gradients are averaged over ranks
        self.state.num_input_tokens_seen += round(counts.num_tokens * self.args.world_size)
        return batches, counts

    def compute_loss(
        self, model: nn.Module, inputs: Tree, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        model.eval()  # no dropout, and batch norms use their running statistics
        with self.autocast():
            return self.distillation(model, inputs, num_items_in_batch)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[Figures, Figures]:
        """Figures of the student and of the teacher on the held-out batches, which ranks share."""
        rank, num_ranks = self.args.process_index, self.args.world_size
        mode = model.training
        model.eval()
        total = torch.zeros(7, dtype=torch.float64, device=self.args.device)
        for first in range(0, len(self.held_out), num_ranks):
            at = min(first + rank, len(self.held_out) - 1)
            with self.autocast():  # every rank runs, since sharded weights are gathered together
                sums = self.distillation.sums(model, moved(self.held_out[at], self.args.device))
            total += sums * (first + rank < len(self.held_out))
        if num_ranks > 1:
            torch.distributed.all_reduce(total)
        model.train(mode)
        for module in model.modules():  # the outermost one leaves its weights whole, and states are those of shards
            if isinstance(module, FSDPModule):
                module.reshard()
        return figures_of(total, self.distillation.teacher is not None)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure on the held-out batches; a trial that ends here gives way to the next, or to the run."""
        step = self.state.global_step
        student, self.teacher_figures = self.measure(self.model_wrapped)
        self.figures[step] = point = Point(step, self.state.num_input_tokens_seen, **asdict(student))
        known = asdict(point) | {f"teacher_{name}": value for name, value in asdict(self.teacher_figures).items()}
        metrics = {f"eval_{name}": value for name, value in known.items() if name != "step" and value is not None}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return False  # the best state is kept here, in main memory

    @property
    def best_step(self) -> int:
        """The step, of the run and not of its trials, at which the student was best."""
        counted = {s: m.figures for s, m in self.figures.items() if s not in self.plan.trial_ends}
        ranks = {step: self.distillation.rank(figures) for step, figures in counted.items()}
        return min(ranks, key=lambda step: (math.isnan(ranks[step]), ranks[step], -step))

    @property
    def learning(self) -> list[nn.Parameter]:
        return self.learning_of(self.model)

    def learning_of(self, model: nn.Module) -> list[nn.Parameter]:
        follow = {scale.weight for scale in self.scales}
        return [p for p in model.parameters() if p.requires_grad and p not in follow] + [s.log for s in self.scales]

    def restore_(self, state: State) -> None:
        state.restore_(self.learning)
        self.follow_scales_()

    def follow_scales_(self) -> None:
        for scale in self.scales:
            scale.follow_()

    def round_(self) -> bool:
        """Round what learned to the values that the model ends with; whether there was anything to round."""
        narrow = [p for p in self.learning if p.dtype != self.dtypes.get(p, p.dtype)]
        for parameter in narrow:
            parameter.data = narrowed(parameter.data, self.dtypes[parameter]).to(parameter.dtype)
        for scale in self.scales:
            scale.finish_()
        return bool(narrow or self.scales)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The best state is written first: a checkpoint is complete when its trainer_state.json is there."""
        self.fill_kept_zeros_()
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        writes_best = self.args.process_index == 0 or self.is_sharded  # of equal values those of the first rank
        if writes_best and self.best is not None and 0 < self.best.step < self.state.global_step:
            self.best.save(folder / BEST.format(rank=self.args.process_index))
        super()._save_checkpoint(model, trial)

    @property
    def is_sharded(self) -> bool:
        return any(map(is_dtensor, self.learning))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.initial = State(self.learning)
        if not (path := Path(resume_from_checkpoint) / WEIGHTS).is_file():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        last = State(self.learning)
        last.load_(path)
        self.restore_(last)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if isinstance(self.model, PreTrainedModel) and not self.scales:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:  # not adapters alone, and tied weights once
            State(self.learning).save(Path(str(output_dir)) / WEIGHTS)

    @torch.no_grad()
    def fill_kept_zeros_(self) -> None:
        """A weight that stays is not to count as pruned because it came out as zero."""
        if self.pruner is None:
            return
        parameters = {plain_name(name): p for name, p in self.model.named_parameters()}
        for name, mask in self.pruner.masks.items():
            weight = local(parameters[name])
            weight.masked_fill_(mask & (weight == 0), torch.finfo(weight.dtype).tiny)


class _Driver(TrainerCallback):
    """Masks at the beginning, the rate of every step, trials, and the best state."""

    def __init__(self, trainer: RecoveryTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **parts: Any) -> None:
        trainer, optimizer = self.trainer, cast(AdamWPrune, unwrapped(parts["optimizer"]))
        optimizer._on_gpu = all(p.is_cuda for group in optimizer.param_groups for p in group["params"])
        trainer.initial = trainer.initial or State(trainer.learning)
        if names := names_with_zeros(trainer.model, trainer.learning):
            trainer.pruner = Pruner(trainer.model, optimizer, masks="zeros", include=names, only=names)
        if trainer.distillation.teacher is not None and trainer.is_fsdp_enabled:
            trainer.distillation.teacher.shard_like(trainer.model)
        if state.global_step:
            self._resume(args, state)
        else:
            trainer.evaluate()
            trainer.follow_scales_()  # from here on weights of 16 bits are not rounded
        trainer.steps.first_step = state.global_step

    def _resume(self, args: TrainingArguments, state: Any) -> None:
        """Figures and trials so far are in the log; the best state is the first, this one, or in the checkpoint."""
        trainer, plan = self.trainer, self.trainer.plan
        for entry in state.log_history:
            if "eval_tokens" in entry:
                values, of_teacher = (
                    [entry.get(f"eval_{whose}{name}") for name in ("kl", "loss", "accuracy")]
                    for whose in ("", "teacher_")
                )
                trainer.figures[entry["step"]] = Point(entry["step"], int(entry["eval_tokens"]), *values)
                trainer.teacher_figures = Figures(*of_teacher)
        ranks = {step: trainer.distillation.rank(point.figures) for step, point in trainer.figures.items()}
        plan.before = ranks[0]
        while (num := len(plan.results)) < len(plan.trial_ends) and plan.trial_ends[num] in ranks:
            plan.results.append(ranks[plan.trial_ends[num]])
        step = trainer.best_step
        path = Path(trainer.resumed_from or "") / BEST.format(rank=args.process_index if trainer.is_sharded else 0)
        if step == 0:
            trainer.best = trainer.initial
            return
        trainer.best = State(trainer.learning, state.global_step)
        if step != state.global_step:
            try:
                trainer.best.load_(path)
                trainer.best.step = step
            except (OSError, KeyError, RuntimeError) as error:
                warnings.warn(
                    f"cannot load the best state so far, of step {step}, from {path} ({error}), for example because "
                    "the number of processes changed; this state now counts as the best",
                    stacklevel=2,
                )
                trainer.figures = {s: m for s, m in trainer.figures.items() if s <= plan.num_trial_steps or s > step}

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **parts: Any) -> None:
        lr = self.trainer.plan.lr_at(state.global_step)
        for group in unwrapped(parts["optimizer"]).param_groups:
            group["lr"] = lr

    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        for scale in self.trainer.scales:
            scale.take_gradient_()

    def on_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self.trainer.follow_scales_()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        step, trainer, plan = state.global_step, self.trainer, self.trainer.plan
        control.should_evaluate = step in plan.spread(trainer.evaluations) or step in plan.trial_ends
        control.should_save = trainer.saves and (control.should_evaluate or step in plan.spread(SAVES))
        trainer.report(step)

    def on_evaluate(self, args: TrainingArguments, state: Any, control: Any, **parts: Any) -> None:
        step, trainer = state.global_step, self.trainer
        if step in trainer.plan.trial_ends:
            trainer.plan.results.append(trainer.distillation.rank(trainer.figures[step].figures))
            assert trainer.initial is not None
            trainer.restore_(trainer.initial)
            for own in unwrapped(parts["optimizer"]).state.values():
                for name in ("step", "exp_avg", "exp_avg_sq"):
                    own[name].zero_()
        elif step == 0:
            trainer.best = trainer.initial
            trainer.plan.before = trainer.distillation.rank(trainer.figures[0].figures)
        elif step == trainer.best_step:
            trainer.fill_kept_zeros_()
            trainer.best = State(trainer.learning, step)


def names_with_zeros(model: nn.Module, learning: Collection[nn.Parameter]) -> list[str]:
    """Matrices in which something is zero, but not those of new adapters, which begin as zeros and are to learn."""
    adapters = {part for module in model.modules() for part in getattr(module, "adapter_layer_names", ())}
    matrices = {p for p in learning if p.ndim > 1}
    named = {plain_name(name): p for name, p in model.named_parameters() if p in matrices}
    named = {name: p for name, p in named.items() if not adapters & set(name.split("."))}
    num_kept = torch.tensor([int(local(p).count_nonzero()) for p in named.values()])
    sizes = torch.tensor([local(p).numel() for p in named.values()])
    if any(map(is_dtensor, named.values())):
        counts = torch.stack([num_kept, sizes]).to(next(iter(named.values())).device)
        torch.distributed.all_reduce(counts)
        num_kept, sizes = counts.cpu()
    return [name for name, kept, size in zip(named, num_kept.tolist(), sizes.tolist(), strict=True) if kept < size]
