"""A trained model and its calibration samples: run whole or block by block, changed, and given back as it was."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from ..eligible import Weight
from ..ops import bits
from ..ops.wide_products import wide_products
from .blocks import blocks_of
from .offload import Offload
from .progress import Meter
from .resources import FAILURES, is_out_of_memory, release
from .samples import Chunk, Pick, Samples, Tree, check_batches, in_words, moved, samples_of


class Walk:
    """What every method after training needs of a model: its blocks, its samples, and where it runs.

    The samples are read when they are first asked for. With ``offload``, a device, the blocks are moved there one at a
    time. ``blocks.Stream`` stores activations between the blocks, so that a pass can start at any of them.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        batches: Iterable[Any] = (),
        offload: str | torch.device | None = None,
    ) -> None:
        check_batches(batches)
        tensors = (*model.named_parameters(), *model.named_buffers())
        if empty := [name for name, tensor in tensors if tensor.is_meta]:
            raise ValueError(
                f"{empty[0]} is on the meta device, where it has no values; load all weights into memory first"
            )
        self.model = model
        self.weights = weights
        self.blocks = blocks_of(model, weights)
        self.offload = None if offload is None else Offload(model, weights, torch.device(offload))
        self.device = weights[0].parameter.device if self.offload is None else self.offload.device
        self.meter = Meter()  # of the call that runs
        self.renewed: set[Tensor] = set()  # buffers that stay as they were changed
        self._batches = batches

    @cached_property
    def samples(self) -> Samples:
        found = samples_of(self._batches)
        _check_tokens(self.model, found)
        return found

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model as it is worked on; afterwards all but its weights is as before."""
        offloaded = self.offload.open() if self.offload else nullcontext()
        with frozen(self.model, self.renewed), offloaded, wide_products(self.device, self.model):
            yield

    def batch(self, chunk: Chunk | Pick, times: int = 1) -> Tree:
        """Samples on the device, repeated ``times`` times."""
        return moved(self.samples.tree(chunk, times), self.device)

    @torch.no_grad()
    def check_model(self) -> None:
        """Run the model on the first sample; where it fails, one line says what went in."""
        batch = self.batch(next(self.samples.chunks(1)))
        try:
            outputs(self.model, batch)
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{type(self.model).__name__} fails on the first sample, {in_words(batch)}: {reason}; "
                f"{_advice(self.model, batch, self._batches)}"
            ) from error

    def reading(self, phase: str) -> AbstractContextManager[None]:
        """A part of the progress in which every sample is a step."""
        return self.meter.part(phase, len(self.samples), of_samples=True)

    def visit(
        self,
        size: int,
        act: Callable[[Chunk], Iterable[Any] | None],
        add: Callable[[Any], None] | None = None,
        *,
        after: Chunk | None = None,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        """Call ``act`` for all samples, ``size`` at a time; where memory runs out, for the two halves of a chunk.

        ``act`` may be called again for samples that it has seen: what is to be summed up it must return, in parts.
        ``add`` takes up each part once. Where memory runs out in it, it is called again with the same part, and must
        have changed nothing or go on where it stopped. ``make_room`` is called whenever memory has run out. ``after``
        are the first samples of a group, and are left out.
        """
        chunks = [chunk if after is None else chunk.after(after) for chunk in self.samples.chunks(size)]
        pending = [chunk for chunk in chunks if chunk.size]
        while pending:
            chunk = pending.pop(0)
            try:
                found = list(act(chunk) or ())
            except Exception as error:
                if not is_out_of_memory(error) or chunk.size == 1:
                    raise
            else:
                if add is not None:
                    self.each_once(found, add, make_room)
                self.meter.sampled(chunk.size)
                continue
            self._release(make_room)  # outside the handler: the error keeps the tensors of the failed pass alive
            pending[:0] = chunk.halves()

    def each_once(
        self, parts: list[Any], add: Callable[[Any], None], make_room: Callable[[], None] | None = None
    ) -> None:
        """Call ``add`` for each part, which is removed; a second time where memory runs out."""
        has_failed = False
        while parts:
            try:
                add(parts[0])
            except Exception as error:
                if not is_out_of_memory(error) or has_failed:
                    raise
            else:
                parts.pop(0)
                has_failed = False
                continue
            has_failed = True
            self._release(make_room)

    def _release(self, make_room: Callable[[], None] | None) -> None:
        if make_room is not None:
            make_room()
        release(self.device)


@contextmanager
def frozen(model: nn.Module, renewed: Collection[Tensor] = ()) -> Iterator[None]:
    """The model in eval mode with ``requires_grad`` off; at the end all but the ``renewed`` buffers is as before."""
    modes = {module: module.training for module in model.modules()}
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        for parameter in flags:
            parameter.requires_grad_(False)
        # the fused encoder layer of torch does not call its linear layers
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        with torch.no_grad():
            for buffer, before in buffers:
                if buffer not in renewed:
                    buffer.copy_(before)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def swapped(values: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Tensors of a model that hold other values while this is open."""
    own = {tensor: tensor.data for tensor in values}
    try:
        for tensor, value in values.items():
            tensor.data = value
        yield
    finally:
        for tensor, value in own.items():
            tensor.data = value


