"""A trained model on disk that ``prunus prune`` works on: its calibration samples, metric, and how to save it."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..export.convert import copy_beside
from ..export.huggingface import load_any_model, quiet_transformers, save_model
from ..files.reader import PLAIN
from ..files.sparse_file import in_memory
from ..files.writer import MAX_SHARD_BYTES, Saved, WritePlan, write
from ..oneshot.model_folder import Unfit, model_on_disk, save_from_disk
from ..ops.wide_products import wide_products
from .data import (
    Arrays,
    Rows,
    Samples,
    TokenCache,
    TokenFile,
    Windows,
    check_batches,
    drawn,
    read_batches,
    read_token_file,
    rows_of_tokens,
    split_rows,
    tokenizer_of,
    windows_of,
)
from .quality import held_out_of, metric_of
from .tokens import TOKEN_TYPES

STARTS = ("auto", "yes", "no")


@dataclass(frozen=True)
class TrainedModel:
    """``evaluate`` returns the metric on held-out data, ``save`` writes the model into an empty folder.

    With ``small=True``, ``save`` writes the small form and returns what became of each tensor.
    """

    model: nn.Module
    batches: list[Any]
    evaluate: Callable[[nn.Module], float]
    save: Callable[..., Saved | None]
    loss: Callable[[Any, Any], Tensor] | None = None
    metric: str = "perplexity"
    moments: Mapping[str, Tensor] = field(default_factory=dict)  # Adam's second ones by weight, where a run has them
    held_out: str = ""  # how many samples the metric is of, where that is known
    note: str | None = None  # what to say before anything is done
    samples: Samples | None = None  # all that there are to learn from
    evaluated: Tensor | Rows | None = None  # the samples that the metric is of


@dataclass(frozen=True)
class ModelSource:
    """Which model and data; ``samples`` windows of ``length`` tokens, drawn by ``seed``, are for calibration.

    They come from tokens, text or named arrays, ``batches``, and those to evaluate on from such files too; without
    these the last tenth of the first is held out. ``start_token`` says whether every window opens with the tokenizer's
    start token; auto does so for text, where the tokenizer adds one.
    """

    model: str
    tokens: Path | None = None
    eval_tokens: Path | None = None
    samples: int = 32
    length: int = 0  # 0 takes 256, or the longest that the model reads if that is less
    # 0 takes all, None 128 windows of tokens, all other samples, and of a run as many as in its training
    eval_windows: int | None = 0
    seed: int = 0
    gguf_file: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    offload: bool = False  # weights stay in main memory
    on_disk: bool = False  # the blocks of a Hugging Face folder are read one at a time, where that can be
    calibrate: str = "tokens"  # or self: on text that the model writes
    at_most: bool = False  # fewer samples will do where the file has no more
    text: Path | None = None
    eval_text: Path | None = None
    batches: Path | None = None
    eval_batches: Path | None = None
    token_type: str = "auto"  # of raw files: uint16, uint32; auto goes by the file's name
    start_token: str = "auto"  # or yes, or no
    cache: TokenCache | None = None  # of the tokens of ``text``
    max_shard_bytes: int = MAX_SHARD_BYTES  # of a file that is written


def load_trained(
    source: ModelSource, checkpoint: Callable[[ModelSource], TrainedModel | None] = lambda source: None
) -> TrainedModel:
    """The model in a Hugging Face folder, in a checkpoint, or returned by ``module:function``.

    ``checkpoint`` reads the checkpoints of a trainer, and returns None where there is none at the source.
    """
    if source.samples < 1:
        raise ValueError(f"samples must be at least 1, got {source.samples}")
    path = Path(source.model)
    if path.suffix == ".gguf" and path.is_file():
        source, path = replace(source, gguf_file=path.name), path.parent
    if (path.is_dir() and (path / "config.json").is_file()) or source.gguf_file:
        return _hugging_face(source, path)
    if trained := checkpoint(source):
        return trained
    if ":" in source.model:
        return _function(source.model)
    wrong = "" if path.exists() else ": there is no such file or folder"
    raise ValueError(
        f"{source.model} is neither a folder with config.json, nor a .gguf file, nor a checkpoint of prunus, nor "
        f"module:function{wrong}; download a Hub model first: hf download NAME --local-dir FOLDER"
    )


def _hugging_face(source: ModelSource, folder: Path) -> TrainedModel:
    _check_samples(source)
    read = read_batches(source.batches) if source.batches else _token_files(source, folder)
    alone = load_without_data(source, folder)
    model = alone.model
    learned, held_out = _windows(source, model, *read) if isinstance(read, tuple) else _rows(source, model, read)
    if learned is not None:
        calibration = drawn(learned, source.samples, source.seed, at_most=source.at_most)
    else:
        assert isinstance(held_out, Windows)
        calibration = rows_of_tokens(model, written_by(model, source.samples, held_out.length, source.seed))
    evaluated, words = held_out_of(held_out, source.eval_windows)
    metric, evaluate = metric_of(model, evaluated)
    notes = [alone.note] if alone.note else []
    notes += [note for file in read if file is not None for note in file.notes] if isinstance(read, tuple) else []
    note = "; ".join(dict.fromkeys(notes)) or None  # both parts of a split text have the same
    known = {"batches": [calibration], "evaluate": evaluate, "metric": metric, "held_out": words, "note": note}
    return replace(alone, samples=learned, evaluated=evaluated, **known)


def _check_samples(source: ModelSource) -> None:
    """Refuse files of two kinds, and none where they are needed."""
    first, second = (
        [name for name in ("tokens", "text", "batches") if getattr(source, prefix + name) is not None]
        for prefix in ("", "eval_")
    )
    is_written = source.calibrate == "self"
    if source.token_type not in ("auto", *TOKEN_TYPES) or source.start_token not in STARTS:
        raise ValueError(
            f"the token type must be auto or one of {', '.join(TOKEN_TYPES)}, the start token one of {STARTS}"
        )
    if is_written and first:
        raise ValueError(f"--calibrate self writes the calibration text; leave off --{first[0]}")
    if len(first) > 1 or len(second) > 1:
        doubled = [f"--{prefix}{name}" for prefix, names in (("", first), ("eval-", second)) for name in names]
        raise ValueError(f"samples must come from one kind of file, got {' and '.join(doubled)}")
    if not first and (not is_written or not second):
        raise ValueError(
            "a model from a folder needs samples: give --text with a file or a folder, --tokens or --batches; the last "
            "tenth is held out, unless --eval-text, --eval-tokens or --eval-batches gives other samples"
        )
    if is_written and "batches" in second:
        raise ValueError("--calibrate self writes text, so what is held out must be text, too: give --eval-text")
    if second and not is_written and ("batches" in first) != ("batches" in second):
        raise ValueError(f"--{first[0]} and --eval-{second[0]} are different kinds of samples; use the same kind")


def _token_files(source: ModelSource, folder: Path) -> tuple[TokenFile | None, TokenFile]:
    """Calibration and held-out tokens of a folder's model; the first is None where the model writes them."""

    def read(tokens: Path | None, text: Path | None) -> TokenFile | None:
        path = tokens or text
        if path is None:
            return None
        return read_token_file(path, folder, source.token_type, source.gguf_file, is_text=text is not None)

    if source.text is not None and source.cache is not None:
        calibration = source.cache.read(source.text, folder, source.gguf_file)
    else:
        calibration = read(source.tokens, source.text)
    if (held_out := read(source.eval_tokens, source.eval_text)) is not None:
        return calibration, held_out
    assert calibration is not None
    return calibration.split()


