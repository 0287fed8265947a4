"""Text from a causal language model, a token at a time, as fast as its products are.

Keys and values are in a static cache, so that a step is the same work at every token. On CUDA the step, the model's own
forward and the choice of the next token, is captured as a graph once for a batch size and a length of the cache, and
then replayed: the host launches one graph a token. A short prompt of the length of the last one is read by a graph too.
Elsewhere the step is called in a loop.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.wide_products import wide_products
from .decoder_state import DecoderState, static_cache
from .model_layers import check_values

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
            raise ValueError(f"temperature must be above 0, got {self.temperature}; greedy text is do_sample=False")
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
    """Generates text: ``Decoder(model).generate(input_ids, max_new_tokens=64)``, ids as with ``model.generate``.

    The model is a causal language model of transformers that supports a static cache, on one device, dense or made
    sparse by ``sparsify_`` or ``semi_structured_``. The decoder does not change it; between calls you may change its
    weights, but only in place. ``compile=True`` lets torch compile the blocks at the first call of a batch size, which
    fuses the small operations between the products. That takes seconds, whatever the number of blocks, since they
    share the compiled code. It pays on a GPU; on a CPU it gains little.
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
        """The prompts (batch, length), each followed by its new tokens.

        Pad prompts of different lengths on the left, with zeros in ``attention_mask``. A sequence ends at
        ``eos_token_id`` (default: that of the model's generation config; -1: none), and ``pad_token_id`` fills the
        rest. ``seed`` makes sampled text repeatable.
        """
        sampling = Sampling(do_sample, temperature, top_k, top_p)
        of_sampling = {"temperature": None if temperature == 1.0 else temperature, "top_k": top_k, "top_p": top_p}
        for name, value in of_sampling.items():
            if value is not None and not do_sample:
                raise ValueError(
                    f"{name}={value} only affects sampling, which is off; add do_sample=True, or leave out {name}"
                )
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
        eos = config.eos_token_id if eos is None else eos
        ends = () if eos is None else tuple(int(n) for n in ([eos] if isinstance(eos, int) else eos) if n >= 0)
        if pad is None:
            pad = config.pad_token_id
        return ends, pad if pad is not None else ends[0] if ends else 0

    def _checked(
        self, ids: Tensor, mask: Tensor | None, max_new_tokens: int, eos: tuple[int, ...], pad: int
    ) -> tuple[Tensor, Tensor]:
        """Prompt and mask on the model's device; ValueError for what the model cannot read."""
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"input_ids must be a tensor (batch, length), such as torch.tensor([[1, 2]]), got {ids!r:.40}"
            )
        if ids.ndim != 2:
            advice = "for one prompt, pass input_ids[None]" if ids.ndim == 1 else "give one row for each prompt"
            raise ValueError(f"input_ids must be (batch, length), got {tuple(ids.shape)}; {advice}")
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input_ids must be token ids, int64 or int32, got {ids.dtype}; pass input_ids.long()")
        if not ids.numel():
            raise ValueError(
                f"input_ids must have at least one token per prompt, got {tuple(ids.shape)}; begin with the start token"
            )
        if len(ids) > MOST_SEQUENCES:
            raise ValueError(f"the decoder takes 1 to {MOST_SEQUENCES} sequences at a time, got {len(ids)}; split them")
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens}")
        config = self.model.config.get_text_config(decoder=True)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab_size:
            problem = f"input_ids has the token {low if low < 0 else high}"
            raise ValueError(f"{problem}, but the model's tokens are 0 to {config.vocab_size - 1}")
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and ids.shape[1] + max_new_tokens > longest:
            problem = f"a prompt of {ids.shape[1]} tokens plus {max_new_tokens} new ones exceeds the {longest}"
            raise ValueError(f"{problem} that the model reads; shorten the prompt, or lower max_new_tokens")
        ids = ids.to(self.device, torch.int64)
        if mask is None:  # as model.generate does: padding is told from the pad token where it is not an end too
            config = self.model.generation_config
            is_padded = config.pad_token_id is not None and pad not in eos and bool((ids == pad).any())
            return ids, (ids != pad).long() if is_padded else torch.ones_like(ids)
        if not isinstance(mask, Tensor) or mask.shape != ids.shape or bool((mask[:, -1] == 0).any()):
            problem = f"attention_mask must have the shape {tuple(ids.shape)} of input_ids, and zeros on the left only"
            raise ValueError(f"{problem}; pad prompts on the left")
        return ids, mask.to(self.device, torch.int64)

    def _state(self, batch: int, length: int, sampling: Sampling, eos: tuple[int, ...], pad: int) -> DecoderState:
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


def check_model(model: nn.Module) -> None:
    name = type(model).__name__
    if not hasattr(model, "prepare_inputs_for_generation") or not hasattr(model, "generation_config"):
        raise ValueError(f"the decoder runs causal language models of transformers; {name} is not one")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder; the decoder runs only causal language models: use model.generate")
    for parameter_name, parameter in model.named_parameters():
        check_values(parameter_name, parameter)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the decoder needs all weights on one device, but they are on {places}; move them")
    for setting, neutral in NEUTRAL.items():
        if (value := getattr(model.generation_config, setting, None)) not in neutral:
            problem = f"the generation config sets {setting} = {value}, which the decoder does not follow"
            raise ValueError(f"{problem}; set model.generation_config.{setting} = None, or use model.generate")
    static_cache(model, SHORTEST)


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
