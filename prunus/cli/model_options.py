"""Options that ``prunus prune`` and ``prunus shrink`` share: the model, its data, how the work runs, the output."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from .shared_options import Flag, StartToken, TokenType, given

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModelCommand:
    """A command that changes a trained model and writes it to a new folder."""

    name: ClassVar[str]  # after prunus

    model: tyro.conf.Positional[str]  # Hugging Face folder, .gguf file, checkpoint of prunus train, or module:function
    out: Path  # new folder to write
    tokens: Path | None = None  # calibration token ids, instead of --text: a .u16, .bin, .u32 or .npy file
    eval_tokens: Path | None = None  # held-out token ids; by default the last tenth of the calibration data
    text: Path | None = None  # calibration text: a file or a folder, which the model's tokenizer reads
    eval_text: Path | None = None  # held-out text file or folder
    batches: Path | None = None  # .npz file of named inputs (and labels), one row per sample, instead of --text
    eval_batches: Path | None = None  # held-out .npz file
    token_type: TokenType = "auto"  # type of raw token files; auto: uint32 for .u32, else uint16
    start_token: StartToken = "auto"  # begin windows with the start token; auto: for text, if the tokenizer adds it
    tune: Flag = False  # train each block, then the whole model, to match the dense outputs; slow on a CPU
    recover: str | None = None  # then train to match the dense model on this many tokens or samples, such as 20M
    hard: float = 0.0  # with --recover: weight of the data's cross-entropy, added to the teacher loss
    calibrate: Literal["tokens", "self"] = "tokens"  # self: calibrate on text that the model generates, not on files
    length: int = 0  # tokens per window; 0: 256, at most the model's maximum
    eval_windows: int | None = None  # how many held-out windows; 0: all; default: 128, all of --batches, or as trained
    seed: int = 0  # seed for choosing calibration windows
    batch: int = 0  # samples per pass; 0: as many as memory allows
    gguf_file: str | None = None  # .gguf file in the folder to read weights from
    dtype: Dtype = "auto"  # data type of the weights; auto: the model's own
    device: str = "cpu"  # cpu, cuda or cuda:N
    offload: bool = False  # keep the model in main memory, one block at a time on the device
    every_layer: Flag = False  # show every layer in the final table
    plot: Path | None = None  # save the chart of the layers here too (.svg or .png)
    push: str | None = None  # upload the folder to this Hugging Face Hub repository (user/model)
    max_shard_size: str = "5GB"  # largest file, in B, KB, MB or GB; larger models are split
    private: Flag = False  # make a new --push repository private

    @property
    def unfinished(self) -> Path:
        """The folder for what is done until the result is in its place."""
        return self.out.with_name(f".{self.out.name}.unfinished")

    @property
    def needs_whole(self) -> str | None:
        known = {
            "--tune": self.tune,
            "--recover": self.recover is not None,
            "--calibrate self": self.calibrate == "self",
        }
        return next((option for option, is_given in known.items() if is_given), None)

    @property
    def on_disk(self) -> bool:
        return self.needs_whole is None and self.gguf_file is None

    @property
    def most_samples(self) -> int:
        """Calibration windows where no number is given; fewer will do."""
        return 128

    def check(self) -> None:
        """Refuse options that make no sense before anything is loaded."""
        for flag in given(self, "hard") if self.recover is None else ():
            raise ValueError(f"without --recover nothing reads {flag}; leave it off")