def load_without_data(source: ModelSource, folder: Path) -> TrainedModel:
    """The model of a Hugging Face folder, without samples to calibrate or measure it."""
    note = None
    if source.on_disk and not source.gguf_file:
        try:
            model = model_on_disk(folder, source.dtype)
            return TrainedModel(
                model,
                [],
                lambda model: math.nan,
                partial(save_from_disk, model, folder, max_shard_bytes=source.max_shard_bytes),
            )
        except Unfit as reason:
            note = f"{folder} is held in memory as a whole: {reason}"
    model = load_any_model(folder, source.dtype, source.gguf_file)
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):  # weights are plain now, and saved as such
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    model.to("cpu" if source.offload else source.device)
    save = partial(_save, model, folder, gguf_file=source.gguf_file, max_shard_bytes=source.max_shard_bytes)
    return TrainedModel(model, [], lambda model: math.nan, save, note=note)


def _windows(
    source: ModelSource, model: Any, calibration: TokenFile | None, held_out: TokenFile
) -> tuple[Windows | None, Windows]:
    """Windows of tokens to calibrate on and to learn from, unless the model writes them, and held-out ones."""
    files = [file for file in (calibration, held_out) if file is not None]
    *learned, evaluated = windows_of(files, model, source.length, source.start_token)
    return learned[0] if learned else None, evaluated


