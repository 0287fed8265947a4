"""Options that ``prunus prune`` and ``prunus shrink`` share: the model, its data, how the work runs, the output."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from .shared_options import Flag, StartToken, TokenType

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModelCommand:
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
    max_shard_size: str = "5GB"  # largest file, as a number with B, KB, MB or GB; larger models take several
    private: Flag = False  # make that repository private, if it is new

    @property
    def unfinished(self) -> Path:
        """The folder for what is done until the result is in its place."""
        return self.out.with_name(f".{self.out.name}.unfinished")

    @property
    def needs_whole(self) -> str | None:
        """The option for which the whole model must be in memory, if there is one."""
        known = {
            "--tune": self.tune,
            "--recover": self.recover is not None,
            "--calibrate self": self.calibrate == "self",
        }
        return next((option for option, is_given in known.items() if is_given), None)

    @property
    def on_disk(self) -> bool:
        """Whether a Hugging Face folder is read block by block."""
        return self.needs_whole is None and self.gguf_file is None

    @property
    def most_samples(self) -> int:
        """Calibration windows where no number is given; fewer will do."""
        return 128

    def check(self) -> None:
        """Refuse options that make no sense before anything is loaded."""
