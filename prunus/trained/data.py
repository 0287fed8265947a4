"""Samples for a trained model: windows of tokens or of text, or named arrays, to calibrate and to evaluate on."""

import hashlib
import inspect
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..files.regular import check_regular_files
from . import tokens as token_files
from .corpus import stamps
from .text import read_text, write_tokens
from .tokens import TOKEN_TYPES, read_tokens, suffix_of

Rows = dict[str, Tensor]  # arguments of a model's forward, one row a sample
TEXT = (".txt", ".md")
HELD_OUT = 10  # without a file of its own every so many-th part is held out, the last


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a file, and those that its tokenizer puts before every text."""

    path: Path
    ids: np.ndarray
    start: Sequence[int] = ()
    notes: Sequence[str] = ()  # what of a text was not read

    def split(self) -> "tuple[TokenFile, TokenFile]":
        edge = len(self.ids) - len(self.ids) // HELD_OUT
        return replace(self, ids=self.ids[:edge]), replace(self, ids=self.ids[edge:])


@dataclass(frozen=True)
class TokenCache:
    """Files for the tokens of texts that are too long for memory, at most about ``most`` of them."""

    folder: Path
    most: int

    def read(self, text: Path, folder: Path, gguf_file: str | None) -> TokenFile:
        """The tokens, which are written unless they are there; of a text that changed they are others."""
        tokenizer = text_tokenizer(text, folder, gguf_file)
        about = str(text.resolve()), stamps(text), self.most, len(tokenizer)
        known = hashlib.sha256(repr(about).encode()).hexdigest()
        path = self.folder / f"tokens-{known[:16]}.u32"
        notes = [] if path.is_file() else write_tokens(text, tokenizer, path, self.most)
        return TokenFile(text, read_tokens(path), start_of(tokenizer), notes)


def read_token_file(
    path: Path, folder: Path, token_type: str = "auto", gguf_file: str | None = None, *, is_text: bool = False
) -> TokenFile:
    if not is_text and suffix_of(path) in {".npy", *(name for names in TOKEN_TYPES.values() for name in names)}:
        return TokenFile(path, read_tokens(path, token_type))
    if is_text:
        tokenizer = text_tokenizer(path, folder, gguf_file)
    elif path.suffix not in TEXT or not path.is_file() or (tokenizer := tokenizer_of(folder, gguf_file)) is None:
        raise ValueError(  # its bytes would pass for tokens
            f"{path} is not a file of uint16 tokens (.u16 or .bin), uint32 tokens (.u32) or .npy; if the folder has a "
            "tokenizer, give text with --text, or make such a file: numpy.array(tokenizer.encode(text), "
            "'<u4').tofile('a.u32')"
        )
    ids, notes = read_text(path, tokenizer)
    return TokenFile(path, ids, start_of(tokenizer), notes)


def text_tokenizer(text: Path, folder: Path, gguf_file: str | None) -> Any:
    if (tokenizer := tokenizer_of(folder, gguf_file)) is None:
        problem = f"{folder} has no tokenizer that transformers reads"
        raise ValueError(f"{problem}; make tokens of {text} yourself, and give them with --tokens")
    return tokenizer


def start_of(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: its start token, if it adds one."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    return whole[: len(whole) - len(bare)][:1] if bare and whole[0] != bare[0] else []


def folder_and_file(path: Path) -> tuple[Path, str | None]:
    """The folder of a model, and the GGUF file in it if the path is one."""
    return (path.parent, path.name) if path.suffix == ".gguf" and path.is_file() else (path, None)


def tokenizer_of(folder: Path, gguf_file: str | None = None) -> Any | None:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(f"the tokenizer of {folder} needs transformers: pip install prunus[hf]") from None
    options = {"gguf_file": gguf_file} if gguf_file else {}
    check_regular_files(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception:  # whatever keeps a tokenizer from being read, the message of the caller says what to do
        return None


def start_tokens(choice: str, files: Sequence[TokenFile], model: Any) -> list[int]:
    if choice == "no":
        return []
    added = next((list(file.start) for file in files if file.start), [])
    if choice == "yes" and not added:
        known = getattr(text_config(model), "bos_token_id", None)
        if not isinstance(known, int):
            raise ValueError("--start-token yes: neither the tokenizer nor the model's config has a start token")
        return [known]
    return added


def check_vocabulary(file: TokenFile, model: Any) -> None:
    """ValueError for a model that reads no tokens, or does not know one of the file."""
    if not reads_tokens(model):
        raise ValueError(f"{type(model).__name__} reads {model.main_input_name}, not tokens: give --batches (.npz)")
    largest, known = int(file.ids.max(initial=0)), getattr(text_config(model), "vocab_size", 0)
    if not isinstance(known, int) or largest >= known:
        raise ValueError(f"{file.path} holds token {largest}, but the model's vocabulary has {known}")


def text_config(model: Any) -> Any:
    """The part of a configuration that says how text is read: of an image and text model that of its language model."""
    return model.config.get_text_config()


def longest_window(model: Any) -> int:
    return min(256, getattr(text_config(model), "max_position_embeddings", None) or 256)


def is_causal(model: Any) -> bool:
    return reads_tokens(model) and model.can_generate() and not model.config.is_encoder_decoder


def reads_tokens(model: Any) -> bool:
    return model.main_input_name == "input_ids"


def rows_of_tokens(model: Any, windows: Tensor) -> Tensor | Rows:
    """Windows as the model reads them; an encoder reads their first half, and its decoder predicts the second."""
    if is_causal(model):
        return windows
    if not model.config.is_encoder_decoder or "labels" not in inspect.signature(model.forward).parameters:
        return {"input_ids": windows}
    half = windows.shape[1] // 2
    return {"input_ids": windows[:, :half].contiguous(), "labels": windows[:, half:].contiguous()}


@dataclass(frozen=True)
class Windows:
    """Windows of ``length`` tokens, side by side in ``ids``; each begins with the tokens ``start``."""

    unit: ClassVar[str] = "windows"
    ids: np.ndarray
    length: int
    start: Sequence[int] = ()
    model: Any = None  # that reads them in its own way

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"a window needs at least 2 tokens, the second to be predicted, got {self.length}")

    def __str__(self) -> str:
        return f"windows of {self.length} tokens"

    def __len__(self) -> int:
        return len(self.ids) // (self.length - len(self.start))

    def of_length(self, length: int) -> "Windows":
        return replace(self, length=length)

    def at(self, places: np.ndarray) -> Tensor | Rows:
        step = self.length - len(self.start)
        windows = np.empty((len(places), self.length), np.int64)
        windows[:, : len(self.start)] = self.start
        windows[:, len(self.start) :] = self.ids[: len(self) * step].reshape(-1, step)[places]
        tokens = torch.from_numpy(windows)
        return tokens if self.model is None else rows_of_tokens(self.model, tokens)


@dataclass(frozen=True)
class Arrays:
    """Named arrays, one row a sample."""

    unit: ClassVar[str] = "samples"
    rows: Rows

    def __str__(self) -> str:
        return "samples"

    def __len__(self) -> int:
        return num_rows(self.rows)

    def of_length(self, length: int) -> "Arrays":
        return self

    def at(self, places: np.ndarray) -> Rows:
        return {name: array[torch.from_numpy(places)] for name, array in self.rows.items()}


Samples = Windows | Arrays


def windows_of(files: Sequence[TokenFile], model: Any, length: int, start_token: str) -> list[Windows]:
    """The windows of each file, which are alike: of ``length`` tokens, 0 takes the usual number, behind one start."""
    for file in reversed(files):
        check_vocabulary(file, model)
    longest = getattr(text_config(model), "max_position_embeddings", None) or length
    if length > longest:
        raise ValueError(f"--length {length} is more than the {longest} tokens that the model reads; choose less")
    start = start_tokens(start_token, files, model)
    return [Windows(file.ids, length or longest_window(model), start, model) for file in files]


def drawn(samples: Samples, num: int, seed: int, *, at_most: bool = False) -> Tensor | Rows:
    """``num`` different samples, chosen by ``seed``; fewer with ``at_most``."""
    if isinstance(samples, Windows) and not len(samples):
        few = f"a window has {samples.length} tokens, but there are only {len(samples.ids)}"
        raise ValueError(f"{few}; give more text, or a smaller --length")
    if len(samples) < num and not at_most:
        raise ValueError(f"{num} {samples} requested, but there are {len(samples)}; take fewer")
    return samples.at(np.random.default_rng(seed).permutation(len(samples))[:num])


def spread(total: int, limit: int) -> np.ndarray:
    """Places of at most ``limit`` samples (0: all): middles of equal parts, as the first may be of one chapter."""
    num = min(total, limit or total)
    return (2 * np.arange(num) + 1) * total // (2 * max(1, num))


def read_batches(path: Path) -> Rows:
    """The named arrays of an .npz file, one row a sample; floats are float32."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --batches takes an .npz file of named arrays")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > max(token_files.MAX_READ, 2 * path.stat().st_size):  # half a megabyte may unpack to any size
            raise ValueError(f"it unpacks to {unpacked / 2**20:,.0f} MiB, more than may be read into memory")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if odd := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"its member {odd[0]!r} is not an array")
    except (Exception, MemoryError) as error:  # numpy and zipfile have many for a damaged file
        raise ValueError(f"{path} is not an .npz file of named arrays ({error}); write one with numpy.savez") from error
    counts = {name: array.shape[:1] for name, array in arrays.items()}
    if not arrays or len(set(counts.values())) > 1 or counts.popitem()[1] in ((), (0,)):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"{path}: every array needs one row per sample, got {shapes or 'no arrays'}")
    if odd := [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]:
        raise ValueError(f"{path}: arrays must hold numbers, but {odd[0]} is {arrays[odd[0]].dtype}")
    kinds = {"f": np.float32, "b": np.bool_}
    return {name: torch.from_numpy(a.astype(kinds.get(a.dtype.kind, np.int64))) for name, a in arrays.items()}


