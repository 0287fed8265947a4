"""Options that ``prunus prune`` and ``prunus shrink`` share: the model, its data, how the work runs, the output."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import tyro

from .shared_options import Flag, StartToken, TokenType, check_new_folder, number_of

if TYPE_CHECKING:
    from ..trained.model import ModelSource

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModelCommand(ABC):
    """A command that changes a trained model and writes it to a new folder."""

    name: ClassVar[str]  # after prunus

    model: tyro.conf.Positional[str]  # a Hugging Face folder, a .gguf file, a checkpoint of prunus, or module:function
    out: Path  # folder to write; it must not exist
    tokens: Path | None = None  # calibration tokens for a Hugging Face folder (.u16, .bin, .u32 or .npy)
    eval_tokens: Path | None = None  # held-out tokens for it; without any the last tenth of what calibrates
    text: Path | None = None  # in place of tokens: text file, or folder of them, read by the model's own tokenizer
    eval_text: Path | None = None  # held-out text file, or folder of them
    batches: Path | None = None  # in place of tokens: named arrays (.npz), a row a sample, with labels if there are any
    eval_batches: Path | None = None  # held-out arrays
    token_type: TokenType = "auto"  # of raw token files; auto goes by their names
    start_token: StartToken = "auto"  # open every window with it; auto: as the tokenizer does to text
    tune: Flag = False  # let every block, then the whole model, learn the outputs of the dense one; slow on a CPU
    recover: str | None = None  # then learn from the dense model over so many tokens (20M) of the text or tokens
    calibrate: Literal["tokens", "self"] = "tokens"  # self: on text that the model writes from its start token
    length: int = 0  # tokens per window; 0 takes 256, or the model's longest
    eval_windows: int | None = None  # held-out windows; 0 takes all, by default 128 of tokens; of a run as in training
    seed: int = 0  # which calibration windows
    batch: int = 0  # rows per pass; 0 takes what memory allows
    gguf_file: str | None = None  # file in the folder to read the weights from
    dtype: Dtype = "auto"  # auto keeps the model's own
    device: str = "cpu"  # cpu or cuda
    offload: bool = False  # keep the model in main memory, one block at a time on the device
    every_layer: Flag = False  # show every layer in the table at the end
    plot: Path | None = None  # .svg or .png file for the chart of the layers, which the folder has too
    push: str | None = None  # name on the Hugging Face Hub, as user/model, to upload the folder to
    private: Flag = False  # make that repository private, if it is new

    @property
    def unfinished(self) -> Path:
        """The folder for what is done until the result is in its place."""
        return self.out.with_name(f".{self.out.name}.unfinished")

    @property
    @abstractmethod
    def num_samples(self) -> dict[str, Any]:
        """Calibration windows, as ``ModelSource`` has them: a number, and whether fewer will do."""


def check_places(command: ModelCommand) -> None:
    """Refuse a chart that cannot be written, and a push that will not be possible."""
    if command.plot is not None:
        from ..plot import check_picture

        check_picture(command.plot)
    if command.private and command.push is None:
        raise ValueError("without --push nothing reads --private; leave it off")
    if command.push is not None:
        from ..export.hub import check_push

        check_push(command.push)


def check_model_options(command: ModelCommand) -> None:
    """Refuse a folder that is there, negative numbers, a recovery that cannot be, and a device that is not there."""
    check_new_folder(command.out)
    for name in ("length", "eval_windows", "batch"):
        if (getattr(command, name) or 0) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(command, name)}")
    if command.recover is not None:
        number_of(command.recover)
        if command.offload:
            raise ValueError(
                "--recover trains the whole model on the device; leave off --offload, and recover by itself"
            )
        if command.calibrate == "self":
            raise ValueError("--recover learns from text; give --text, --tokens or --batches, not --calibrate self")
    from ..ops.machine import device_of

    device_of(command.device)


def source_of(command: ModelCommand) -> "ModelSource":
    from ..trained.model import ModelSource

    known = {field.name: getattr(command, field.name) for field in fields(ModelSource) if hasattr(command, field.name)}
    known |= command.num_samples
    if command.recover is not None:
        from ..trained.data import TokenCache

        known["cache"] = TokenCache(command.unfinished, number_of(command.recover) * 10 // 9)
    return ModelSource(**known)