def outputs(model: nn.Module, tree: Tree) -> Any:
    """What the model returns for a batch without its labels, unless a decoder makes its inputs from them."""
    inputs, labels = tree if isinstance(tree, tuple) else (tree, None)
    if not is_encoder_decoder(model) or (isinstance(inputs, Mapping) and "decoder_input_ids" in inputs):
        return call(
            model, {k: v for k, v in inputs.items() if k != "labels"} if isinstance(inputs, Mapping) else inputs
        )
    if labels is not None:
        named = inputs if isinstance(inputs, Mapping) else {getattr(model, "main_input_name", "input_ids"): inputs}
        inputs = {**named, "labels": labels}
    return call(model, inputs)


def first_tensor(tree: Tree) -> Tensor:
    """The first tensor of what a module returned that is no scalar, as a loss is."""
    leaves = pytree.tree_leaves(list(tree.values()) if isinstance(tree, Mapping) else tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return next((tensor for tensor in tensors if tensor.ndim), tensors[0])


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether it is a Hugging Face model with an encoder and a decoder, each with tokens of its own."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def call(model: nn.Module, inputs: Tree) -> Any:
    if isinstance(inputs, Mapping):
        return model(**without_cache(model, inputs))
    return model(inputs, **without_cache(model, {}))


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the cache of keys and values turned off: passes over whole sequences do not need it."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} | dict(inputs) if takes_cache else dict(inputs)


def _advice(model: nn.Module, batch: Tree, batches: Any) -> str:
    """What to do about a batch that a model cannot read."""
    if isinstance(batches, Dataset):
        return "if the dataset holds single samples, give DataLoader(dataset, batch_size=8)"
    inputs = batch[0] if isinstance(batch, tuple) else batch
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    given = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if given - {own}:
        return f"the model computes in {own}: convert the batches, as x.to({own})"
    has_tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if not given and not has_tokens:
        return f"the model reads no tokens: give inputs in {own}"
    if not given and any(leaf.ndim == 1 for leaf in leaves):
        return "tokens have the shape (sample, token): give ids[None] for one sample"
    return "give batches as model(batch) reads them, or model(**batch) where they are dicts"


def _check_tokens(model: nn.Module, samples: Samples) -> None:
    """Refuse what are no tokens (sample, token) that the embedding of a Hugging Face model has."""
    num_known = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(num_known, int):
        return
    for group in samples.groups:
        tree = group.tree[0] if isinstance(group.tree, tuple) else group.tree
        tokens = tree.get("input_ids") if isinstance(tree, Mapping) else tree
        reads_tokens = getattr(model, "main_input_name", "") == "input_ids"
        is_named = isinstance(tree, Mapping) or reads_tokens
        if not isinstance(tokens, Tensor) or (tokens.is_floating_point() and not is_named):
            continue
        if tokens.is_floating_point() or (tokens.ndim == 1 and reads_tokens):
            raise ValueError(
                f"tokens must be whole numbers of shape (sample, token), got {in_words(tokens)}; "
                f"give {'ids.long()' if tokens.is_floating_point() else 'ids[None] for one sample'}"
            )
        if tokens.numel():
            least, most = tokens.min().item(), tokens.max().item()
            if least < 0 or most >= num_known:
                raise ValueError(f"batches hold token {most if least >= 0 else least}, but the model knows {num_known}")


def head_of(model: nn.Module) -> nn.Linear:
    """The layer that turns the hidden state into logits; ValueError where it is not a plain one in float32 or less."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if type(head) is not nn.Linear or head.bias is not None or head.weight.dtype == torch.float64:
        raise ValueError("the model has no plain head")
    return head


class Originals:
    """Values of tensors before they were changed, bit for bit: those at the changed places, or all."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor | None, Tensor]] = []  # tensor, packed places (None for all), values
        self.whole: dict[Tensor, Tensor] = {}  # values of tensors that are remembered as a whole

    @torch.no_grad()
    def save(self, parameter: Tensor, where: Tensor) -> Tensor:
        """Remember the elements of ``parameter`` at the boolean ``where``, and return them."""
        values = parameter.detach()[where]  # a copy: it never aliases the live weight
        self._before.append((parameter, bits.pack(where), values))
        return values

    @torch.no_grad()
    def save_all(self, tensor: Tensor) -> Tensor:
        """Remember all elements of ``tensor``, in main memory, unless they are known; returns them."""
        if tensor not in self.whole:
            self.whole[tensor] = tensor.detach().to("cpu", copy=True)
            self._before.append((tensor, None, self.whole[tensor]))
        return self.whole[tensor]

    @torch.no_grad()
    def prune_(self, parameter: Tensor, where: Tensor) -> None:
        """Set the elements at the boolean ``where`` to zero, and remember them."""
        self.save(parameter, where)
        parameter.detach()[where] = 0.0

    @torch.no_grad()
    def restore_(self) -> dict[Tensor, Tensor]:
        """Write everything back, the last change first.

        Returns what stood in the tensors that were changed as a whole, in the memory that their old values had.
        """
        self.whole = {}
        replaced: dict[Tensor, Tensor] = {}
        while self._before:
            tensor, packed, values = self._before.pop()
            if packed is None:
                changed = tensor.detach().clone()
                tensor.detach().copy_(values)
                replaced[tensor] = values.copy_(changed)
            else:
                tensor.detach()[bits.unpack(packed, tensor.shape)] = values
        return replaced
