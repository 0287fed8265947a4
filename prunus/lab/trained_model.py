"""A trained model on disk that ``prunus prune`` works on: its calibration samples, metric, and how to save it."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..export.huggingface import load_causal_model
from .checkpoint import checkpoint_of, load_checkpoint, save_checkpoint
from .data.datasets import OPENERS, UINT16, read_tokens
from .evaluate import Quality, loss_of

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "chat_template*")


@dataclass(frozen=True)
class TrainedModel:
    """``evaluate`` returns the metric on held-out data, ``save`` writes the model into an empty folder."""

    model: nn.Module
    batches: list[Any]
    evaluate: Callable[[nn.Module], float]
    save: Callable[[Path], None]
    loss: Callable[[Any, Any], Tensor] | None = None
    metric: str = "perplexity"
    moments: Mapping[str, Tensor] = field(default_factory=dict)  # Adam's second ones by weight, where a run has them


@dataclass(frozen=True)
class ModelSource:
    """Which model and data; ``samples`` windows of ``length`` tokens, drawn by ``seed``, are for calibration."""

    model: str
    tokens: Path | None = None
    eval_tokens: Path | None = None
    samples: int = 32
    length: int = 0  # 0 takes 256, or the longest that the model reads if that is less
    eval_windows: int = 0  # 0 takes all
    seed: int = 0
    gguf_file: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    offload: bool = False  # weights stay in main memory
    calibrate: str = "tokens"  # or self: on text that the model writes
    at_most: bool = False  # fewer samples will do where the file has no more


def load_trained(source: ModelSource) -> TrainedModel:
    """The model in a Hugging Face folder, in a checkpoint of prunus, or returned by ``module:function``."""
    if source.samples < 1:
        raise ValueError(f"samples must be at least 1, got {source.samples}")
    path = Path(source.model)
    if (path.is_dir() and (path / "config.json").is_file()) or source.gguf_file:
        return _hugging_face(source, path)
    if checkpoint_of(path).exists():
        return _checkpoint(source, checkpoint_of(path))
    if ":" in source.model:
        return _function(source.model)
    raise ValueError(
        f"{source.model} is neither a folder with config.json, nor a checkpoint of prunus, nor module:function"
    )


def _hugging_face(source: ModelSource, folder: Path) -> TrainedModel:
    is_own = source.calibrate == "self"
    if (source.tokens is None and not is_own) or source.eval_tokens is None:
        raise ValueError("a model from a folder needs --tokens to calibrate and --eval-tokens to evaluate on")
    if source.tokens is not None and is_own:
        raise ValueError("--calibrate self writes the calibration text; leave off --tokens")
    calibration = None if source.tokens is None else tokens_of(source.tokens, folder)
    held_out = tokens_of(source.eval_tokens, folder)
    model = load_causal_model(folder, source.dtype, source.gguf_file)
    _forget_quantization(model)
    model.to("cpu" if source.offload else source.device)
    check_vocabulary(source.eval_tokens, held_out, model)
    length = source.length or longest_window(model)
    if calibration is None or source.tokens is None:
        drawn = written_by(model, source.samples, length, source.seed)
    else:
        check_vocabulary(source.tokens, calibration, model)
        num = min(source.samples, max(1, len(calibration) // length)) if source.at_most else source.samples
        drawn = _drawn(calibration, num, length, source.seed)
    kept = side_by_side(held_out, length, source.eval_windows)

    def evaluate(model: nn.Module) -> float:
        return token_quality(model, kept).perplexity

    return TrainedModel(model, [drawn], evaluate, lambda out: _save(model, folder, out))


def check_vocabulary(path: Path, tokens: np.ndarray, model: Any) -> None:
    largest, known = int(tokens.max(initial=0)), getattr(model.config, "vocab_size", 0)
    if not isinstance(known, int) or largest >= known:
        raise ValueError(f"{path} holds token {largest}, but the model knows {known}")


def longest_window(model: Any) -> int:
    """Default number of tokens in a window."""
    return min(256, getattr(model.config, "max_position_embeddings", None) or 256)


def token_ids(path: Path) -> np.ndarray:
    """Tokens of the model's own vocabulary; a text file is refused, since its bytes would pass for tokens."""
    if (path.with_suffix("") if path.suffix in OPENERS else path).suffix not in UINT16:
        raise ValueError(
            f"{path} is no file of uint16 tokens (.u16 or .bin); make one with the model's tokenizer: "
            "numpy.array(tokenizer.encode(text), '<u2').tofile('text.u16')"
        )
    return read_tokens(path)


def tokens_of(path: Path, folder: Path) -> np.ndarray:
    """Tokens of a token file, or of a text by the tokenizer in the model's folder, if it has one."""
    if path.suffix in (".txt", ".md") and path.is_file():
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception:  # whatever keeps a tokenizer from being read, the message below says what to do
            return token_ids(path)
        return np.array(tokenizer.encode(path.read_text(encoding="utf-8")), dtype=np.int64)
    return token_ids(path)


