"""What torch.compile did, as its own counters say."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """Graphs that were compiled, places where the code had to be split, and frames compiled more than once."""

    graphs: int
    graph_breaks: int
    recompiles: int | None  # None where this torch does not count them

    def __str__(self) -> str:
        counts = {"graph": self.graphs, "graph break": self.graph_breaks, "recompile": self.recompiles}
        return ", ".join(f"{'unknown' if n is None else n} {name}{'s' * (n != 1)}" for name, n in counts.items())


def compiled() -> Compiled:
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    times = getattr(convert_frame, "FRAME_COMPILE_COUNTER", None)
    return Compiled(
        counters["stats"].get("unique_graphs", 0),
        sum(counters["graph_break"].values()),
        None if times is None else sum(max(0, num - 1) for num in times.values()),
    )
