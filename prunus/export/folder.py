"""Model folders: which file of one holds the tensors, and what else belongs to a model."""

import shutil
from pathlib import Path

from .header import file_error, strict_json

# A small model has a name of its own: a tool that knows only model.safetensors then says that there is none,
# where it would otherwise warn of unknown names and go on with random weights.
SMALL, PLAIN = "sparse.safetensors", "model.safetensors"
BESIDE = {".json", ".txt", ".model", ".jinja", ".md", ".vocab"}  # configuration, tokenizer, licence


def located(path: Path) -> Path:
    """The file or index that a file, an index or a folder stands for.

    A file that was too large stands as its index: what was saved under a name is found under it.
    """
    if not path.is_dir():
        index = path.with_name(path.name + ".index.json")
        if not path.is_file() and not index.is_file():
            raise ValueError(f"there is no file or folder {path}")
        return path if path.is_file() else index
    names = [name + end for name in (SMALL, PLAIN) for end in ("", ".index.json")]
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise ValueError(f"{path} holds no tensors: none of {', '.join(names)}; a file of another name is given itself")
    if found[0].name.startswith("sparse") and found[-1].name.startswith("model"):
        raise ValueError(f"{path} holds both {found[0].name} and {found[-1].name}; name the one that is meant")
    return found[0]


def copy_beside(source: Path, target: Path) -> None:
    """Copy what lies beside the weights of a model; what is there already stays."""
    for path in sorted(source.iterdir()):
        wanted = path.suffix in BESIDE or path.name.upper().startswith("LICENSE")
        if wanted and path.is_file() and not path.name.endswith(".index.json") and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def ties_words(folder: Path) -> bool:
    """Whether the model's configuration ties its head to its embedding, so that one of them need not be stored."""
    path = folder / "config.json"
    try:
        config = strict_json(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise file_error(path, error) from None
    return bool(config.get("tie_word_embeddings")) if isinstance(config, dict) else False
