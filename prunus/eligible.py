"""Which weights of a model may be pruned, why others stay dense, and how sparse all of them are."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
from torch import nn

from .ranks import Ranks, local, shard_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# classes that store experts as (expert, in, out), for versions of transformers that do not say it in the module
INPUTS_FIRST = {"GptOssExperts", "Llama4TextExperts", "AriaGroupedExpertsGemm"}
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Weight:
    """A weight that may be pruned; ``outputs`` are its dimensions that count outputs."""

    name: str
    parameter: nn.Parameter
    module: nn.Module
    outputs: tuple[int, ...] | None
    sharers: tuple[nn.Module, ...] = ()  # other layers that multiply by the same parameter


@dataclass(frozen=True)
class Eligible:
    """Weights to prune in model order, and the reason for each other weight matrix that stays dense."""

    weights: list[Weight]
    dense: dict[str, str]


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of ``torch.compile``, anywhere, and of DDP, in front."""
    name = f".{name}".replace("._orig_mod.", ".")[1:]
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def eligible(
    model: nn.Module,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    trained: Iterable[nn.Parameter] | None = None,
) -> Eligible:
    """Weights of linear layers, convolutions and experts, not heads and routers; ``include`` adds, ``exclude`` wins.

    ``trained`` are the parameters of an optimizer; others stay dense. Frozen weights do too, unless ``include`` names
    them where no optimizer is. Patterns are globs over
    parameter names or the names of their modules. Norms and biases are never pruned.
    """
    include, exclude = ([given] if isinstance(given, str) else list(given) for given in (include, exclude))
    names = {full: plain_name(full) for full, _ in model.named_parameters()}
    _check_names(model, names, include, exclude)
    owners, holders = _owners(model), _holders(model)
    heads, routers = _heads(model), _routers(model)
    ids = None if trained is None else {id(parameter) for parameter in trained}
    found = Eligible([], {})
    for full, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        name, module = names[full], owners[full]
        is_included = matches(name, include)
        reasons = {
            "excluded": matches(name, exclude),
            "embedding or head": not is_included and id(parameter) in heads,
            "router of experts": not is_included and id(parameter) in routers,
            f"{type(module).__name__}, not a linear or convolution weight": not is_included
            and not prunable_kind(module, full)
            and not holds_experts(module, parameter),
            "frozen": not parameter.requires_grad and not (is_included and trained is None),
            "not held by the optimizer": ids is not None and id(parameter) not in ids,
            "its gradients are sparse tensors": ids is not None and getattr(module, "sparse", False) is True,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            found.dense[name] = reason
        else:
            sharers = tuple(other for other in holders[id(parameter)] if other is not module)
            found.weights.append(Weight(name, parameter, module, outputs_of(module, parameter), sharers))
    if not found.weights:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.dense.items()) or "it has no weight matrix"
        raise ValueError(f"the model has no weight to prune ({why})")
    return found


def _check_names(model: nn.Module, names: Mapping[str, str], include: list[str], exclude: list[str]) -> None:
    """Refuse names that are equal without the prefixes of wrappers, and patterns that find nothing to prune."""
    fulls: dict[str, str] = {}
    for full, name in names.items():
        if (other := fulls.setdefault(name, full)) != full:
            raise ValueError(f"{other} and {full} are both {name} without DDP's prefix; rename the attribute 'module'")
    check_patterns(include + exclude, names.values())
    for pattern in include:
        found = {names[full]: p for full, p in model.named_parameters() if matches(names[full], [pattern])}
        if all(p.ndim < 2 for p in found.values()):
            raise ValueError(
                f"include {pattern!r} matches only {', '.join(found)}; a weight has two or more dimensions"
            )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a glob matches the parameter's name or its module's."""
    module = name.rpartition(".")[0]
    return any(fnmatchcase(name, pattern) or fnmatchcase(module, pattern) for pattern in patterns)


def check_patterns(patterns: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(f"the pattern {pattern!r} matches no parameter; the first of them is {names[0]!r}")


def prunable_kind(module: nn.Module, name: str) -> bool:
    is_known = isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or is_conv1d(module)
    return is_known and name.endswith("weight")


def holds_experts(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a stack of matrices, one for each expert of its module."""
    return parameter.ndim == 3 and getattr(module, "num_experts", None) == parameter.shape[0]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is Hugging Face's ``Conv1D``, a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def outputs_of(module: nn.Module, parameter: nn.Parameter) -> tuple[int, ...] | None:
    """Dimensions that count outputs, the others being the inputs of a row; None where there are no such."""
    if isinstance(module, TRANSPOSED):
        return (1,) if module.groups == 1 else None
    if is_conv1d(module):
        return (1,)
    if isinstance(module, CONVOLUTIONS):
        return (0,)
    if holds_experts(module, parameter) and getattr(module, "is_transposed", type(module).__name__ in INPUTS_FIRST):
        return (0, 2)
    return tuple(range(parameter.ndim - 1))


