"""``prunus export``"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from .console import print
from .shared_options import Bits, given, size_in_bytes

if TYPE_CHECKING:
    from ..export.convert import Exported


HEADS = ("stored as", "tensors", "non-zero", "dense MB", "stored MB", "ratio")


@dataclass(frozen=True)
class Command:
    """Write a model in the small form, which packs zeros without loss, or in the plain form that any tool loads.

    SOURCE is a Hugging Face folder or a .safetensors file, small or plain, or a checkpoint of prunus train.

    With --bits, the kept weights of a folder or a checkpoint are quantised; its zeros stay. If the command is killed,
    repeat it: it continues with the next layers.
    """

    source: tyro.conf.Positional[Path]  # model folder, .safetensors file, checkpoint.pt, or run folder
    out: Path | None = None  # new folder or .safetensors file to write
    form: Literal["sparse", "dense"] = "sparse"  # sparse: the small form; dense: the plain form
    check: bool = False  # read back what was written, compare every bit, and load the model
    bits: Bits | None = None  # quantise the kept weights to this many bits
    text: Path | None = None  # with --bits: calibration text, a file or a folder
    tokens: Path | None = None  # with --bits: calibration token ids, instead of --text (.u16, .bin, .u32 or .npy)
    batches: Path | None = None  # with --bits: .npz file of named inputs, one row per sample, instead of --text
    samples: int | None = None  # with --bits: calibration windows; default: up to 128
    length: int = 0  # with --bits: tokens per window; 0: 256, at most the model's maximum
    seed: int = 0  # with --bits: seed for choosing calibration windows
    max_shard_size: str = "5GB"  # largest file, in B, KB, MB or GB; larger models are split
    push: str | None = None  # upload --out, or without it SOURCE, to this Hugging Face Hub repository (user/model)
    private: bool = False  # make a new --push repository private
    advise: bool = False  # write nothing; measure, layer by layer, whether a sparse model is faster on this machine
    device: str = "cpu"  # cpu or cuda: where --bits quantises, or where --advise measures
    batch: int = 1  # with --advise: sequences decoded at a time
    prompt_tokens: int = 4096  # with --advise: tokens in a prompt


FILES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".npz", ".gguf", ".onnx", ".h5", ".json", ".safetensor")
OF_FILES = ("form", "check", "max_shard_size")
ADVICE, WRITING = ("batch", "prompt_tokens"), ("out", *OF_FILES, "push", "private", "bits")
CALIBRATION = ("text", "tokens", "batches", "samples", "length", "seed")


def run(command: Command) -> None:
    _refuse_unread(command)
    if command.advise:
        _advise(command)
        return
    if command.bits is not None:
        _quantise(command, command.bits)
        return
    if command.private and command.push is None:
        raise ValueError("without --push nothing reads --private; leave it off")
    if command.push is not None:
        _check_push(command)
    if command.out is not None or command.push is None:
        _convert(command)
    if command.push is not None:
        from ..export.hub import push

        folder = command.out or command.source
        print(f"{folder}: pushed to {push(folder, command.push, private=command.private)}")


def _check_push(command: Command) -> None:
    from ..export.hub import check_push

    if command.out is None and not command.source.is_dir():
        raise ValueError(f"--push uploads a folder, and {command.source} is not one; pass --out with a new folder")
    if command.out is None and given(command, *OF_FILES):
        raise ValueError("without --out the folder is pushed as it is; leave off --form, --check and --max-shard-size")
    if command.out is not None and command.out.suffix == ".safetensors":
        raise ValueError(f"--push uploads a folder, but --out is the file {command.out}; give a folder")
    check_push(str(command.push))


def _refuse_unread(command: Command) -> None:
    if command.advise and command.tokens is not None:
        raise ValueError(f"--tokens is a file that --bits reads; write --prompt-tokens {command.tokens}")
    for flag in given(command, *WRITING, *CALIBRATION) if command.advise else ():
        raise ValueError(f"--advise measures and writes nothing; leave off {flag}, or --advise")
    of_advice = ADVICE if command.bits is not None else (*ADVICE, "device")
    for flag in given(command, *of_advice) if not command.advise else ():
        raise ValueError(f"{flag} says what --advise measures; add --advise, or leave {flag} off")
    if command.bits is None:
        for flag in given(command, *CALIBRATION):
            raise ValueError(f"{flag} says what --bits calibrates on; add --bits 4, or leave {flag} off")
        return
    if command.form != "sparse":
        raise ValueError(
            "--bits writes the small form; leave off --form, then make the result plain: "
            f"prunus export {command.out} --form dense --out PLAIN"
        )
    for flag in given(command, *OF_FILES):
        raise ValueError(f"--bits writes the small form, which prunus doctor checks; leave off {flag}, or --bits")


def _quantise(command: Command, bits: Bits) -> None:
    from .quantising import Quantising, export

    if command.out is None or command.out.suffix.lower() in (*FILES, ".safetensors"):
        raise ValueError(f"--bits writes a folder; pass --out with a new one, got {command.out}")
    has_config = (command.source / "config.json").is_file()
    if not has_config and _checkpoint(command.source) is None:
        raise ValueError(
            f"--bits runs the model, and {command.source} is neither a Hugging Face folder with config.json nor a "
            "checkpoint of prunus train"
        )
    known = {name: getattr(command, name) for name in (*CALIBRATION, "out", "push", "private", "device")}
    job = Quantising(model=str(command.source), bits=bits, **known)
    for flag in given(command, "samples", "length", "seed") if not job.has_data else ():
        raise ValueError(f"without --text, --tokens or --batches nothing reads {flag}; leave it off")
    for flag in given(command, "text", "tokens", "batches", "length") if not has_config else ():
        raise ValueError(f"{command.source} is calibrated on the data that it was trained on; leave off {flag}")
    export(job)


def _advise(command: Command) -> None:
    from ..sparse.advise import Load, advise

    load, checkpoint = Load(command.batch, command.prompt_tokens), _checkpoint(command.source)
    if checkpoint is None:
        print(advise(command.source, command.device, load))
    else:
        from ..lab.checkpoint import load_checkpoint

        print(advise(load_checkpoint(checkpoint)["model"], command.device, load))


def _convert(command: Command) -> None:
    from ..export.convert import ExportJob, convert
    from ..oneshot.progress import progress_line

    if command.out is None:
        raise ValueError("there is no --out; give a new folder or a .safetensors file")
    if command.out.suffix.lower() in FILES:
        raise ValueError(f"--out is a folder to make or a .safetensors file, and {command.out} looks like another file")
    size = size_in_bytes(command.max_shard_size)
    job = ExportJob(command.out, command.form == "sparse", command.check, size, repo=command.push)
    checkpoint = _checkpoint(command.source)
    loaded: list[str] = []
    if checkpoint is None:
        if command.check and (command.source / "config.json").is_file():
            from ..export.huggingface import check_loads

            job = replace(job, check_folder=lambda folder: loaded.append(check_loads(command.source, folder)))
        with progress_line(None, "export") as report:
            done = convert(command.source, replace(job, report=report))
    else:
        from ..lab.trained_run import export_checkpoint

        if job.out.suffix == ".safetensors":
            raise ValueError(
                f"a checkpoint becomes a folder with its run.json; --out is the file {job.out}: give a folder"
            )
        with progress_line(None, "export") as report:
            done = export_checkpoint(checkpoint, replace(job, report=report))
    _show(command, done, *loaded)


def _checkpoint(path: Path) -> Path | None:
    from ..lab.checkpoint import checkpoint_of

    if path.is_dir():
        inside = checkpoint_of(path)
        return inside if inside.exists() else None
    return path if path.suffix == ".pt" else None


def _show(command: Command, done: "Exported", *loaded: str) -> None:
    rows = done.saved.rows
    names = dict.fromkeys(row.encoding for row in rows)
    kinds = {encoding: [row for row in rows if row.encoding == encoding] for encoding in names}
    lines = [HEADS, *((kind, *_cells(some)) for kind, some in kinds.items()), ("all", *_cells(rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join([line[0].ljust(widths[0]), *cells]))
    if (negative := sum(row.num_negative_zeros for row in rows)) and command.form == "sparse":
        print(
            f"{negative:,} elements are -0.0 and are stored as values, since every bit is kept; "
            "weight * mask makes them: set weight[weight == 0] = 0 before the export for a smaller file"
        )
    if command.form == "sparse" and done.bytes_after >= done.bytes_before:
        print(f"The small form saves nothing here: too few elements of {command.source} are zero; prune it first.")
    checked = "" if done.check_seconds is None else f", every bit read back and compared in {done.check_seconds:.2f} s"
    print(
        f"{command.out}: {done.bytes_before:,} bytes became {done.bytes_after:,} in {len(done.saved.files)} file"
        f"{'s' if len(done.saved.files) > 1 else ''} ({_ratio(done.bytes_after, done.bytes_before)}), "
        f"written in {done.write_seconds:.2f} s{', '.join([checked, *loaded])}"
    )


def _cells(rows: list[Any]) -> list[str]:
    numel, kept = sum(row.numel for row in rows), sum(row.num_nonzero for row in rows)
    dense, stored = sum(row.dense_bytes for row in rows), sum(row.stored_bytes for row in rows)
    share = f"{kept / numel:.2%}" if numel else ""
    return [f"{len(rows):,}", share, f"{dense / 1e6:,.2f}", f"{stored / 1e6:,.2f}", _ratio(stored, dense)]


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else ""
