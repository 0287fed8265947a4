"""Models, batches and settings that are seldom met: what recovery promises holds for them too."""

import random
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from students import VOCAB, Segmenter, are_equal, bits_of, llama, pruned, sequences, zeros_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from prunus import recover
from prunus.recovery.loss import Distillation
from prunus.recovery.teacher import Teacher

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def teacher():
    return llama()


def mlp(num_outputs=3):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, num_outputs))


def classifier(num_labels):
    torch.manual_seed(1)
    return BertForSequenceClassification(BertConfig(vocab_size=70, num_labels=num_labels, **TINY)).eval()


def loss_of(student, teacher, batches, hard=0.0):
    """The loss that one step over some batches has."""
    distillation = Distillation(student, Teacher(teacher, torch.device("cpu")), hard)
    with distillation.teacher.open():
        distillation.prepare(batches, torch.device("cpu"))
        counts = [distillation.counts(batch) for batch in batches]
        total = type(counts[0])(*map(sum, zip(*counts, strict=True)))
        return sum(distillation(student, batch, total) for batch in batches)


def kl(found, expected, dim=-1):
    p, q = expected.log_softmax(dim), found.log_softmax(dim)
    return (p.exp() * (p - q)).sum(dim)


def text_batches(side):
    """Ragged, with padding on one side, and labels for the second half alone."""
    batches = []
    for length, batch in zip((12, 7, 10), sequences(3), strict=True):
        batch, mask = batch[:, :length], torch.ones_like(batch[:, :length])
        mask[0, : length // 2] = 0
        mask = mask.flip(1) if side == "right" else mask
        labels = batch.masked_fill(torch.arange(length) < length // 2, -100)
        batches.append({"input_ids": batch, "attention_mask": mask, "labels": labels})
    return batches


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("vocab_size", [VOCAB, 70])
def test_the_loss_of_text_is_its_definition(side, vocab_size):
    """With the head alone, and with whole logits."""
    model = llama(vocab_size=vocab_size)
    student, batches = pruned(model), text_batches(side)
    divergences, entropies = [], []
    for batch in batches:
        named = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        found, expected, counts = student(**named).logits, model(**named).logits, batch["attention_mask"].bool()
        divergences.append(kl(found, expected)[counts])
        is_learned = counts[:, 1:] & counts[:, :-1] & (batch["labels"][:, 1:] != -100)
        entropies.append(
            F.cross_entropy(found[:, :-1][is_learned], batch["labels"][:, 1:][is_learned], reduction="none")
        )
    expected = torch.cat(divergences).mean() + 0.7 * torch.cat(entropies).mean()
    torch.testing.assert_close(loss_of(student, model, batches, 0.7), expected, rtol=1e-4, atol=1e-6)


def test_the_loss_of_classes_of_text_is_a_mean_over_samples():
    model = classifier(12)  # as many as there are tokens
    student = pruned(model)
    batches = [{"input_ids": b, "attention_mask": torch.ones_like(b), "labels": torch.arange(4)} for b in sequences(2)]
    batches[0]["attention_mask"][:, 3:] = 0
    pairs = [({k: v for k, v in batch.items() if k != "labels"}, batch["labels"]) for batch in batches]
    found, expected = (torch.cat([model(**inputs).logits for inputs, _ in pairs]) for model in (student, model))
    expected = kl(found, expected).mean() + 0.7 * F.cross_entropy(found, torch.arange(4).repeat(2))
    torch.testing.assert_close(loss_of(student, model, batches, 0.7), expected, rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_segmentation_is_a_mean_over_pixels():
    model = Segmenter().eval()
    student, batches = pruned(model, 0.5), [(torch.randn(3, 1, 6, n), torch.randint(3, (3, 6, n))) for n in (7, 7)]
    found, expected = (torch.cat([each(x) for x, _ in batches]) for each in (student, model))
    labels = torch.cat([y for _, y in batches])
    expected = kl(found, expected, 1).mean() + 0.7 * F.cross_entropy(found, labels)
    torch.testing.assert_close(loss_of(student, model, batches, 0.7), expected, rtol=1e-4, atol=1e-6)


def test_the_loss_of_several_labels_is_a_mean_over_all_of_them():
    model = mlp(4)
    student, batches = pruned(model, 0.5), [(torch.randn(5, 6), torch.randint(2, (5, 4)).float()) for _ in range(6)]
    found, labels = torch.cat([student(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    hard = loss_of(student, model, batches, 0.7) - loss_of(student, model, batches)
    torch.testing.assert_close(hard, 0.7 * F.binary_cross_entropy_with_logits(found, labels), rtol=1e-4, atol=1e-6)
    recovery = recover(student, model, batches, steps=1, held_out=batches, progress=False)
    assert recovery.before.loss == pytest.approx(F.binary_cross_entropy_with_logits(found, labels).item(), rel=1e-5)


def test_the_loss_of_a_decoder_is_a_mean_over_its_own_tokens():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes)).eval()
    student = pruned(model, 0.5)
    batches = [{"input_ids": batch, "decoder_input_ids": batch[:, :5]} for batch in sequences(2)]
    found, expected = (torch.cat([each(**batch).logits for batch in batches]) for each in (student, model))
    torch.testing.assert_close(loss_of(student, model, batches), kl(found, expected).mean(), rtol=1e-4, atol=1e-6)


def test_a_classifier_of_many_classes_has_an_accuracy():
    model = classifier(VOCAB)
    batches = [{"input_ids": b, "attention_mask": torch.ones_like(b), "labels": torch.arange(4)} for b in sequences(4)]
    assert recover(pruned(model), model, batches, steps=1, progress=False).after.accuracy is not None


def test_targets_are_numbers_where_one_of_them_is():
    """Though those of the first sample are 0."""
    model, batches = mlp(1), [(torch.randn(5, 6), torch.arange(5.0).view(5, 1) * 1.3) for _ in range(4)]
    assert recover(pruned(model), model, batches, steps=1, progress=False).distance == "mean square"


def test_a_hook_that_changes_logits_is_seen(teacher):
    student, other = pruned(teacher), deepcopy(teacher)
    for model in (student, other):
        model.lm_head.register_forward_hook(lambda module, args, output: 3 * output)
    recovery = recover(student, other, sequences(4), steps=1, progress=False)
    assert recovery.notes and "whole batches" in recovery.notes[0]


def test_a_matrix_of_zeros_stays_one(teacher):
    student = pruned(teacher)
    with torch.no_grad():
        student.model.layers[0].mlp.up_proj.weight.zero_()
        student.lm_head.weight[3] = 0
        student.model.embed_tokens.weight[:, 2] = 0
    zeros = zeros_of(student)
    recovery = recover(student, teacher, sequences(6), steps=3, progress=False)
    assert are_equal(zeros_of(student), zeros) and recovery.num_zeros == sum(int(zero.sum()) for zero in zeros.values())


def test_new_adapters_learn_though_they_begin_as_zeros(teacher):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up_proj", "down_proj"])
    student = peft.get_peft_model(pruned(teacher), config)
    before = bits_of(student)
    recover(student, teacher, sequences(6), steps=3, train="*lora_*", progress=False)
    changed = {name for name, values in bits_of(student).items() if not torch.equal(values, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_zeros_of_what_does_not_learn_are_counted_too(teacher):
    student = pruned(teacher)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that nothing was pruned
        recovery = recover(student, teacher, sequences(6), steps=1, train="*norm*", progress=False)
    assert recovery.num_zeros == sum(int(zero.sum()) for zero in zeros_of(student).values())


def test_bf16_leaves_the_forward_of_the_student_as_it_was(teacher):
    student = pruned(teacher)
    names, dtype = set(vars(student)), teacher(sequences(1)[0]).logits.dtype
    recover(student, teacher, sequences(6), steps=2, bf16=True, progress=False)
    assert set(vars(student)) == names and student(sequences(1)[0]).logits.dtype == dtype


def test_random_numbers_go_on_as_if_nothing_had_drawn_any(teacher):
    class Noisy(TensorDataset):
        def __getitem__(self, at):
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(at)

    loader = DataLoader(Noisy(torch.cat(sequences(8))), batch_size=4, shuffle=True)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    recover(pruned(teacher), teacher, loader, steps=2, held_out=2, progress=False)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_a_generator_may_have_held_out_batches_of_its_own(teacher):
    recovery = recover(pruned(teacher), teacher, iter(sequences(4)), steps=4, held_out=sequences(2), progress=False)
    assert recovery.steps == 4


def test_small_weights_get_a_rate_below_those_of_the_first_trials():
    """Rates that suit most models are many times these weights, and leave nothing of what they do."""
    torch.manual_seed(2)
    teacher = nn.Linear(6, 8, bias=False)
    with torch.no_grad():
        teacher.weight.mul_(1e-4)
    inputs = torch.randn(640, 6) @ torch.randn(6, 6) * 1e4
    student = deepcopy(teacher)
    with torch.no_grad():
        student.weight[:, ::2] = 0
    recovery = recover(student, teacher, list(inputs.split(16)), steps=300, progress=False)
    assert recovery.lr < 5e-4 and recovery.lr_reason.count(":") > 3  # trials
    assert recovery.after.kl < recovery.before.kl and recovery.steps == 300 and not recovery.notes
    assert not student.weight[:, ::2].any()


def test_a_rate_that_helps_nowhere_leaves_the_model_as_it_was_and_says_so(teacher):
    student = pruned(teacher)
    before = bits_of(student)
    recovery = recover(student, teacher, sequences(8), steps=4, lr=30.0, progress=False)
    assert recovery.best_step == 0 and are_equal(bits_of(student), before)
    assert any("give an lr below 30" in note for note in recovery.notes)


def test_batches_that_end_within_a_trial_keep_the_best_state(teacher):
    student = pruned(teacher)
    with pytest.warns(UserWarning, match="ended after 10 of 300 steps"):
        recovery = recover(student, teacher, iter(sequences(12)), steps=300, held_out=2, progress=False)
    assert recovery.after.kl < recovery.before.kl and recovery.lr == 5e-4 and "trial 1 of 3" in recovery.lr_reason


def test_parameters_of_whole_numbers_stay_as_they_are():
    model = mlp()
    model[0].table = nn.Parameter(torch.arange(4), requires_grad=False)
    for options in ({}, {"offload_teacher": True}):
        student = pruned(model)
        recover(student, deepcopy(model), [torch.randn(5, 6) for _ in range(4)], steps=1, progress=False, **options)
        assert torch.equal(student[0].table, torch.arange(4)) and not student[0].table.requires_grad


def test_bad_input_leaves_no_folder(teacher, tmp_path):
    with pytest.raises(ValueError, match="different shapes"):
        other = llama(vocab_size=VOCAB + 1)
        recover(pruned(teacher), other, sequences(4), steps=1, out=tmp_path / "a" / "out", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("a single batch", {"held_out": torch.ones(4, 12, dtype=torch.int64)}),
        ("a single batch", {"held_out": {"input_ids": torch.ones(4, 12, dtype=torch.int64)}}),
        ("one sample per row", {"batches": [np.ones((4, 12), np.int64)] * 4}),
        ("meta device", {"teacher": deepcopy(mlp()).to("meta")}),
    ],
)
def test_odd_input_is_refused_in_one_line(teacher, said, change):
    options = {"teacher": teacher, "batches": sequences(4), "steps": 1, "progress": False} | change
    with pytest.raises(ValueError, match=said) as refused:
        recover(pruned(teacher), **options)
    assert "\n" not in str(refused.value)


@pytest.fixture
def folders(teacher, tmp_path):
    """A dense model with a tokenizer, and a text of about 4,000 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(60)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    teacher.save_pretrained(tmp_path / "dense")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(words[i * i % 60] for i in range(4000)))
    (tmp_path / "short.txt").write_text(" ".join(words * 8))
    return tmp_path


@pytest.mark.slow
def test_one_command_prunes_and_recovers_text_however_little_it_is(folders, capsys):
    from prunus.cli import main

    command = ["prune", str(folders / "dense"), "--sparsity", "0.5", "--recover", "4k"]
    for name in ("text", "short"):
        main([*command, "--text", str(folders / f"{name}.txt"), "--out", str(folders / name)])
        assert "zeros kept" in capsys.readouterr().out
    assert {path.name for path in folders.iterdir()} == {"dense", "text.txt", "short.txt", "text", "short"}


def test_tokens_that_are_kept_are_those_of_their_text(folders):
    from prunus.trained.data import TokenCache

    cache = TokenCache(folders, 10_000)
    lengths = [len(cache.read(folders / name, folders / "dense", None).ids) for name in ("text.txt", "short.txt")]
    assert lengths == [4000, 480]
    text = (folders / "short.txt").read_text()
    (folders / "short.txt").write_text(text + text)
    assert len(cache.read(folders / "short.txt", folders / "dense", None).ids) > 480
