"""Weight shapes of well-known models, for benchmarks that need no checkpoint."""

GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
MISTRAL = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]

SHAPES = {"gpt2": 12 * GPT2, "mistral-7b": 32 * MISTRAL}


def shapes_of(name: str | None, layers: int, dim: int) -> list[tuple[int, int]]:
    """The prunable weights of a model by name, or ``layers`` square ones."""
    if name is None:
        return [(dim, dim)] * layers
    return SHAPES[name]
