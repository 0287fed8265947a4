"""What ``prunus prune`` works on: a trained model with samples, a measure of its quality and a way to write it back."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint import checkpoint_of, load_checkpoint, save_checkpoint
from .data.token_files import OPENERS, UINT16, read_tokens
from .evaluate import Quality, loss_of

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "chat_template*")


@dataclass(frozen=True)
class Subject:
    """``evaluate`` gives the metric on held-out data, ``save`` writes the model into an empty folder."""

    model: nn.Module
    batches: list[Any]
    evaluate: Callable[[nn.Module], float]
    save: Callable[[Path], None]
    loss: Callable[[Any, Any], Tensor] | None = None
    metric: str = "perplexity"


@dataclass(frozen=True)
class Request:
    """Which model and data; ``samples`` windows of ``length`` tokens are drawn by ``seed`` for calibration."""

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
    offload: bool = False  # the weights stay in main memory


def subject_of(request: Request) -> Subject:
    """The model that a folder of Hugging Face's, a checkpoint of ours, or ``module:function`` names."""
    if request.samples < 1:
        raise ValueError(f"samples must be at least 1, got {request.samples}")
    path = Path(request.model)
    if (path.is_dir() and (path / "config.json").is_file()) or request.gguf_file:
        return _hugging_face(request, path)
    if checkpoint_of(path).exists():
        return _checkpoint(request, checkpoint_of(path))
    if ":" in request.model:
        return _function(request.model)
    raise ValueError(
        f"{request.model} is neither a folder with config.json, nor a checkpoint of prunus, nor module:function"
    )


def _hugging_face(request: Request, folder: Path) -> Subject:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as missing:
        raise ValueError(f"reading {folder} takes transformers: pip install prunus[hf]") from missing
    if request.tokens is None or request.eval_tokens is None:
        raise ValueError("a model from a folder needs --tokens to calibrate and --eval-tokens to evaluate on")
    calibration, held_out = token_ids(request.tokens), token_ids(request.eval_tokens)
    from_gguf = {"gguf_file": request.gguf_file} if request.gguf_file else {"use_safetensors": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=request.dtype, local_files_only=True, **from_gguf)
    _forget_quantization(model)
    model.to("cpu" if request.offload else request.device).eval()
    check_vocabulary(request.tokens, calibration, model)
    check_vocabulary(request.eval_tokens, held_out, model)
    length = request.length or longest_window(model)
    drawn = _drawn(calibration, request.samples, length, request.seed)
    kept = side_by_side(held_out, length, request.eval_windows)
    return Subject(model, [drawn], lambda m: token_quality(m, kept).perplexity, lambda out: _save(model, folder, out))


def check_vocabulary(path: Path, tokens: np.ndarray, model: Any) -> None:
    largest = int(tokens.max(initial=0))
    if largest >= model.config.vocab_size:
        raise ValueError(f"{path} holds token {largest}, but the model knows {model.config.vocab_size}")


def longest_window(model: Any) -> int:
    """Tokens of a window where none are asked for."""
    return min(256, getattr(model.config, "max_position_embeddings", 256))


def token_ids(path: Path) -> np.ndarray:
    """Tokens of the model's own vocabulary; the bytes of a text would pass for some, silently."""
    if (path.with_suffix("") if path.suffix in OPENERS else path).suffix not in UINT16:
        raise ValueError(
            f"{path} is no file of uint16 tokens (.u16 or .bin); make one with the model's tokenizer: "
            "numpy.array(tokenizer.encode(text), '<u2').tofile('text.u16')"
        )
    return read_tokens(path)


def _forget_quantization(model: Any) -> None:
    """What was read from a quantised file is plain weights by now, and is to be moved and saved as such."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)


def _drawn(tokens: np.ndarray, num: int, length: int, seed: int) -> Tensor:
    """``num`` different windows (num, length), side by side in the file, chosen by ``seed``."""
    available = len(tokens) // length
    if available < num:
        raise ValueError(f"{num} windows of {length} tokens were asked for, but there are {available}; take fewer")
    chosen = np.random.default_rng(seed).permutation(available)[:num]
    return torch.from_numpy(np.stack([tokens[i * length : (i + 1) * length] for i in chosen]).astype(np.int64))


def side_by_side(tokens: np.ndarray, length: int, limit: int) -> Tensor:
    """The first windows (num, length), at most ``limit`` if there is one."""
    num = min(len(tokens) // length, limit or sys.maxsize)
    if num == 0:
        raise ValueError(f"the held-out file has {len(tokens)} tokens, fewer than a window of {length}")
    return torch.from_numpy(tokens[: num * length].reshape(num, length).astype(np.int64))


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


def _save(model: Any, source: Path, out: Path) -> None:
    """A folder that ``from_pretrained`` reads, with the tokenizer's files as they were."""
    model.save_pretrained(out)
    for pattern in TOKENIZER:
        for path in source.glob(pattern):
            if path.is_file() and not (out / path.name).exists():
                shutil.copy(path, out / path.name)


def _checkpoint(request: Request, path: Path) -> Subject:
    """A checkpoint of our own, calibrated on its training data and evaluated on what it held out."""
    from .run import Run
    from .trainer import Training

    if request.offload:
        raise ValueError(f"{path} is a checkpoint of prunus, which fits where it was trained; leave out --offload")
    state = load_checkpoint(path)
    run = replace(Run.from_json(state["run"]), compile=False, device=request.device, eval_size=request.eval_windows)
    training = Training(replace(run, score="none"))
    training.model.load_state_dict(state["model"])
    batch = training.data.train.batch(0, request.samples, request.seed)
    images = training.data.shape.kind == "images"

    def evaluate(model: nn.Module) -> float:
        quality = training.evaluate()
        return quality.accuracy if images else quality.perplexity

    def save(out: Path) -> None:
        save_checkpoint(out / "checkpoint.pt", state | {"model": training.model.state_dict()})

    metric = "accuracy" if images else "perplexity"
    return Subject(training.model, [batch], evaluate, save, loss_of, metric)


def _function(name: str) -> Subject:
    """What a user's function returns: a dict with model, batches, evaluate and, if it has no loss of its own, loss."""
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
    return Subject(model, list(found["batches"]), found["evaluate"], save, found.get("loss"), metric)