@torch.no_grad()
def written_by(model: Any, num: int, length: int, seed: int, size: int = 16) -> Tensor:
    """``num`` windows (num, length) that the model writes from its start token, drawn at temperature 1."""
    from transformers import GenerationConfig

    start = model.config.bos_token_id
    if start is None:
        raise ValueError("--calibrate self begins with the start token, but the model's config has no bos_token_id")
    # no end token: a window goes on with the next text, as training data does
    how = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=length - 1, pad_token_id=start)
    device, found = next(model.parameters()).device, []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for first in range(0, num, size):
            begin = torch.full((min(size, num - first), 1), start, device=device)
            written = model.generate(begin, attention_mask=torch.ones_like(begin), generation_config=how)
            found.append(written.cpu())
    return torch.cat(found)


def _forget_quantization(model: Any) -> None:
    """Drop the marks of a quantised file: its weights are plain now, and are moved and saved as such."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)


def _drawn(tokens: np.ndarray, num: int, length: int, seed: int) -> Tensor:
    """``num`` different windows (num, length) that do not overlap, chosen by ``seed``."""
    available = len(tokens) // _checked_length(length)
    if available < num:
        raise ValueError(f"{num} windows of {length} tokens were asked for, but there are {available}; take fewer")
    chosen = np.random.default_rng(seed).permutation(available)[:num]
    return torch.from_numpy(np.stack([tokens[i * length : (i + 1) * length] for i in chosen]).astype(np.int64))


def side_by_side(tokens: np.ndarray, length: int, limit: int) -> Tensor:
    """The first windows (num, length), at most ``limit`` unless that is 0."""
    num = min(len(tokens) // _checked_length(length), limit or sys.maxsize)
    if num == 0:
        raise ValueError(f"the held-out file has {len(tokens)} tokens, fewer than a window of {length}")
    return torch.from_numpy(tokens[: num * length].reshape(num, length).astype(np.int64))


def _checked_length(length: int) -> int:
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, the second to be predicted, got {length}")
    return length


@torch.no_grad()
def token_quality(model: nn.Module, windows: Tensor, size: int = 8) -> Quality:
    """Quality at every token but the first of each window."""
    device, loss, right, mode = next(model.parameters()).device, 0.0, 0, model.training
    model.eval()
    for batch in windows.split(size):
        batch = batch.to(device)
        logits, targets = model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        loss += F.cross_entropy(logits.float(), targets, reduction="sum").double().item()
        right += int((logits.argmax(-1) == targets).sum())
    model.train(mode)
    num = windows.shape[0] * (windows.shape[1] - 1)
    return Quality(loss / num, right / num)


def _save(model: Any, folder: Path, out: Path) -> None:
    """A folder that ``from_pretrained`` reads, with the tokenizer's files as they were."""
    model.save_pretrained(out)
    for pattern in TOKENIZER:
        for path in folder.glob(pattern):
            if path.is_file() and not (out / path.name).exists():
                shutil.copy(path, out / path.name)


def _checkpoint(source: ModelSource, path: Path) -> TrainedModel:
    """A checkpoint of prunus, calibrated on its training data and evaluated on its held-out data."""
    from .run import Run
    from .trainer import Training

    if source.offload:
        raise ValueError(f"{path} is a checkpoint of prunus, which is loaded whole; leave out --offload")
    state = load_checkpoint(path)
    run = replace(Run.from_json(state["run"]), compile=False, device=source.device, eval_size=source.eval_windows)
    training = Training(replace(run, score="none"))
    training.load_weights(state["model"])
    batch = training.data.train.batch(0, source.samples, source.seed)
    images = training.data.shape.kind == "images"

    def evaluate(model: nn.Module) -> float:
        quality = training.evaluate()
        return quality.accuracy if images else quality.perplexity

    def save(out: Path) -> None:
        save_checkpoint(out / "checkpoint.pt", state | {"model": training.model.state_dict()})

    metric = "accuracy" if images else "perplexity"
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    order = [names[parameter] for group in training.optimizer.param_groups for parameter in group["params"]]
    rows = state["optimizer"]["state"].items()
    moments = {order[i]: row["exp_avg_sq"] for i, row in rows if "exp_avg_sq" in row}
    return TrainedModel(training.model, [batch], evaluate, save, loss_of, metric, moments)


def _function(name: str) -> TrainedModel:
    """The dict that a user's function returns: model, batches, evaluate, and loss if the model has none of its own."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} names no function that can be imported: {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(found, Mapping) or not {"model", "batches", "evaluate"} <= set(found):
        raise ValueError(f"{name} must return a dict with model, batches and evaluate, and loss where it needs one")
    model = found["model"]

    def save(out: Path) -> None:
        torch.save(model.state_dict(), out / "model.pt")

    metric = found.get("metric", "metric")
    return TrainedModel(model, list(found["batches"]), found["evaluate"], save, found.get("loss"), metric)
