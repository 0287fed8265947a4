"""What ``prunus COMMAND --help`` prints: an example, the usual options, then the others in groups."""

import contextlib
import dataclasses
import inspect
import io
import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, get_args

# fields of a command by group, whose name is the title of a box; what no group names comes last
GROUPS = {
    "train": {
        "usual": "data model steps batch lr score sparsity seed out resume",
        "model": "width layers validation vocab_size context augment",
        "pruning": "schedule begin end every allocate include exclude only regrow regrow_by rate_power replay eps "
        "exponent",
        "learning": "optimizer spam lr_schedule min_lr decay warmup weight_decay beta1 beta2 clip accumulate "
        "budget_scale",
        "running": "precision parallel compile device eval_every eval_size save_every log_every track",
    },
    "prune": {
        "usual": "out text tokens batches sparsity bits recover score samples device",
        "calibration": "eval_text eval_tokens eval_batches token_type start_token calibrate length eval_windows seed",
        "selection": "scope allocate include exclude only",
        "repair": "no_repair targets damping tune",
        "recovery": "hard",
        "probe": "probe tau order reduction zero_gradient repair_probe",
        "output": "every_layer plot push private max_shard_size",
        "running": "dry_run memory batch gguf_file dtype offload checkpointing profile",
    },
    "shrink": {
        "usual": "out text tokens batches size neurons heads layers recover device",
        "removal": "experts multiple split targets tune",
        "recovery": "hard",
        "calibration": "samples eval_text eval_tokens eval_batches token_type start_token calibrate length "
        "eval_windows seed",
        "output": "every_layer plot push private max_shard_size",
        "running": "batch gguf_file dtype offload",
    },
    "recover": {
        "usual": "teacher out text tokens batches budget lr hard seed device",
        "learning": "train length batch step_tokens",
        "evaluation": "eval_text eval_tokens eval_batches eval_windows",
        "running": "parallel offload_teacher compile bf16 token_type start_token",
    },
    "eval": {
        "usual": "text tokens batches dense eval_windows length every_layer problems run_code device",
        "programs": "answers samples batch max_new_tokens",
        "runs": "data validation",
    },
    "export": {
        "usual": "out form bits text tokens batches check push device advise",
        "quantising": "samples length seed",
        "output": "max_shard_size private",
        "advice": "batch prompt_tokens",
    },
    "study": {
        "usual": "base preset data scores sparsity seeds out dry_run devices time_limit",
        "comparison": "arm only field validation",
        "output": "save_every keep_checkpoints slim page",
    },
}
GROUPS["profile"] = GROUPS["train"] | {"usual": "data model batch score sparsity compile precision device out compare"}
PAGES = {  # what the page of a command begins with: an example, and the page of docs/ on the command
    "demo": ("prunus demo", "README"),
    "report": ("prunus report runs/mine", "command-line"),
    "prune": ("prunus prune path/to/model --text corpus --out pruned", "prune-folder"),
    "shrink": ("prunus shrink path/to/model --text corpus --size 0.7 --out smaller", "shrink"),
    "recover": ("prunus recover pruned --teacher path/to/model --text corpus --out new", "recover"),
    "eval": ("prunus eval recovered --text held-out.txt", "evaluate"),
    "export": ("prunus export recovered --bits 4 --text corpus --out small", "run-and-ship"),
    "generate": ("prunus generate small --prompt 'Once upon a time'", "run-and-ship"),
    "doctor": ("prunus doctor small --sparsity 0.5", "check"),
    "train": ("prunus train --data book.txt --sparsity 0.8 --out runs/mine", "command-line"),
    "study": ("prunus study --scores magnitude,bitter7 --seeds 3 --out study", "compare"),
    "profile": ("prunus profile --model gpt2 --device cuda --out profile", "command-line"),
}


def help_page(kind: type[Any], name: str) -> str:
    import tyro

    left = {option.name: option for option in _options(kind, tyro.MISSING_NONPROP)}
    groups = GROUPS.get(name, {})
    named = {group: [left.pop(one) for one in names.split() if one in left] for group, names in groups.items()}
    if named:
        others = [name for name, option in left.items() if tyro.conf.Positional not in get_args(option.type)]
        named["more"] = [left.pop(name) for name in others]
    boxes = [
        (group, dataclasses.make_dataclass(group, map(_field, options), kw_only=True))
        for group, options in named.items()
    ]
    page = dataclasses.make_dataclass("Page", [*map(_field, left.values()), *boxes], kw_only=True)
    config = (tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes)
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        tyro.cli(page, args=["--help"], prog=f"prunus {name}", description=inspect.getdoc(kind), config=config)
    width = shutil.get_terminal_size().columns
    lines = (line.rstrip() for line in shown.getvalue().splitlines())
    fitting = (line if len(line) <= width else textwrap.fill(line, width) for line in lines)  # a description's
    example, guide = PAGES[name]
    return "\n".join([f"example: {example}", f"guide:   docs/{guide}.md", "", *fitting])


def _options(kind: type[Any], default: Any) -> Iterator[Any]:
    """What the parser knows of each option, those of an inner dataclass among them."""
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

    struct = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(kind, default, in_union_context=False))
    assert isinstance(struct, StructConstructorSpec)
    for option in struct.fields:
        inner: Any = next(iter(get_args(option.type)), None)
        if dataclasses.is_dataclass(inner):
            yield from _options(inner, option.default)
        else:
            yield option


def _field(option: Any) -> tuple[Any, ...]:
    """A field of the same type, text and default; a default that says nothing is not shown."""
    import tyro

    text = option.helptext() if callable(option.helptext) else option.helptext
    hint = "" if option.default in (None, "", ()) else None
    kind = Annotated[option.type, tyro.conf.arg(help=text, help_behavior_hint=hint)]
    if option.default is tyro.MISSING_NONPROP:
        return option.name, kind
    return option.name, kind, dataclasses.field(default=option.default)
