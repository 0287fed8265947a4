"""Whether layers can be removed from a model: what is left must be what it is with identities in their places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import SAME, is_near
from .calibration import ROUNDING, Calibration
from .distance import output_of
from .fewer_layers import FewerLayers
from .forward import arguments, outputs, replaced
from .resources import FAILURES, is_out_of_memory
from .samples import Tree, num_tokens, shortened
from .skipped import Identity, Place

PROMPT = 8  # tokens of a sample that the model continues


@dataclass(frozen=True)
class LayerCheck:
    """A model with the identities of its blocks, and the sample that every check runs on."""

    calibration: Calibration
    plan: FewerLayers
    skips: Mapping[Place, tuple[nn.Module, Identity]]
    sample: Tree
    generates: bool  # with all layers

    def fault(self, gone: Sequence[Place]) -> str:
        """Why the model without these blocks is not what it is with identities in their places; empty where it is."""
        model, sample = self.calibration.model, self.sample
        try:
            cuts = self.plan.cuts(gone)
        except ValueError as error:
            return str(error)
        with self.calibration.open(), torch.no_grad(), replaced(dict(self.skips[where] for where in gone)):
            expected = output_of(outputs(model, sample))
        cuts.apply_()
        try:
            with self.calibration.open(), torch.no_grad():
                same, as_called = output_of(outputs(model, sample)), output_of(_called(model, sample))
                if self.generates and not can_generate(model, sample):
                    return "generate fails without it, since its class counts layers in another way"
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            return f"the model fails without it: {' '.join(str(error).split())[:200]}"
        finally:
            cuts.undo_()
        if _is_near(same, expected, SAME) and _is_near(as_called, expected, ROUNDING):
            return ""
        return f"the layers after it would compute something else{self.plan.periods}"


def _called(model: Any, sample: Tree) -> Any:
    """What it returns as users call it: with a cache, if that is its default."""
    args, named = arguments(model, sample)
    return model(*args, **{key: value for key, value in named.items() if key != "use_cache"})


def can_generate(model: Any, sample: Tree) -> bool:
    """Whether it generates a token with its cache, whose layers the class may count in its own way."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return False
    args, named = arguments(model, shortened(sample, PROMPT) if num_tokens(sample) > PROMPT else sample)
    named = {key: value for key, value in named.items() if key not in ("use_cache", "decoder_input_ids", "labels")}
    try:
        model.generate(*args, **named, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def _is_near(output: Tensor, expected: Tensor, tolerances: Mapping[torch.dtype, float]) -> bool:
    return output.shape == expected.shape and is_near(output, expected, tolerances.get(output.dtype, 1e-2))
