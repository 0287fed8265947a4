"""prunus eval --problems asks, runs and counts; what is finished is kept, and is not done again."""

import json

import pytest
import torch
from causal_models import causal_model
from chat_models import TEMPLATE, chat_tokenizer, save, write_problems
from small_gguf import write_gguf
from test_cli import refused

from prunus.cli import answering, main
from prunus.sparse import Decoder

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
RIGHT = "```python\ndef f{0}():\n    return {0}\n```"
WRONG = "```python\ndef f{0}():\n    return {0} + 1\n```"


@pytest.fixture
def folder(tmp_path):
    save(causal_model(vocab_size=257, max_position_embeddings=256, eos_token_id=0), tmp_path / "model")
    chat_tokenizer(tmp_path / "model")
    write_problems(tmp_path / "problems.jsonl", 7)
    return tmp_path


@pytest.fixture
def answered(monkeypatch):
    """Problems that the model was asked; it answers the even ones rightly."""
    numbers = []

    def answer(self, prompts):
        asked = [int(self.tokenizer.decode(prompt).split("def f")[1].split("(")[0]) for prompt in prompts]
        numbers.extend(asked)
        return [(WRONG if i % 2 else RIGHT).replace("{0}", str(i)) for i in asked]

    monkeypatch.setattr(answering.Chat, "__call__", answer)
    return numbers


def command(folder, *options):
    return ["eval", *map(str, [folder / "model", "--problems", folder / "problems.jsonl", "--device", "cpu", *options])]


def line_of(folder, *options, capsys):
    main(command(folder, "--run-code", *options))
    return capsys.readouterr().out


def test_pass_at_1_is_printed_with_its_interval(folder, answered, capsys):
    said = line_of(folder, "--batch", 3, capsys=capsys)
    shown = "pass@1 0.571 (4 of 7; 95 % interval 0.250 to 0.842) on problems.jsonl"
    assert said == f"{folder / 'model'}: {shown}\n" and answered == list(range(7))
    assert "(4 of 4; " in line_of(folder, "--samples", 4, capsys=capsys) and answered[7:] == [0, 2, 4, 6]
    assert "0 of 7" not in said and sorted(path.name for path in folder.iterdir()) == ["model", "problems.jsonl"]


def test_answers_are_kept_and_a_repeated_command_runs_nothing(folder, answered, capsys, monkeypatch):
    said = line_of(folder, "--answers", folder / "kept.jsonl", capsys=capsys)
    settings, *rows = map(json.loads, (folder / "kept.jsonl").read_text().splitlines())
    assert settings["settings"]["max_new_tokens"] == 1024 and len(rows) == 7
    assert rows[1] == {
        "task_id": "own/1", "verdict": "failed", "why": "AssertionError", "answer": WRONG.replace("{0}", "1"),
    }  # fmt: skip
    monkeypatch.setattr(answering, "load_any_model", None)
    assert line_of(folder, "--answers", folder / "kept.jsonl", capsys=capsys) == said and len(answered) == 7
    (folder / "model").rename(folder / "moved")  # the same model, in another place
    (folder / "moved").rename(folder / "model")
    assert "(0 of 3; " in line_of(folder, "--answers", folder / "kept.jsonl", "--samples", 3, capsys=capsys)


def test_a_killed_command_goes_on_wherever_it_was_cut(folder, answered, capsys):
    kept = folder / "kept.jsonl"
    said = line_of(folder, "--answers", kept, capsys=capsys)
    whole = kept.read_bytes()
    ends = [place for place, byte in enumerate(whole, 1) if byte == 10]
    for cut in (0, 20, ends[0] - 1, ends[0], ends[2] - 1, ends[3], ends[3] + 5, ends[-1] - 1):
        kept.write_bytes(whole[:cut])
        answered.clear()
        assert line_of(folder, "--answers", kept, capsys=capsys) == said
        assert kept.read_bytes() == whole
        assert len(answered) == 7 - max(0, sum(end <= cut for end in ends) - 1)


