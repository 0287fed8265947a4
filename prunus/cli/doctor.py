"""``prunus doctor``"""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Command:
    """Check what a pruned model promises; nothing is written, nothing in its files is executed.

    Exit code 0 if the model is healthy, 1 with a list if it is not, 2 if it could not be read. A
    training checkpoint says itself what was asked for; of other models it is told with --sparsity
    and --pattern, and without them the pattern that is found is reported.
    """

    path: tyro.conf.Positional[Path]  # model folder, safetensors file, checkpoint, or distributed checkpoint
    sparsity: float | None = None  # fraction of the prunable weights that should be zero, exactly
    pattern: str | None = None  # what it holds for: global, layer, row, or N:M such as 2:4
    masks: Path | None = None  # safetensors or checkpoint with the masks, to tell pruned weights from live zeros
    include: tuple[str, ...] = ()  # patterns of weights that are pruned beside linear and convolution weights
    exclude: tuple[str, ...] = ()  # patterns of weights that should be dense
    allow: tuple[str, ...] = ()  # kinds of findings that are meant: dead-rows, too-sparse, ...
    json: bool = False  # print one JSON object and nothing else


def run(command: Command) -> None:
    from ..doctor import examine

    report = examine(
        command.path,
        sparsity=command.sparsity,
        pattern=command.pattern,
        masks=command.masks,
        include=command.include,
        exclude=command.exclude,
        allow=command.allow,
    )
    if command.json:
        import json

        print(json.dumps(report.to_json(), indent=2))
    else:
        from ..doctor.show import console, show

        show(report, console())
    if not report.is_healthy:
        raise SystemExit(1)
