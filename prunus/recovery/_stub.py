from dataclasses import dataclass
import torch
from torch import Tensor
from torch.nn import functional as F
@dataclass(frozen=True)
class Head:
    weight: Tensor
    bias: Tensor | None = None
def _rows(hidden, head, expected, expected_head, mask, labels):
    keep = torch.ones(hidden.shape[:-1], dtype=torch.bool) if mask is None else mask
    s = F.linear(hidden[keep], head.weight, head.bias).float()
    t = s.detach() if expected is None else F.linear(expected[keep], expected_head.weight, expected_head.bias).float()
    kl = F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    if labels is None: return kl, kl*0, kl*0, torch.full(kl.shape, -100)
    l = labels[keep]
    return kl, F.cross_entropy(s, l, reduction="none"), F.cross_entropy(t, l, reduction="none"), l
def head_divergence(hidden, head, expected, expected_head, *, mask=None, labels=None, hard=0., soft=1., total=None):
    kl, ce, _, _ = _rows(hidden, head, expected, expected_head, mask, labels)
    total = kl.numel() if total is None else total
    return (soft * kl.sum() + hard * ce.sum()) / total
def head_sums(hidden, head, expected, expected_head, *, mask=None, labels=None):
    kl, ce, ce2, l = _rows(hidden, head, expected, expected_head, mask, labels)
    return torch.stack([kl.sum().double(), torch.tensor(kl.numel()).double(), ce.sum().double(), ce2.sum().double(), (l != -100).sum().double(), torch.tensor(float('nan')).double(), torch.tensor(float('nan')).double()])
