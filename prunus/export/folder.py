"""What else than tensors belongs to a model's folder."""

import shutil
from pathlib import Path

from ..files.safetensors_header import file_error, strict_json

BESIDE = {".json", ".txt", ".model", ".jinja", ".md", ".vocab"}  # configuration, tokenizer, licence


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
