"""Text from a causal language model, a token at a time, as fast as its products are.

Keys and values are in a static cache, so that a step is the same work at every token. On CUDA the step, the model's own
forward and the choice of the next token, is captured as a graph once for a batch size and a length of the cache, and
then replayed: the host launches one graph a token. A short prompt of the length of the last one is read by a graph too.
Elsewhere the step is called in a loop.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.wide_products import wide_products
from .attention import shared_heads
from .compiled import CompiledBlocks
from .model_layers import check_values
from .prompt_graph import PromptGraph

SHORTEST = 256  # tokens of a cache that a graph is made for; longer ones are powers of two
CHECK_EVERY = 16  # tokens between two looks at whether all sequences have ended, for which the host waits
MOST_SEQUENCES = 16
MOST_STATES = 4  # caches with their graphs that are kept for later calls
# what model.generate reads of a generation config that changes greedy text, and what leaves it as it is
NEUTRAL = {
    "repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0), "bad_words_ids": (None,),
    "min_length": (None, 0), "min_new_tokens": (None, 0), "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,), "suppress_tokens": (None,), "begin_suppress_tokens": (None,),
    "sequence_bias": (None,), "guidance_scale": (None, 1.0), "num_beams": (None, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the next token is taken: the most likely one, or one drawn as ``model.generate`` draws it."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}; do_sample=False is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    def __call__(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Token ids (batch,) from logits (batch, vocabulary)."""
        logits = logits.to(torch.float32)
        if not self.do_sample:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = logits.sort(-1)
            is_tail = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            is_tail[:, -1] = False
            logits = logits.masked_fill(torch.empty_like(is_tail).scatter_(1, index, is_tail), -torch.inf)
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return (logits.softmax(-1) / noise).argmax(-1)  # one draw of torch.multinomial, without its wait for the host


