"""From a name or a path to data. Nothing is downloaded, and nothing is written."""

from pathlib import Path

from .batches import ImageData, TokenData, image_data, token_data
from .image_files import is_cifar10, is_mnist, read_cifar10, read_digits, read_mnist
from .token_files import HELD_OUT, read_stdlib, read_tokens


def load(
    spec: str | Path,
    *,
    context: int,
    validation: str | Path | None = None,
    vocab_size: int | None = None,
    augment: bool = False,
) -> TokenData | ImageData:
    """The data that ``spec`` names: "stdlib", "digits", a file of text or tokens, or a folder of images.

    ``context``, ``validation`` and ``vocab_size`` are for tokens, ``augment`` (crops and flips) is for CIFAR-10.
    Without a ``validation`` file the last 5 % of the tokens are held out; without a ``vocab_size`` bytes have 256,
    and uint16 tokens the largest + 1, rounded up to a multiple of 64.
    """
    if str(spec) == "digits" or Path(spec).is_dir():
        if validation is not None or vocab_size is not None:
            raise ValueError(f"{spec} holds images, which take neither validation nor vocab_size; leave them out")
        return _load_images(spec, augment)
    if augment:
        raise ValueError(f"augment crops and flips images, but {spec} holds tokens; leave it out")
    if str(spec) == "stdlib":
        train, held_out = read_stdlib()
    else:
        tokens = read_tokens(Path(spec))
        edge = len(tokens) - (round(HELD_OUT * len(tokens)) if validation is None else 0)
        train, held_out = tokens[:edge], tokens[edge:]
    if validation is not None:
        held_out = read_tokens(Path(validation))
    return token_data(train, held_out, context, vocab_size)


def _load_images(spec: str | Path, augment: bool) -> ImageData:
    folder = Path(spec)
    if str(spec) != "digits" and is_cifar10(folder):
        return image_data(*read_cifar10(folder), augment=augment)
    if augment:
        raise ValueError(f"augment crops and flips as is usual for CIFAR-10, which {spec} is not; leave it out")
    if str(spec) == "digits":
        return image_data(*read_digits())
    if is_mnist(folder):
        return image_data(*read_mnist(folder))
    raise ValueError(
        f"{folder} is neither MNIST (train-images-idx3-ubyte.gz and three more)"
        f" nor CIFAR-10 (data_batch_1.bin or .png and more); give the folder that holds these files"
    )
