"""What the last digits of a run depend on, fixed while it trains.

On a CPU without bfloat16 instructions torch turns oneDNN off for the whole process at the first bfloat16 matrix
product that is large enough, and float32 rounds otherwise from then on. A run therefore decides at its start whether
oneDNN is on, from the run and the machine alone, whatever the process did before.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..files.json_file import read_json
from .parallel import Team
from .run import Run


def can_use_onednn(run: Run) -> bool:
    """Whether oneDNN can be on for the whole of ``run`` on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    return run.precision == "float32" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def fixed_arithmetic(run: Run, team: Team = Team()) -> Iterator[None]:
    """oneDNN on where every rank can use it, or as run.json of a resumed run has it; as it was before, afterwards."""
    before = bool(torch.backends.mkldnn.enabled)
    use = bool(team.rows(torch.tensor([int(can_use_onednn(run))])).all())
    recorded = None
    if run.resume and (run.out / "run.json").is_file():
        environment = read_json(run.out / "run.json").get("environment")
        recorded = environment.get("onednn") if isinstance(environment, dict) else None
    if recorded and not use and team.is_first:
        warnings.warn(
            f"the run in {run.out} started with oneDNN, which is off here (a CPU without bfloat16, or torch without "
            "oneDNN): it continues, but its last digits will differ from those of an unbroken run",
            stacklevel=2,
        )
    torch.backends.mkldnn.enabled = use and recorded is not False  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # pyrefly: ignore[bad-assignment]


def restore_onednn(expected: bool) -> None:
    """Switch oneDNN back to ``expected`` where something in this process switched it while a run went on; say so."""
    if torch.backends.mkldnn.enabled == expected:
        return
    torch.backends.mkldnn.enabled = expected  # pyrefly: ignore[bad-assignment]
    warnings.warn(
        f"oneDNN was switched {'off' if expected else 'on'} in this process during the run (torch switches it off at a "
        "bfloat16 product on a CPU without bfloat16); it is switched back, but the last digits may differ from a run "
        "in another process",
        stacklevel=2,
    )