def check_batches(path: Path, rows: Rows, model: Any) -> Rows:
    """The arrays, their floats in the model's own type; ValueError for one that the model does not take."""
    known = set(inspect.signature(model.forward).parameters)
    if unknown := sorted(set(rows) - known):
        takes = ", ".join(sorted(known & {model.main_input_name, "attention_mask", "labels", "decoder_input_ids"}))
        raise ValueError(f"{path} holds {unknown[0]!r}, which {type(model).__name__} does not take; it takes {takes}")
    return {name: rows[name].to(model.dtype) if rows[name].is_floating_point() else rows[name] for name in rows}


def num_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def split_rows(rows: Rows) -> tuple[Rows, Rows]:
    """All but the last tenth, at least one row, and that."""
    num = num_rows(rows)
    if num < 2:
        raise ValueError("one sample is not enough to calibrate and evaluate on; give more, or --eval-batches")
    edge = num - max(1, num // HELD_OUT)
    return {name: a[:edge] for name, a in rows.items()}, {name: a[edge:] for name, a in rows.items()}


@dataclass(frozen=True)
class TrainingBatches(Sequence[Any]):
    """Every sample once, ``size`` a batch, in the order of ``seed``; what is left over is left out."""

    samples: Samples
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.samples) < self.size:
            few = f"there are {len(self.samples)} {self.samples}, fewer than a batch of {self.size}"
            raise ValueError(f"{few}; give more data")

    def __len__(self) -> int:
        return len(self.samples) // self.size

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.samples.at(self.order[number * self.size : (number + 1) * self.size])

    @cached_property
    def order(self) -> np.ndarray:
        return np.random.default_rng(self.seed).permutation(len(self.samples))


def in_batches(samples: Tensor | Rows, size: int) -> list[Any]:
    if isinstance(samples, Tensor):
        return list(samples.split(size))
    firsts = range(0, num_rows(samples), size)
    return [{name: array[first : first + size] for name, array in samples.items()} for first in firsts]