def _owners(model: nn.Module) -> Mapping[str, nn.Module]:
    """Module that holds each parameter; of a shared one the first that prunes it by default."""
    owners: dict[str, nn.Module] = {}
    by_id: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            name = by_id.setdefault(id(parameter), f"{path}.{key}" if path else key)
            if name not in owners or not prunable_kind(owners[name], name):
                owners[name] = module
    return owners


def _holders(model: nn.Module) -> Mapping[int, list[nn.Module]]:
    """Linear layers and convolutions that hold each parameter, by its id; several where they share it."""
    found: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if prunable_kind(module, key):
                found[id(parameter)].append(module)
    return found


def _heads(model: nn.Module) -> set[int]:
    """Ids of embedding weights, of heads tied to one, and of the model's own output embeddings."""
    inner = model
    while isinstance(wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None)), nn.Module):
        inner = wrapped
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for getter in ("get_output_embeddings", "get_input_embeddings"):
        module = None
        with suppress(NotImplementedError, AttributeError):  # what transformers raises for models of images and sound
            module = getattr(inner, getter)() if hasattr(inner, getter) else None
        if module is not None and getattr(module, "weight", None) is not None:
            heads.add(id(module.weight))
    return heads


def _routers(model: nn.Module) -> set[int]:
    """Ids of the weights that send tokens to experts, by the names that they have beside them."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.Module):
            gates = (getattr(module, name, None) for name in ("gate", "router", "shared_expert_gate"))
            found |= {id(p) for gate in gates if isinstance(gate, nn.Module) for p in gate.parameters()}
    return found


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and DDP, whose own forward cannot be run in part."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


@dataclass(frozen=True)
class LayerSparsity:
    """One weight: its size, its zeros, and the reason if it is not pruned."""

    name: str
    shape: tuple[int, ...]
    num_weights: int
    num_zeros: int
    dense: str | None = None
    rate: float = 1.0  # factor on its learning rate

    @property
    def sparsity(self) -> float:
        return self.num_zeros / self.num_weights if self.num_weights else 0.0


@dataclass(frozen=True)
class SparsityReport:
    """Sparsity counted from the zeros: by weight, over prunable weights, and over all parameters."""

    layers: list[LayerSparsity]
    num_parameters: int

    @property
    def num_prunable(self) -> int:
        return sum(layer.num_weights for layer in self.layers if layer.dense is None)

    @property
    def num_zeros(self) -> int:
        return sum(layer.num_zeros for layer in self.layers if layer.dense is None)

    @property
    def sparsity(self) -> float:
        """Over prunable weights."""
        return self.num_zeros / self.num_prunable

    @property
    def sparsity_of_all(self) -> float:
        """Pruned weights over all parameters of the model."""
        return self.num_zeros / self.num_parameters

    def __str__(self) -> str:
        rows = [
            f"{layer.name:50} {'x'.join(map(str, layer.shape)):>16} {layer.sparsity:8.2%}"
            + (f"  dense: {layer.dense}" if layer.dense else "")
            + (f"  rate x {layer.rate:.3f}" if layer.rate != 1 else "")
            for layer in self.layers
        ]
        share, of_all = f"{self.sparsity:.4%}", f"{self.sparsity_of_all:.4%}"
        return "\n".join([*rows, f"{share} of {self.num_prunable} prunable weights, {of_all} of all are zero"])


def report(
    model: nn.Module, found: Eligible, ranks: Ranks | None = None, rates: Mapping[str, float] = MappingProxyType({})
) -> SparsityReport:
    """Zeros of every weight matrix, pruned or not, with the reason for those that are not.

    Collective over ``ranks``, which hold shards of the weights.
    """
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    reasons = {weight.name: None for weight in found.weights} | found.dense
    named = {name: p for name, p in parameters.items() if name in reasons}
    zeros = torch.tensor([local(p).numel() - int(local(p).count_nonzero()) for p in named.values()])
    if ranks:
        zeros = ranks.total(zeros * torch.tensor([shard_of(name, p, ranks).is_owner for name, p in named.items()]))
    layers = [
        LayerSparsity(name, tuple(p.shape), p.numel(), num_zeros, reasons[name], rates.get(name, 1.0))
        for (name, p), num_zeros in zip(named.items(), zeros.tolist(), strict=True)
    ]
    return SparsityReport(layers, sum(p.numel() for p in parameters.values()))
