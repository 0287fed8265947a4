"""The steps of the decoder for one batch size and length: cache, tokens and masks, and on CUDA graphs of the steps."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .attention import shared_heads
from .compiled import CompiledBlocks

MOST_VECTORS = 1024  # above it the GPU is busy for longer than the host takes to launch, and a graph keeps much memory


class DecoderState:
    """Everything that a step reads and writes, at addresses that stay, and on CUDA the step as a graph."""

    def __init__(self, model: Any, generator: torch.Generator, key: tuple, compile: bool = False) -> None:
        self.forward, self.compile = model, compile
        batch, length, self.sampling, eos, self.pad = key
        self.model, self.generator, self.device = model, generator, generator.device
        self.cache = static_cache(model, length)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.positions, self.written = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens[0])
        self.mask = torch.ones(batch, length, dtype=torch.int64, device=self.device)
        self.text = torch.zeros(batch, length, dtype=torch.int64, device=self.device)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.ends = torch.tensor(eos, dtype=torch.int64, device=self.device)
        self.num_written = 0
        self.graph: Any = None
        self.is_graphed = self.device.type == "cuda"
        self.prompt = PromptGraph()

    def start(self, ids: Tensor, mask: Tensor) -> None:
        """Read the prompt in one call, and write the first token."""
        self.cache.reset()
        self.mask.fill_(1)
        self.mask[:, : ids.shape[1]] = mask
        self.finished.fill_(False)
        self.written.fill_(0)
        self.num_written = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs = ids, positions, mask
        try:
            logits = self.prompt(self._read, *inputs) if self.is_graphed else self._read(*inputs)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            name, reason = type(self.model).__name__, " ".join(str(error).split())[:200]
            raise ValueError(f"{name} does not run with a static cache ({reason}): use model.generate") from error
        self._write(logits)
        self.positions.copy_(positions[:, -1:] + 1)

    def advance(self) -> None:
        self.num_written += 1
        if self.compile and self.forward is self.model:
            self._compile()
        if not self.is_graphed:
            self._step()
            return
        if self.graph is None:
            self._capture()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def result(self, ids: Tensor) -> Tensor:
        """Prompt and text, up to where the last sequence ended."""
        text = self.text[:, : self.num_written]
        if len(self.ends):
            is_end = torch.isin(text, self.ends)
            lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, text.shape[1])
            text = text[:, : int(lengths.max())]
        with torch.inference_mode(False):  # a model can be trained on what is returned
            return torch.cat([ids, text], 1)

    def _step(self) -> None:
        self._write(self._logits(self.forward, self.tokens, self.positions, self.mask))
        self.positions.add_(1)

    def _read(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        return self._logits(self.model, ids, positions, mask, is_first_iteration=True, **options)

    def _logits(self, forward: Any, ids: Tensor, positions: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """Logits (batch, vocabulary) of the next token."""
        inputs = self.model.prepare_inputs_for_generation(
            ids, past_key_values=self.cache, attention_mask=mask, position_ids=positions, use_cache=True, **options
        )
        return forward(**inputs, return_dict=True).logits[:, -1]

    def _write(self, logits: Tensor) -> None:
        tokens = self.sampling(logits, self.generator)
        if len(self.ends):
            tokens = torch.where(self.finished, self.pad, tokens)
            self.finished |= torch.isin(tokens, self.ends)
        self.tokens.copy_(tokens[:, None])
        self.text.index_copy_(1, self.written, self.tokens)
        self.written.add_(1)

    def _compile(self) -> None:
        """Have torch compile the step; a model whose blocks cannot be compiled goes on as it is."""
        try:
            blocks = CompiledBlocks(self.model, self.cache)
            with _decoding(self.model) if self.is_graphed else nullcontext():
                for self.forward in (blocks.check, blocks):
                    with self._undone():
                        self._step()
        except BaseException as error:
            self.forward = self.model
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
                raise
            self.compile = False
            name, reason = type(self.model).__name__, (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            warnings.warn(f"the blocks of {name} cannot be compiled, so text is slower: {reason}", stacklevel=5)

    def _capture(self) -> None:
        """Capture a step as a graph; a model that looks at values on the host goes on step by step."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), _decoding(self.model):
            with torch.cuda.stream(side):
                for _ in range(3):
                    with self._undone():
                        self._step()
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            try:
                with self._undone(), torch.cuda.graph(graph):
                    self._step()
            except RuntimeError as error:
                self.is_graphed = False
                warnings.warn(f"a step cannot be captured as a CUDA graph, so text is slower: {error}", stacklevel=5)
            else:
                self.graph = graph

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What a step writes is put back, and so is the state of the draws."""
        lengths = [layer.cumulative_length for layer in self.cache.layers]
        written = [self.tokens, self.positions, self.written, self.finished, self.text, *lengths]
        before, draws = [tensor.clone() for tensor in written], self.generator.get_state()
        try:
            yield
        finally:
            self.generator.set_state(draws)
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)


class PromptGraph:
    """A call ``read(ids, positions, mask)``, captured as a graph where prompts of one length follow each other."""

    def __init__(self) -> None:
        self.length, self.is_refused = 0, False
        self.graph: Any = None
        self.inputs: list[Tensor] = []
        self.logits: Any = None

    def __call__(self, read: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        length = inputs[0].shape[1]
        if length != self.length:
            self.length, self.graph, self.inputs, self.logits = length, None, [], None
        elif self.graph is None and not self.is_refused and inputs[0].numel() <= MOST_VECTORS:
            self._capture(read, [value.clone() for value in inputs])
        if self.graph is None:
            return read(*inputs)
        for ours, value in zip(self.inputs, inputs, strict=True):
            ours.copy_(value)
        self.graph.replay()
        return self.logits

    def _capture(self, read: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(inputs[0].device), torch.cuda.graph(graph):
                logits = read(*inputs)
        except RuntimeError:  # a model that looks at values on the host is read as before
            self.is_refused = True
        else:
            self.graph, self.inputs, self.logits = graph, inputs, logits


def static_cache(model: Any, length: int) -> Any:
    """A cache of ``length`` keys and values for each layer, also of one with a window, whose mask hides the others."""
    try:
        from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
    except ImportError:
        raise ValueError("the decoder needs transformers 5 or newer: pip install -U transformers") from None
    name = type(model).__name__
    try:
        cache = StaticCache(config=model.config, max_cache_len=length)
    except Exception as error:
        raise ValueError(f"{name} has no static cache ({error}): use model.generate") from error
    for i, layer in enumerate(cache.layers):
        if type(layer) is StaticSlidingWindowLayer:
            cache.layers[i] = layer = StaticLayer(max_cache_len=length)
        if type(layer) is not StaticLayer or not isinstance(getattr(layer, "cumulative_length", None), Tensor):
            kind = type(layer).__name__
            raise ValueError(f"{name} has a layer without a static cache ({kind}): use model.generate")
    return cache


@contextmanager
def _decoding(model: Any) -> Iterator[None]:
    """transformers' way to compute experts where few tokens choose them, and ours to attend for one token."""
    experts = model._optimize_model_for_decode() if hasattr(model, "_optimize_model_for_decode") else nullcontext()
    with experts, shared_heads():
        yield