class Decoder:
    """``Decoder(model).generate(input_ids, max_new_tokens=64)``, ids in and out as with ``model.generate``.

    The model is a causal one of transformers with a static cache, on one device, dense or made sparse by ``sparsify_``
    or ``semi_structured_``; the decoder changes nothing in it. Its weights may change between calls in place only.
    ``compile=True`` has torch compile the blocks at the first call of a batch size, so that the small operations
    between the products are few. It takes seconds, whatever the number of blocks: they share what is compiled. It pays
    on a GPU; on a CPU it gains little.
    """

    def __init__(self, model: nn.Module, *, compile: bool = False) -> None:
        check_model(model)
        self.model: Any = model
        self.compile = compile
        self.device = next(model.parameters()).device
        self.generator = torch.Generator(self.device)
        self.states: dict[tuple, DecoderState] = {}

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 64,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """The prompts (batch, length) with their new tokens behind them.

        Prompts of different lengths are padded on the left, which ``attention_mask`` has zeros for. A sequence ends
        with ``eos_token_id``, by default that of the model's generation config, -1 for none, and is filled up with
        ``pad_token_id``. ``seed`` makes sampled text repeatable.
        """
        sampling = Sampling(do_sample, temperature, top_k, top_p)
        check_is_read(do_sample, temperature=None if temperature == 1.0 else temperature, top_k=top_k, top_p=top_p)
        eos, pad = self._special_tokens(eos_token_id, pad_token_id)
        ids, mask = self._checked(input_ids, attention_mask, max_new_tokens, eos, pad)
        if do_sample:  # a seed of its own where none is given, drawn by torch's generator
            self.generator.manual_seed(int(torch.randint(1 << 62, ())) if seed is None else seed)
        with _evaluating(self.model), wide_products(self.device, self.model):
            state = self._state(len(ids), ids.shape[1] + max_new_tokens, sampling, eos, pad)
            state.start(ids, mask)
            for number in range(1, max_new_tokens):
                if eos and number % CHECK_EVERY == 0 and bool(state.finished.all()):
                    break
                state.advance()
        self.compile &= state.compile  # what cannot be compiled is not tried again
        return state.result(ids)

    def _special_tokens(self, eos: int | Sequence[int] | None, pad: int | None) -> tuple[tuple[int, ...], int]:
        config = self.model.generation_config
        found = config.eos_token_id if eos is None else eos
        ends = () if found is None else tuple(int(n) for n in ([found] if isinstance(found, int) else found) if n >= 0)
        if pad is None:
            pad = config.pad_token_id
        return ends, pad if pad is not None else ends[0] if ends else 0

    def _checked(
        self, ids: Tensor, mask: Tensor | None, max_new_tokens: int, eos: tuple[int, ...], pad: int
    ) -> tuple[Tensor, Tensor]:
        """Prompt and mask on the model's device; ValueError for what the model cannot read."""
        if not isinstance(ids, Tensor):
            raise ValueError(f"input_ids is a tensor (batch, length), as torch.tensor([[1, 2]]), got {ids!r:.40}")
        if ids.ndim != 2:
            advice = "of one prompt write input_ids[None]" if ids.ndim == 1 else "give one row for each prompt"
            raise ValueError(f"input_ids must be (batch, length), got {tuple(ids.shape)}; {advice}")
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input_ids must be token ids, of int64 or int32, got {ids.dtype}; write input_ids.long()")
        if not ids.numel():
            raise ValueError(
                f"input_ids must have a token for each prompt, got {tuple(ids.shape)}; begin with the start token"
            )
        if len(ids) > MOST_SEQUENCES:
            raise ValueError(f"the decoder takes 1 to {MOST_SEQUENCES} sequences at a time, got {len(ids)}; split them")
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens}")
        config = self.model.config.get_text_config(decoder=True)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"input_ids has the token {low if low < 0 else high}, but the model's are 0 to {config.vocab_size - 1}"
            )
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and ids.shape[1] + max_new_tokens > longest:
            raise ValueError(
                f"a prompt of {ids.shape[1]} tokens and {max_new_tokens} new ones are more than the {longest} that the "
                "model reads; shorten the prompt, or ask for fewer"
            )
        ids = ids.to(self.device, torch.int64)
        if mask is None:  # as model.generate does: padding is told from the pad token where it is not an end too
            config = self.model.generation_config
            is_padded = config.pad_token_id is not None and pad not in eos and bool((ids == pad).any())
            return ids, (ids != pad).long() if is_padded else torch.ones_like(ids)
        if not isinstance(mask, Tensor) or mask.shape != ids.shape or bool((mask[:, -1] == 0).any()):
            raise ValueError(
                f"attention_mask must have the shape {tuple(ids.shape)} of input_ids, and zeros on the left only; "
                "pad prompts on the left"
            )
        return ids, mask.to(self.device, torch.int64)

    def _state(self, batch: int, length: int, sampling: Sampling, eos: tuple[int, ...], pad: int) -> "DecoderState":
        """The cache and graph for such a call: those of an earlier one, or new ones."""
        is_kept = self.compile or self.device.type == "cuda"  # otherwise a state has nothing to use again
        if is_kept:
            length = max(SHORTEST, 1 << (length - 1).bit_length())
        key = (batch, length, sampling, eos, pad)
        state = self.states.pop(key, None)
        if state is None:
            while len(self.states) >= MOST_STATES:
                self.states.pop(next(iter(self.states)))
            state = DecoderState(self.model, self.generator, key, self.compile)
        if is_kept:
            self.states[key] = state  # the latest one is the last
        return state


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
        """Write one more token."""
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
        options = {"logits_to_keep": 1} if "logits_to_keep" in _parameters(self.model) else {}
        return self._logits(self.model, ids, positions, mask, is_first_iteration=True, **options)

    def _logits(self, forward: Any, ids: Tensor, positions: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """Logits (batch, vocabulary) of the next token."""
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            past_key_values=self.cache,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **options,
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
        """Capture a step as a graph.

        A model whose step cannot be captured, as one that looks at values on the host, goes on step by step.
        """
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


def check_is_read(do_sample: bool, **options: float | None) -> None:
    """ValueError for an option of sampling where nothing is sampled."""
    for name, value in options.items():
        if value is not None and not do_sample:
            raise ValueError(
                f"{name}={value} says how tokens are drawn, but the most likely ones are taken; "
                f"add do_sample=True, or leave {name} off"
            )


def check_model(model: nn.Module) -> None:
    """ValueError for a model that the decoder cannot run."""
    name = type(model).__name__
    if not hasattr(model, "prepare_inputs_for_generation") or not hasattr(model, "generation_config"):
        raise ValueError(f"the decoder runs causal language models of transformers; {name} is none")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder; the decoder runs causal language models alone: use model.generate")
    for parameter_name, parameter in model.named_parameters():
        check_values(parameter_name, parameter)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the decoder runs a model on one device, but its weights are on {places}; move them")
    for setting, neutral in NEUTRAL.items():
        if (value := getattr(model.generation_config, setting, None)) not in neutral:
            raise ValueError(
                f"the generation config sets {setting} = {value}, which the decoder does not follow; "
                f"set model.generation_config.{setting} = None, or use model.generate"
            )
    static_cache(model, SHORTEST)


def static_cache(model: Any, length: int) -> Any:
    """A cache of ``length`` keys and values for each layer, whatever the window of its attention.

    A layer with a window keeps all keys too: its mask hides those before the window, so that a step is the same work at
    every token, where the cache of transformers moves its keys from some token on.
    """
    try:
        from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
    except ImportError:
        raise ValueError("the decoder takes transformers 5 or newer: pip install -U transformers") from None
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
            raise ValueError(f"{name} has a layer whose state is no static cache ({kind}): use model.generate")
    return cache


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout, and afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _decoding(model: Any) -> Iterator[None]:
    """transformers' way to compute experts where few tokens choose them, and ours to attend for one token."""
    experts = model._optimize_model_for_decode() if hasattr(model, "_optimize_model_for_decode") else nullcontext()
    with experts, shared_heads():
        yield
