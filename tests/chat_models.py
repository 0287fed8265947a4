"""A tokenizer with a chat template, and problems for tiny models that can be asked."""

import json

import pytest

from prunus.export.huggingface import quiet_transformers

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def chat_tokenizer(folder, template=TEMPLATE):
    """A token for each byte, and <s>, which begins and ends."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0} | {c: i for i, c in enumerate(alphabet, 1)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<s>", chat_template=template)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save(model, folder):
    with quiet_transformers():
        model.save_pretrained(folder)


def write_problems(path, num):
    with path.open("w") as file:
        for i in range(num):
            test = f"def check(candidate):\n    assert candidate() == {i}\n"
            row = {"task_id": f"own/{i}", "prompt": f'def f{i}():\n    """{i}"""\n', "entry_point": f"f{i}"}
            file.write(json.dumps(row | {"test": test}) + "\n")
