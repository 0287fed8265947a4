"""The command line: each command is imported only when it is called."""

import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

TASKS = {  # commands by what they are for, and what each does
    "Try it and see results": {
        "demo": "train a small GPT, then prune, quantise and shrink it, in minutes",
        "report": "write one HTML page with charts of a run, a study or a model",
    },
    "Make a trained model smaller": {
        "prune": "set weights to zero and repair those that stay",
        "shrink": "remove neurons, heads, layers or experts",
        "recover": "train it to match the dense model again; its zeros stay",
        "eval": "measure quality and sparsity, or pass@1 on problems",
    },
    "Store it and run it": {
        "export": "convert it to a smaller file and back, bit for bit",
        "generate": "write text, with sparse layers where they are faster",
        "doctor": "check that it is intact: zeros, masks, finite weights",
    },
    "Prune while training": {
        "train": "train a network and prune it during training",
        "study": "compare scores over several sparsities and seeds",
        "profile": "measure where time and memory go in a training step",
    },
}
COMMANDS = {name: text for task in TASKS.values() for name, text in task.items()}
MOVED = {  # flags that were: what to write in their place, by command; VALUE is what was given
    ("prune", "--experts"): "prunus shrink MODEL --experts VALUE --out SMALLER, then prunus prune SMALLER",
    ("prune", "--layers"): "--every-layer",
    ("eval", "--layers"): "--every-layer",
}
LONGEST = 4000  # characters of an error's line, which may quote a name of any length


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``prunus COMMAND ...``; bad input ends in one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that the terminal lacks must not end a study
            stream.reconfigure(errors="replace")
    try:
        try:
            _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # while a closed pipe can still be handled
    except BrokenPipeError:  # the reader of the output has left
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # both are flushed once more at the exit
            os.dup2(null, descriptor)
        raise SystemExit(141) from None


def _run(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: prunus COMMAND [OPTIONS]")
        for task, commands in TASKS.items():
            print(f"\n{task}", *(f"  {name:{width}}  {text}" for name, text in commands.items()), sep="\n")
        print("\nprunus COMMAND --help shows an example and every option with its default.")
        return
    name, rest = args[0], args[1:]
    if name == "--version":
        from .. import __version__

        print(f"prunus {__version__}")
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        _fail("prunus", f"there is no command {name!r}; {hint}")
    from .console import escaped_messages, print_traceback

    sys.excepthook = print_traceback
    try:
        command = import_module(f"{__name__}.{name}")
        with escaped_messages(f"prunus {name}"):
            command.run(_parse(command.Command, name, rest))
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        _fail(f"prunus {name}", str(error))
    except (MemoryError, RuntimeError) as error:
        from ..oneshot.resources import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        advice = "free some, give fewer or shorter samples, or lower --memory if the command has it"
        _fail(f"prunus {name}", f"there is too little memory: {advice}{_continued(name, args)}")
    except KeyboardInterrupt as stop:
        print(f"prunus {name}: interrupted{_continued(name, args)}", file=sys.stderr)
        raise SystemExit(getattr(stop, "exit_code", 130)) from None


def _continued(name: str, args: list[str]) -> str:
    """What to say of a command that was stopped if it goes on where it was when it is called again."""
    options = args[1:]
    goes_on = name in ("demo", "recover", "shrink")
    if name == "study":
        goes_on = options[:1] not in (["merge"], ["show"], ["page"])
    elif name == "export":
        goes_on = "--bits" in options
    elif name == "prune":
        goes_on = not {"--probe", "--no-repair"} & set(options)
    elif name == "eval":
        goes_on = any(option.partition("=")[0] == "--answers" for option in options)
    return f"; the same command continues: prunus {shlex.join(args)}" if goes_on else ""


def _parse(kind: type[Any], name: str, args: list[str]) -> Any:
    import tyro

    if {"-h", "--help"} & set(args):
        from .help import help_page

        print(help_page(kind, name))
        raise SystemExit(0)
    for number, arg in enumerate(args):
        flag, _, value = arg.partition("=")
        if new := MOVED.get((name, flag)):
            value = value or next(iter(args[number + 1 :]), "")
            _fail(f"prunus {name}", f"{flag} is not an option any more; write {new.replace('VALUE', value)}")
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "2000"  # of what the parser prints no line is broken
    try:
        with contextlib.redirect_stderr(io.StringIO()) as page:
            return tyro.cli(kind, prog="prunus", args=args, config=(tyro.conf.PositionalMetavarFromFieldName,))
    except SystemExit as stop:
        if not stop.code:
            raise
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return _fail(f"prunus {name}", f"{_mistake(kind, page.getvalue())} (prunus {name} --help lists the options)")


def _mistake(kind: type[Any], page: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", page)
    lines = [line.strip("│ ") for line in plain.splitlines() if line.strip("─-│ ")]
    if len(lines) > 3 and lines[1].startswith("Missing from"):
        return f"{lines[2].split()[0]} is missing: {lines[3].removesuffix('(required)').strip()}"
    what = lines[1].removeprefix(f"Error parsing {kind.__name__}: ")  # line 0 is the page's title
    if wrong := re.match(r"Error parsing (--[\w-]+): .*\b(?i:int|float)\b.*'(.*)'", what):
        option, given = wrong.groups()
        hint = f"; {given} is {float(given[:-1]) / 100:g}" if re.fullmatch(r"\d+(\.\d+)?%", given) else ""
        return f"{option} takes a {'' if 'float' in what.lower() else 'whole '}number, got {given!r}{hint}"
    if wrong := re.match(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", what):
        given, option, choices = wrong.groups()
        known = sorted(choice for choice in re.findall(r"'([^']*)'", choices) if choice != "None")
        return f"{option} is one of {', '.join(known)}; got {given!r}"
    near = [line.split()[0] for line in lines if re.match(r"--[a-z]", line)]
    return f"{what}; did you mean {near[0]}?" if near and what.startswith("Unrecognized") else what


def _fail(who: str, what: str) -> NoReturn:
    from .console import escaped

    of_ranks = ("prunus train", "prunus recover", "prunus prune", "prunus shrink")
    rank = os.environ.get("RANK", "0") if who in of_ranks else "0"
    if rank != "0":  # usually rank 0 has the same error, reports it and torchrun ends the others; else this one is late
        time.sleep(10)
        who = f"{who}: rank {rank}"
    line = escaped(f"{who}: {' '.join(what.split())}")
    print(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...", file=sys.stderr)
    raise SystemExit(2)