def _rows(source: ModelSource, model: Any, rows: Rows) -> tuple[Arrays, Arrays]:
    """Named arrays to calibrate on and to learn from, and held-out ones."""
    assert source.batches is not None
    rows = check_batches(source.batches, rows, model)
    if source.eval_batches is None:
        rows, held_out = split_rows(rows)
    else:
        held_out = check_batches(source.eval_batches, read_batches(source.eval_batches), model)
    return Arrays(rows), Arrays(held_out)


@torch.no_grad()
def written_by(model: Any, num: int, length: int, seed: int, size: int = 16) -> Tensor:
    """``num`` windows (num, length) that the model writes from its start token, drawn at temperature 1."""
    from transformers import GenerationConfig

    start = model.config.bos_token_id
    if start is None:
        raise ValueError("--calibrate self needs a start token, but the model's config has no bos_token_id")
    # no end token: a window goes on with the next text, as training data does
    how = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=length - 1, pad_token_id=start)
    device, windows = next(model.parameters()).device, []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for first in range(0, num, size):
            begin = torch.full((min(size, num - first), 1), start, device=device)
            with wide_products(begin.device, model):
                written = model.generate(begin, attention_mask=torch.ones_like(begin), generation_config=how)
            windows.append(written.cpu())
    return torch.cat(windows)


def _save(
    model: Any,
    folder: Path,
    out: Path,
    gguf_file: str | None = None,
    *,
    small: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Saved | None:
    """A folder that ``from_pretrained`` reads, with the small files beside the model; GGUF holds its own tokenizer."""
    beside = folder if not gguf_file or (folder / "config.json").is_file() else None
    saved = save_small(model, out, beside, max_shard_bytes) if small else _save_pretrained(model, out, max_shard_bytes)
    if gguf_file and (tokenizer := tokenizer_of(folder, gguf_file)):
        tokenizer.save_pretrained(out)
    if beside is not None:
        copy_beside(beside, out)
    return saved


def save_small(
    model: nn.Module, out: Path, source: Path | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Saved:
    """``save_model`` that leaves it to its caller to say what loads a model of another library."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="load_model only loads transformers models")
        return save_model(model, out, source=source, max_shard_bytes=max_shard_bytes)


def _save_pretrained(model: Any, out: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    try:
        with quiet_transformers():
            model.save_pretrained(out, max_shard_size=max_shard_bytes)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"the model cannot be written: {error}") from error


def _function(name: str) -> TrainedModel:
    """The dict that a user's function returns: model, batches, evaluate, and loss if the model has none of its own."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        returned = getattr(import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import the function {name}: {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(returned, Mapping) or not {"model", "batches", "evaluate"} <= set(returned):
        raise ValueError(f"{name} must return a dict with model, batches and evaluate, and loss if it needs one")
    model, note = returned["model"], None
    if hasattr(model, "save_pretrained"):
        save_plain: Callable[[Path], None] = partial(_save_pretrained, model)
    else:
        note = (
            f"{name} is no model of transformers: the folder will hold its weights alone, which "
            "prunus export, prunus doctor and load_state_dict read; prunus eval cannot: it does not know the class"
        )

        def save_plain(out: Path) -> None:
            write(in_memory(model.state_dict(), {"format": "pt"}), WritePlan(out / PLAIN, small=False))

    def save(out: Path, *, small: bool = False) -> Saved | None:
        return save_small(model, out) if small else save_plain(out)

    metric = returned.get("metric", "metric")
    return TrainedModel(
        model, list(returned["batches"]), returned["evaluate"], save, returned.get("loss"), metric, note=note
    )
