"""What a model that writes programs can still do when it is smaller: HumanEval, perplexity, bytes and speed.

Every arm is made from another one and written to a folder as a user would, then measured from that folder. Finished
folders, finished problems and finished figures are not made again. Records become the table of ``programs.md``.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace as changed_options
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from prunus.cli.answering import Answers, Chat, ask, chat_tokenizer, settings_of
from prunus.export.huggingface import load_model
from prunus.files.json_file import read_json, strict_json, write_json
from prunus.lab.profile.measure import bytes_held
from prunus.oneshot.forward import swapped
from prunus.ops.machine import device_of
from prunus.sparse.decoder import MOST_SEQUENCES
from prunus.sparse.load import load_packed
from prunus.trained.data import Windows, read_token_file, spread
from prunus.trained.problems import chat_prompt, read_problems
from prunus.trained.quality import held_out_of, metric_of
from prunus.trained.run_code import CONFINEMENT, check_confinement

from .benchmark import Row
from .bits_study import FORMS, PEERS, quantised, stored_bits
from .decode import PROMPT, decoder_of, step_times
from .repair_study import started, zeros
from .study import Learning, LearningStudy, SeedCase

WHAT = "programs"
KEPT = 10  # answers that a record keeps to look at
MOST_KEPT = 2000  # characters of each
BATCHES = (1, 8)  # texts at a time whose speed is measured


@dataclass(frozen=True)
class Arm:
    """A model: what it is made from, and by which of pruning, quantising and learning, in this order."""

    title: str
    base: str = ""
    way: str = ""  # of the study of repair, or shrink
    level: str = ""
    form: str = ""  # of few bits
    learns: bool = False
    has_teacher: bool = True
    goal: float | None = None  # of the dense model's pass@1


ARMS = {
    "dense": Arm("dense", goal=1.0),
    "control": Arm("dense, trained on by cross-entropy", "dense", learns=True, has_teacher=False, goal=1.0),
    "8": Arm("dense in 8 bits", "dense", form="8", goal=1.0),
    "4": Arm("dense in 4 bits", "dense", form="4", goal=1.0),
    "8-torchao": Arm("dense in 8 bits by torchao", "dense", form="8-torchao", goal=1.0),
    "4-torchao": Arm("dense in 4 bits by torchao", "dense", form="4-torchao", goal=1.0),
    "magnitude": Arm("50 %, magnitude", "dense", "magnitude", "50"),
    "wanda": Arm("50 %, WANDA", "dense", "wanda", "50"),
    "sparsegpt": Arm("50 %, SparseGPT", "dense", "sparsegpt", "50"),
    "repair": Arm("50 %, repaired", "dense", "repair", "50", goal=0.75),
    "recover": Arm("50 %, repaired and recovered", "repair", learns=True, goal=0.93),
    "repair-2of4": Arm("2:4, repaired", "dense", "repair", "2:4", goal=0.6),
    "recover-2of4": Arm("2:4, repaired and recovered", "repair-2of4", learns=True, goal=0.9),
    "repair-80": Arm("80 %, repaired", "dense", "repair", "80"),
    "recover-80": Arm("80 %, repaired and recovered", "repair-80", learns=True, goal=0.6),
    "recover-4": Arm("50 %, recovered, in 4 bits with recovered scales", "recover", form="4-scales", goal=0.9),
    "shrink": Arm("shrunk to 0.75", "dense", "shrink", "25"),
    "shrink-recover": Arm("shrunk to 0.75 and recovered", "shrink", learns=True, goal=0.8),
}
ArmName = Literal[tuple(ARMS)]  # pyrefly: ignore[invalid-literal]
MEASURES = ("pass@1", "python", "prose", "bytes", "speed")
MeasureName = Literal[tuple(MEASURES)]  # pyrefly: ignore[invalid-literal]


@dataclass(frozen=True, kw_only=True)
class ProgramsStudy(LearningStudy):
    """Make smaller models of one that writes programs, and measure how many problems each solves, its bytes and speed.

    The model is a Hugging Face folder or, with --gguf-file, the folder of a GGUF file; python -m benchmarks
    programs-text writes the tokens. The record is written after every figure, and the same command continues it.
    """

    what: ClassVar[str] = WHAT

    work: Path  # folder for the models that are made, and for answers
    problems: Path | None = None  # programming problems in HumanEval's form
    run_code: bool = False  # allow the programs that the models write to be run
    prose_tokens: Path | None = None  # held-out text, beside the held-out Python source of --eval-tokens
    arms: tuple[ArmName, ...] = tuple(name for name in ARMS if name != "repair-80")
    measures: tuple[MeasureName, ...] = MEASURES
    num_problems: int = 0  # spread evenly; 0: all
    max_new_tokens: int = 768  # of an answer
    speed_tokens: int = 72  # of a text whose speed is measured
    answer_batch: int = MOST_SEQUENCES  # problems answered at a time
    hard: float = 0.0  # weight of the cross-entropy beside the teacher
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the models that are measured
    seeds: tuple[int, ...] = (0,)  # of calibration samples and of the order of batches
    length: int = 512  # tokens of a window
    eval_windows: int = 256  # held-out windows that are evaluated
    steps: tuple[int, ...] = (720,)  # of learning; the most are taken
    batch: int = 32  # windows of a step

    def run(self) -> None:
        for measure, option in {"pass@1": "problems", "prose": "prose_tokens", "python": "eval_tokens"}.items():
            if measure in self.measures and getattr(self, option) is None:
                raise ValueError(f"to measure {measure}, give --{option.replace('_', '-')}")
        if not 1 <= self.answer_batch <= MOST_SEQUENCES:
            raise ValueError(f"--answer-batch must be 1 to {MOST_SEQUENCES}, got {self.answer_batch}")
        if "pass@1" in self.measures:
            if not self.run_code:
                how = f"runs programs that the models write, {CONFINEMENT}"
                raise ValueError(f"pass@1 {how}; add --run-code to allow it, or choose other --measures")
            if note := check_confinement():
                print(note, flush=True)
            read_problems(self._problems)
            chat_tokenizer(self.model, self.gguf_file)
        super().run()

    @property
    def _problems(self) -> Path:
        assert self.problems is not None
        return self.problems

    def settings(self) -> dict[str, Any]:
        learning = {"length": self.length, "steps": max(self.steps), "hard": self.hard, "dtype": self.dtype}
        asking = {"num_problems": self.num_problems, "max_new_tokens": self.max_new_tokens}
        return super().settings() | learning | asking

    def runs(self) -> dict[tuple[str, str], list[Learning]]:
        return {(arm, ""): [Learning(arm, each, self._steps(arm)) for each in self.measures] for arm in self.arms}

    def _steps(self, name: str) -> int:
        """Of learning, to this arm or to one that it is made from."""
        arm = ARMS[name]
        learns = arm.learns or (arm.form and FORMS[arm.form].learns)
        return max(self.steps) if learns else self._steps(arm.base) if arm.base else 0

    def rows(self, case: SeedCase, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        peer = FORMS[ARMS[start].form].peer if ARMS[start].form else ""
        if peer and runs and not find_spec(peer):
            print(f"{start}: left out, since the package {peer} is not installed", flush=True)
        elif runs:
            made = MadeArm(self, start, case.seed)
            for run in runs:
                began = time.perf_counter()
                figures = made.figures(run.level)
                took = {"seconds": time.perf_counter() - began}
                yield {"way": start, "level": run.level, "steps": run.steps, "metric": run.level} | figures | took

    def count(self, row: Row) -> str:
        return f"{row['zeros']:,} zeros"


@dataclass
class MadeArm:
    """An arm of one seed: its folder, and the model in it."""

    options: ProgramsStudy
    name: str
    seed: int

    @property
    def arm(self) -> Arm:
        return ARMS[self.name]

    @property
    def peer(self) -> str:
        """A package that quantises the model in memory, which has no folder of its own."""
        return FORMS[self.arm.form].peer if self.arm.form else ""

    def of(self, name: str) -> "MadeArm":
        return MadeArm(self.options, name, self.seed)

    @cached_property
    def folder(self) -> Path:
        """The folder in the small form; it is made unless it is there."""
        if self.peer:
            return self.of(self.arm.base).folder
        folder = self.options.work / f"{self.name}_seed{self.seed}"
        facts, part = folder.with_name(f"{folder.name}.json"), folder.with_name(f".{folder.name}")
        settings = {"model": str(self.options.model), **self.options.settings(), "batch": self.options.batch}
        learning = ("steps", "batch", "hard") if self.options._steps(self.name) else ()
        settings = {name: settings[name] for name in ("model", "samples", "length", "dtype", *learning)}
        if folder.is_dir():
            if (before := read_json(facts)["settings"]) != settings:
                raise ValueError(f"{folder} was made with {before}, not {settings}; give another --work")
            return folder
        print(f"{self.name}: is made", flush=True)
        shutil.rmtree(part, ignore_errors=True)
        made = self._make(part)
        write_json(facts, {"settings": settings, "made": made})
        part.rename(folder)
        return folder

    def _make(self, out: Path) -> Row:
        """Write the model; says what that took."""
        arm, options = self.arm, self.options
        if arm.base:
            options = changed_options(options, model=self.of(arm.base).folder, gguf_file=None)
        out.parent.mkdir(parents=True, exist_ok=True)
        case = SeedCase(options, self.seed)
        trained, form = case.trained, FORMS[arm.form] if arm.form else None
        learns, facts = arm.learns or bool(form and form.learns), Row()
        if learns and arm.has_teacher:
            case.dense = load_model(self.of("dense").folder, options.device).float()
        run = Learning(self.name, arm.level, max(options.steps))
        with ExitStack() as stack:
            if arm.way:
                _, took, _ = stack.enter_context(started(case, arm.way, arm.level))
                facts |= took
            if form:
                has_mask = zeros(trained.model)["zeros"] > 0
                _, facts["seconds"] = stack.enter_context(quantised(trained.model, trained.batches, form, has_mask))
            if learns:
                learning = case.recovered(trained.model, run, hard=options.hard, has_teacher=arm.has_teacher)
                facts |= stack.enter_context(learning).figures()
            dtype = getattr(torch, options.dtype)  # for a while: what was changed before can still be undone
            with swapped({parameter: parameter.data.to(dtype) for parameter in trained.model.parameters()}):
                trained.save(out, small=True)
        return facts

    @cached_property
    def model(self) -> Any:
        model = load_model(self.folder, device_of(self.options.device))
        return PEERS[self.peer](model, [], FORMS[self.arm.form]) if self.peer else model

    def figures(self, measure: str) -> Row:
        found = {"pass@1": self.solved, "bytes": self.bytes, "speed": self.speed}
        row = found[measure]() if measure in found else {"value": self.perplexity(measure)}
        return row | {"zeros": 0 if self.peer else zeros(self.model)["zeros"]}

    def perplexity(self, measure: str) -> float:
        options, path = self.options, {"python": self.options.eval_tokens, "prose": self.options.prose_tokens}[measure]
        assert path is not None
        windows = Windows(read_token_file(path, self.folder).ids, options.length, model=self.model)
        return metric_of(self.model, held_out_of(windows, options.eval_windows)[0])[1](self.model)

    def solved(self) -> Row:
        """The share of problems that it solves, why the others failed, and some answers to look at."""
        options, folder, form = self.options, self.folder, self.arm.form if self.peer else ""
        problems = read_problems(options._problems)
        problems = [problems[place] for place in spread(len(problems), options.num_problems)]
        path, most = options.work / f"{self.name}_seed{self.seed}.answers.jsonl", options.max_new_tokens
        answers = Answers(path, lambda: settings_of(folder, options._problems, most) | {"form": form})
        if left := [problem for problem in problems if problem.task_id not in answers.passed]:
            tokenizer = chat_tokenizer(folder, None)
            asked = [(problem, chat_prompt(tokenizer, problem)) for problem in left]
            ask(Chat(self.model, tokenizer, most), asked, answers, options.answer_batch)
        rows = {row["task_id"]: row for row in map(strict_json, path.read_text().splitlines()[1:])}
        mine = [rows[problem.task_id] for problem in problems]
        kept = [{**mine[place], "answer": mine[place]["answer"][:MOST_KEPT]} for place in spread(len(mine), KEPT)]
        num = sum(row["verdict"] == "passed" for row in mine)
        reasons = Counter(row["why"].partition(":")[0] for row in mine if row["why"])
        row = {"value": num / len(mine), "solved": num, "problems": len(mine), "answers": kept}
        return row | {"failures": dict(reasons.most_common())}

    def bytes(self) -> Row:
        """What the model takes on disk, and on the device in the form that runs.

        Our files hold codes of sparse weights alone, so what a dense model takes in few bits is counted.
        """
        device = device_of(self.options.device)
        if self.arm.form and self.arm.base == "dense":
            plain, grid = self.of("dense").model, FORMS[self.arm.form].grid
            stored = stored_bits(plain, has_mask=False, others=grid)
            rest = sum(p.nbytes for p in plain.parameters()) - stored["kept"] * next(plain.parameters()).itemsize
            disk, model = rest + (stored["code_bits"] + stored["scale_bits"]) // 8, self.model
        else:
            disk = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
            model = load_packed(self.folder, device)
        return {"value": disk, "memory": bytes_held([*model.parameters(), *model.buffers()], device)}

    def speed(self) -> Row:
        """Tokens a second by ``generate`` and by our decoder; the value is that of the decoder, for one text."""
        device, tokens = device_of(self.options.device), {}
        for batch in BATCHES:
            packed = None if self.peer else load_packed(self.folder, device, vectors=batch)
            for way, model in {"generate": self.model, "decoder": packed}.items():
                if model is not None:
                    tokens[f"{way} {batch}"] = batch / self._seconds_of_step(model, way, batch)
            decoder_of.cache_clear()
        return {"value": tokens.get("decoder 1", tokens["generate 1"]), "tokens_s": tokens}

    def _seconds_of_step(self, model: Any, way: str, batch: int) -> float:
        """Texts go on beyond their ends."""
        ids: Tensor = torch.randint(10, 200, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
        end, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
        try:
            return step_times({"": model}, way, ids.to(model.device), self.options.speed_tokens, 3)[""][2]
        finally:
            model.generation_config.eos_token_id = end
