"""Models that do not call their layers in the ordinary way."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, TIME = 8, 5


class Body(nn.Module):
    """Tokens to a hidden state, what a subclass does with it, and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.build()

    def build(self):
        self.mid = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.between(self.first(x).tanh()).mean(1))


class Blocks(Body):
    def build(self):
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])


class Attention(Body):
    def build(self):
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def between(self, x):
        return x + self.mix(x, x, x, need_weights=False)[0]


class Encoder(Body):
    def build(self):
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, dropout=0.1) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def between(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class TimeFirst(Body):
    def between(self, x):
        return self.mid(x.transpose(0, 1)).relu().transpose(0, 1)


class Flat(Body):
    def between(self, x):
        return self.mid(x.reshape(-1, WIDTH)).relu().view(x.shape)


class Routed(Body):
    """Each expert sees the tokens that go to it, from whatever sample."""

    def build(self):
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def between(self, x):
        flat, out = x.reshape(-1, WIDTH), torch.zeros_like(x).reshape(-1, WIDTH)
        chosen = flat[:, :3].argmax(1)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(flat[chosen == number])
        return out.view(x.shape)


class Reversed(Body):
    """The rows of a batch stand in another order inside."""

    def between(self, x):
        return self.mid(x.flip(0)).relu().flip(0)


class Twice(Body):
    def between(self, x):
        return self.mid(self.mid(x).relu()).tanh()


class SharedBlock(Body):
    def build(self):
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.blocks = nn.ModuleList([block, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), block])

    def between(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Tied(Blocks):
    def build(self):
        super().build()
        self.blocks[2].weight = self.blocks[0].weight

    def between(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Functional(Body):
    """The weight of a layer that is called is used a second time behind its back."""

    def between(self, x):
        return F.linear(self.mid(x).tanh(), self.mid.weight.t())


class FunctionalEarly(Blocks):
    """The weight of the last block is used before the first."""

    def between(self, x):
        x = F.linear(x, self.blocks[2].weight).tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return x


class InPlace(Body):
    def between(self, x):
        y = self.mid(x)
        y += 1
        return y.tanh_()


class Skips(Blocks):
    """Every block's output is read at the end, so that none may be skipped."""

    def between(self, x):
        found = []
        for block in self.blocks:
            x = block(x).tanh()
            found.append(x)
        return sum(found)


class FaintSkips(Skips):
    """As above, and hardly to be seen in the loss."""

    def between(self, x):
        first = self.blocks[0](x).tanh()
        return 1e-4 * first + self.blocks[2](self.blocks[1](first).tanh()).tanh()


class BatchStatistics(Body):
    def build(self):
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def between(self, x):
        return self.norm(self.mid(x).transpose(1, 2)).transpose(1, 2)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2 + self.weight.sum()


class Subclass(Body):
    def build(self):
        self.mid = Doubled(WIDTH, WIDTH)

    def between(self, x):
        return self.mid(x).tanh()


class Keyword(Body):
    def between(self, x):
        return self.mid(input=x).tanh()


class Unused(Body):
    def build(self):
        self.spare = nn.Linear(WIDTH, WIDTH)

    def between(self, x):
        return x


class Solid(Body):
    def build(self):
        self.line = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(WIDTH, WIDTH, 2)
        self.cube = nn.Conv3d(1, 1, 2)

    def between(self, x):
        y = self.up(self.line(x.transpose(1, 2))).unsqueeze(1).unsqueeze(1)
        return self.cube(F.pad(y, (0, 1, 0, 1, 0, 1))).squeeze(1).squeeze(1).transpose(1, 2)


MODELS = [
    Attention, Encoder, TimeFirst, Flat, Routed, Reversed, Twice, SharedBlock, Tied, Functional, FunctionalEarly,
    InPlace, Skips, FaintSkips, BatchStatistics, Subclass, Keyword, Unused, Solid,
]  # fmt: skip