def test_answers_of_another_model_or_other_settings_are_refused(folder, answered, capsys):
    kept = folder / "kept.jsonl"
    line_of(folder, "--answers", kept, capsys=capsys)
    before = kept.read_bytes()
    again = command(folder, "--run-code", "--answers", kept)
    assert "a run that differs in max_new_tokens; choose another --answers" in refused(
        capsys, *again, "--max-new-tokens", 5
    )
    write_problems(folder / "problems.jsonl", 8)
    assert "differs in problems;" in refused(capsys, *again)
    write_problems(folder / "problems.jsonl", 7)
    save(causal_model(vocab_size=257, max_position_embeddings=256), folder / "model")
    assert "differs in model;" in refused(capsys, *again)
    assert kept.read_bytes() == before
    for content in (
        "mine",
        "[]\n",
        "x\n",
        '{"settings": {}}\n',
        '{"settings": 3}\n',
        before.decode() + '{"task_id": "a"}\n',
    ):
        kept.write_text(content)
        assert "is not a file of answers, or is damaged" in refused(capsys, *again)
        assert kept.read_text() == content


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ([], "add --run-code to allow it"),
        (["--run-code", "--text", "a.txt"], "--text does not go with --problems"),
        (["--run-code", "--every-layer"], "--every-layer does not go with --problems"),
        (["--run-code", "--batch", "17"], "--batch must be 1 to 16"),
        (["--run-code", "--max-new-tokens", "0"], "--max-new-tokens at least 1"),
        (["--run-code", "--samples", "-1"], "--samples must be at least 0"),
        (["--run-code", "--answers", "nowhere/kept.jsonl"], "cannot be written"),
        (["--run-code", "--answers", "."], "cannot be written"),
        (["--run-code", "--device", "nowhere"], "there is no device 'nowhere'"),
    ],
)
def test_bad_options_are_one_line(options, match, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert match in refused(capsys, *command(folder, *options))


def test_options_of_problems_without_problems_are_refused(folder, capsys):
    for option in (["--run-code"], ["--answers", "a"], ["--samples", 3], ["--batch", 2], ["--max-new-tokens", 5]):
        assert "is for programming problems" in refused(capsys, "eval", folder / "model", *option)
    assert "there is no file" in refused(capsys, "eval", folder / "model", "--problems", folder / "no", "--run-code")
    for path in (folder, folder / "no", folder / "no.gguf"):
        assert "no config.json" in refused(capsys, "eval", path, "--problems", folder / "problems.jsonl", "--run-code")


def test_a_model_that_cannot_be_asked_is_one_line(folder, capsys):
    asked = command(folder, "--run-code")
    chat_tokenizer(folder / "model", template="{{ raise_exception('no users') }}")
    assert "chat template does not take a question: no users" in refused(capsys, *asked)
    chat_tokenizer(folder / "model", template="{{ 'many ' * 99 }}")
    assert "a prompt has 495 tokens, but" in refused(capsys, *asked)
    (folder / "model" / "chat_template.jinja").unlink()
    chat_tokenizer(folder / "model", template=None)
    assert "has a tokenizer without chat template, so it cannot be asked" in refused(capsys, *asked)
    (folder / "model" / "tokenizer.json").unlink()
    assert "no tokenizer that transformers can read" in refused(capsys, *asked)


def test_a_small_vocabulary_is_one_line(folder, capsys):
    save(causal_model(vocab_size=64), folder / "model")
    assert "but the model's vocabulary has 64" in refused(capsys, *command(folder, "--run-code"))


def test_without_memory_it_is_one_line_and_the_command_goes_on(folder, answered, capsys, monkeypatch):
    kept, answer = folder / "kept.jsonl", answering.Chat.__call__

    def fail_later(self, prompts):
        if len(answered) >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return answer(self, prompts)

    monkeypatch.setattr(answering.Chat, "__call__", fail_later)
    said = refused(capsys, *command(folder, "--run-code", "--batch", 2, "--answers", kept))
    assert "there is too little memory" in said and "the same command continues" in said
    monkeypatch.setattr(answering.Chat, "__call__", answer)
    assert "4 of 7" in line_of(folder, "--answers", kept, "--batch", 1, capsys=capsys) and answered == list(range(7))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "a penalty", "MambaForCausalLM"])
def test_answers_are_the_greedy_text_of_the_model_up_to_its_end_or_the_limit(name, tmp_path):
    tokenizer, sizes = chat_tokenizer(tmp_path), {"vocab_size": 257, "eos_token_id": 5}
    if name == "MambaForCausalLM":  # without a static cache
        model = transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, **sizes))
    elif name == "GPT2LMHeadModel":
        model = causal_model(name, **sizes)
    else:
        model = causal_model(**sizes)
    model.generation_config.repetition_penalty = 1.3 if name == "a penalty" else None
    prompts = [torch.randint(6, 257, (length,)).tolist() for length in (3, 9, 1, 6)]
    chat = answering.Chat(model.eval(), tokenizer, 12)
    assert chat.decoder is None or name not in ("a penalty", "MambaForCausalLM")
    for prompt, text in zip(prompts, chat(prompts), strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [0, 5], "pad_token_id": 0}
        new = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        ended = [token for token in new if token not in (0, 5)]
        assert text == tokenizer.decode(ended)


def test_an_endless_answer_ends_at_the_limit_and_where_the_model_ends(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizer = chat_tokenizer(folder)
    tokenizer.eos_token = None
    for most, num in ((40, 40), (1000, 256 - 9)):
        chat = answering.Chat(model, tokenizer, most)
        for decoder in (chat.decoder, None):
            chat.decoder = decoder
            assert len(chat._tokens([[*range(1, 10)], [3]])[0]) == num


def test_a_decoder_that_fails_at_the_first_prompt_gives_way_to_generate(folder, monkeypatch):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    chat = answering.Chat(model, chat_tokenizer(folder), 6)
    if chat.decoder is None:
        pytest.skip("the decoder needs transformers 5")
    text = chat([[7, 8, 9]])

    def refuse(*args, **options):
        raise ValueError("does not run with a static cache")

    monkeypatch.setattr(Decoder, "generate", refuse)
    assert chat([[7, 8, 9]]) == text and chat.decoder is None


def test_a_gguf_file_is_asked_by_its_own_template(tmp_path, capsys):
    pytest.importorskip("gguf")
    write_problems(tmp_path / "problems.jsonl", 1)
    asked = ["eval", tmp_path / "model.gguf", "--problems", tmp_path / "problems.jsonl", "--run-code"]
    write_gguf(tmp_path / "model.gguf")
    assert "tokenizer without chat template" in refused(capsys, *asked)
    write_gguf(tmp_path / "model.gguf", context=512, template=TEMPLATE)
    main([*map(str, asked), "--max-new-tokens", "5", "--device", "cpu"])
    assert "pass@1 0.000 (0 of 1;" in capsys.readouterr().out


def test_a_model_that_writes_nonsense_solves_nothing(folder, capsys):
    assert "(0 of 7; " in line_of(folder, "--max-new-tokens", 8, "--batch", 3, capsys=capsys)
