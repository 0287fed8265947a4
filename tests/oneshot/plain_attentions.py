"""Attentions in plain torch, as people write them."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, DIM = 12, 4, 5  # heads are not as wide together as the stream


def by_head(x, num):
    return x.unflatten(-1, (num, -1)).transpose(1, 2)


class Fused(nn.Module):
    """One layer for query, key and value: ``[q|k|v]``, or by head."""

    def __init__(self, layout="parts", dim=DIM):
        super().__init__()
        self.num_heads, self.layout = HEADS, layout
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * HEADS * dim), nn.Linear(HEADS * dim, WIDTH)

    def forward(self, x):
        if self.layout == "parts":
            q, k, v = (by_head(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        else:
            q, k, v = by_head(self.qkv(x), self.num_heads).chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Timm(nn.Module):
    """timm's: norms by head, and ``attn_dim`` for the shape at the end; with the width of its input there before."""

    def __init__(self, is_old=False, width=WIDTH):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, width // HEADS
        self.attn_dim, self.is_old, self.scale = width, is_old, self.head_dim**-0.5
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm, self.k_norm, self.attn_drop = nn.LayerNorm(self.head_dim), nn.Identity(), nn.Dropout(0.1)
        self.norm, self.proj, self.proj_drop = nn.Identity(), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        batch, num, width = x.shape
        qkv = self.qkv(x).reshape(batch, num, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        attention = self.attn_drop(((q * self.scale) @ k.transpose(-2, -1)).softmax(-1))
        mixed = (attention @ v).transpose(1, 2).reshape(batch, num, width if self.is_old else self.attn_dim)
        return x + self.proj_drop(self.proj(self.norm(mixed)))


class NanoGPT(nn.Module):
    """nanoGPT's: the width of a head is that of the input divided by the number of heads."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, time, width = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (p.view(batch, time, self.n_head, width // self.n_head).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, time, width))


class EmbedDim(nn.Module):
    """fairseq's: everything follows from ``embed_dim`` and the number of heads; another attribute is not read."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.embed_dim, self.width = HEADS, WIDTH, WIDTH
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        shape = (*x.shape[:2], self.num_heads, self.embed_dim // self.num_heads)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out_proj(mixed.reshape(*x.shape[:2], self.embed_dim))


class Grouped(nn.Module):
    """Llama's: several heads of queries read one head of keys and values, with or without a layer for both of these."""

    def __init__(self, has_kv=False, num=6, num_groups=2):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = num, num_groups, DIM
        self.wq, self.wo = nn.Linear(WIDTH, num * DIM, bias=False), nn.Linear(num * DIM, WIDTH, bias=False)
        self.wkv = nn.Linear(WIDTH, 2 * num_groups * DIM) if has_kv else None
        if not has_kv:
            self.wk, self.wv = nn.Linear(WIDTH, num_groups * DIM), nn.Linear(WIDTH, num_groups * DIM)

    def forward(self, x):
        k, v = (self.wk(x), self.wv(x)) if self.wkv is None else self.wkv(x).chunk(2, -1)
        k, v = (by_head(part, self.n_kv_heads).repeat_interleave(self.n_heads // self.n_kv_heads, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(by_head(self.wq(x), self.n_heads), k, v)
        return x + self.wo(mixed.transpose(1, 2).flatten(2))


class Lucid(nn.Module):
    """lucidrains': ``heads``, two layers, and one in a Sequential at the end."""

    def __init__(self):
        super().__init__()
        self.heads, inner = HEADS, HEADS * DIM
        self.norm, self.to_q, self.to_kv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(WIDTH, 2 * inner)
        self.to_out = nn.Sequential(nn.Linear(inner, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (by_head(part, self.heads) for part in (self.to_q(h), *self.to_kv(h).chunk(2, -1)))
        return x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PositionBias(Fused):
    """A table with a column for each head, and a scale for each."""

    def __init__(self):
        super().__init__()
        self.table, self.logit_scale = nn.Parameter(torch.randn(7, HEADS)), nn.Parameter(torch.rand(HEADS, 1, 1))

    def forward(self, x):
        q, k, v = (by_head(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        bias = self.table.transpose(0, 1)[:, None, : x.shape[1]]
        attention = (q @ k.transpose(-2, -1) * self.logit_scale + bias).softmax(-1)
        return x + self.proj((attention @ v).transpose(1, 2).flatten(2))


class AllHeadNorm(Fused):
    """A norm over the channels of all heads, without weights of its own."""

    def forward(self, x):
        q, k, v = (by_head(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.proj(F.layer_norm(mixed, mixed.shape[-1:]))


class Torch(nn.Module):
    """nn.MultiheadAttention, which a residual stream surrounds."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class Block(nn.Module):
    """An attention and an MLP in a block that has a number of heads too, which it does not read."""

    def __init__(self, attention):
        super().__init__()
        self.num_heads, self.attention = HEADS, attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        x = self.attention(x)
        return x + self.mlp(x)
