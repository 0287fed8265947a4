"""Which weights of a model may be pruned, and why others stay dense."""

import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import functional as F

OTHER_KIND = "not a linear or convolution weight"  # a reason to stay dense, behind the name of the module's class
MUCH = 0.2  # of the weights that could be pruned: more that stays dense is worth a warning
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
    only: str | Sequence[str] = (),
    *,
    trained: Iterable[nn.Parameter] | None = None,
    takes_frozen: bool = False,
) -> Eligible:
    """Weights of linear layers, convolutions and experts, not heads and routers.

    ``include`` adds to these, ``only`` restricts them to what it matches, and ``exclude`` wins: globs over the names of
    parameters or of their modules. Norms and biases are never pruned. ``trained`` are the parameters of an optimizer;
    others stay dense. Frozen weights do too, unless ``include`` names them where no optimizer is, or ``takes_frozen``.
    """
    include, exclude, only = ([p] if isinstance(p, str) else list(p) for p in (include, exclude, only))
    names = {full: plain_name(full) for full, _ in model.named_parameters()}
    _check_names(model, names, {"include": include, "exclude": exclude, "only": only})
    holders = _holders(model)
    heads, routers = _heads(model), _routers(model)
    ids = None if trained is None else {id(parameter) for parameter in trained}
    chosen = Eligible([], {})
    for full, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        name, sharing = names[full], [module for is_kind, module in holders[id(parameter)] if is_kind]
        module = sharing[0] if sharing else holders[id(parameter)][-1][1]
        is_included = matches(name, include)
        reasons = {
            "excluded": matches(name, exclude),
            "not named by only": bool(only) and not matches(name, only),
            "embedding or head": not is_included and id(parameter) in heads,
            "router of experts": not is_included and id(parameter) in routers,
            f"{type(module).__name__}, {OTHER_KIND}": not is_included
            and not prunable_kind(module, full)
            and not holds_experts(module, parameter),
            "frozen": not (parameter.requires_grad or takes_frozen or (is_included and trained is None)),
            "not held by the optimizer": ids is not None and id(parameter) not in ids,
            "its gradients are sparse tensors": ids is not None and getattr(module, "sparse", False) is True,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            chosen.dense[name] = reason
        else:
            chosen.weights.append(Weight(name, parameter, module, outputs_of(module, parameter), tuple(sharing[1:])))
    if not chosen.weights:
        why = "; ".join(f"{name}: {reason}" for name, reason in chosen.dense.items()) or "it has no weight matrix"
        others = _of_other_kind(model, chosen)
        advice = f"; include={_globs(others)} adds them" if others else ""
        if any(getattr(module, "is_packed", False) for module in model.modules()):
            advice = "; its layers are sparse: call unsparsify_(model) first"
        raise ValueError(f"the model has no prunable weight ({why}){advice}")
    return chosen


def warn_if_much_stays_dense(model: nn.Module, chosen: Eligible) -> None:
    """Warn where a large part stays dense only because no linear layer or convolution has it, and say what takes it."""
    others = _of_other_kind(model, chosen)
    num_dense, num_pruned = sum(others.values()), sum(weight.parameter.numel() for weight in chosen.weights)
    if num_dense > MUCH * (num_dense + num_pruned):
        globs = _globs(others)
        warnings.warn(
            f"{num_dense / (num_dense + num_pruned):.0%} of the matrix weights stay dense, since they belong to no "
            f"linear layer or convolution: {', '.join(globs)}; pass include={globs} to prune them too, or the same "
            "exclude= to silence this warning",
            stacklevel=4,
        )


def _of_other_kind(model: nn.Module, chosen: Eligible) -> dict[str, int]:
    """Sizes of trained weights that stay dense for the kind of their module."""
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    names = [name for name, reason in chosen.dense.items() if reason.endswith(OTHER_KIND)]
    return {name: named[name].numel() for name in names if named[name].requires_grad}


def _globs(names: Iterable[str]) -> list[str]:
    """Patterns for these names, one for all layers of a stack."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def _check_names(model: nn.Module, names: Mapping[str, str], options: Mapping[str, list[str]]) -> None:
    """Refuse names that are equal without the prefixes of wrappers, and patterns that find nothing to prune."""
    fulls: dict[str, str] = {}
    for full, name in names.items():
        if (other := fulls.setdefault(name, full)) != full:
            raise ValueError(f"{other} and {full} are both {name} without DDP's prefix 'module'; rename that attribute")
    for option, patterns in options.items():
        check_patterns(patterns, names.values())
        for pattern in patterns if option != "exclude" else ():
            matched = {names[full]: p for full, p in model.named_parameters() if matches(names[full], [pattern])}
            if all(p.ndim < 2 for p in matched.values()):
                problem = f"{option} {pattern!r} matches only {', '.join(matched)}"
                raise ValueError(f"{problem}; prunable weights have two or more dimensions")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a glob matches the parameter's name or its module's."""
    module = name.rpartition(".")[0]
    return any(fnmatchcase(name, pattern) or fnmatchcase(module, pattern) for pattern in patterns)


def check_patterns(patterns: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(f"the pattern {pattern!r} matches no parameter; the first parameter is {names[0]!r}")


def prunable_kind(module: nn.Module, name: str) -> bool:
    is_known = isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or is_conv1d(module)
    return is_known and name.endswith("weight")


def holds_experts(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a stack of matrices, one for each expert of its module."""
    return parameter.ndim == 3 and getattr(module, "num_experts", None) == parameter.shape[0]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is Hugging Face's ``Conv1D``, a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether it computes ``x @ weight.T + bias``, and has nothing else; its own forward is tried on a tiny weight."""
    if not isinstance(module, nn.Linear) or "forward" in vars(module):
        return False
    tensors = {name for name, value in module._parameters.items() if value is not None}
    if "weight" not in tensors or not tensors <= {"weight", "bias"} or module._buffers or module._modules:
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    return type(module.weight) is nn.Parameter and _gives_linear(module)


@torch.no_grad()
def _gives_linear(module: nn.Linear) -> bool:
    """Whether a copy of the module with a tiny weight gives the outputs of a linear layer, when it trains and after."""
    rng = torch.Generator().manual_seed(0)
    weight, bias, *inputs = (
        torch.randn(shape, generator=rng, dtype=torch.float64, device="cpu")
        for shape in ((3, 4), (3,), (4,), (5, 4), (2, 5, 4))
    )
    bias = None if module.bias is None else bias
    tiny = type(module).__new__(type(module))
    parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
    vars(tiny).update(vars(module), _parameters=parameters, in_features=4, out_features=3)
    for x, scale, is_training in itertools.product(inputs, (1.0, 1e3), (False, True)):
        vars(tiny)["training"] = is_training
        wanted = F.linear(scale * x, weight, bias)
        try:
            outputs = type(module).forward(tiny, scale * x)
            torch.testing.assert_close(outputs, wanted, rtol=1e-12, atol=1e-12 * scale)
        except Exception:  # what a forward of its own may raise is not known
            return False
    return True


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


def _holders(model: nn.Module) -> Mapping[int, list[tuple[bool, nn.Module]]]:
    """Modules that hold each parameter, by its id, and whether they are of a kind that is pruned by default."""
    holders: dict[int, list[tuple[bool, nn.Module]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            holders[id(parameter)].append((prunable_kind(module, key), module))
    return holders


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
    routers: set[int] = set()
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.Module):
            gates = (getattr(module, name, None) for name in ("gate", "router", "shared_expert_gate"))
            routers |= {id(p) for gate in gates if isinstance(gate, nn.Module) for p in gate.parameters()}
    return routers


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and DDP, whose own forward cannot be run in part."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model
