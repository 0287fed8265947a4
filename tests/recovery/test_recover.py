"""A student learns from its teacher, its zeros stay where they are, and what was there can be brought back."""

import json
from copy import deepcopy

import pytest
import torch
from students import VOCAB, Segmenter, are_equal, bits_of, llama, pruned, sequences, zeros_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from prunus import prune, recover

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def teacher():
    return llama()


def test_the_student_comes_nearer_and_every_zero_stays(teacher):
    student = pruned(teacher)
    zeros, before = zeros_of(student), bits_of(student)
    recovery = recover(student, teacher, sequences(20), steps=12, held_out=3, progress=False)
    assert recovery.after.kl < 0.9 * recovery.before.kl and recovery.teacher.kl == 0
    assert recovery.after.loss < recovery.before.loss
    assert are_equal(zeros_of(student), zeros)
    assert recovery.num_zeros == sum(int(zero.sum()) for zero in zeros.values())
    changed = bits_of(student)
    assert not any(torch.equal(before[name], changed[name]) for name in before)  # norms, embedding and head too
    assert [point.step for point in recovery.curve] == [0, 3, 5, 8, 10, 12]
    assert recovery.curve[-1].tokens == recovery.tokens == 12 * 48 and recovery.steps == 12
    recovery.undo_()
    assert are_equal(bits_of(student), before)


def test_the_teacher_does_not_change_and_nothing_else_does(teacher):
    student, before = pruned(teacher), bits_of(teacher)
    student.train()
    student.lm_head.weight.requires_grad_(False)
    random, flags = torch.get_rng_state(), {name: p.requires_grad for name, p in student.named_parameters()}
    config = student.config.to_dict()
    recover(student, teacher, sequences(6), steps=2, progress=False)
    assert are_equal(bits_of(teacher), before) and not teacher.training
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    assert all(module.training for module in student.modules())
    assert {name: p.requires_grad for name, p in student.named_parameters()} == flags
    assert all(p.grad is None for p in student.parameters()) and torch.equal(torch.get_rng_state(), random)
    assert student.config.to_dict() == config  # the Trainer turns use_cache off


def test_prune_gives_the_teacher_and_refuses_to_undo_what_was_trained(teacher):
    student, batches = deepcopy(teacher), sequences(12)
    dense = bits_of(student)
    result = prune(student, batches[:2], sparsity=0.6)
    expected = bits_of(student)
    recovery = recover(student, result.dense(), batches, steps=4, progress=False)
    assert recovery.after.kl <= recovery.before.kl
    with pytest.raises(ValueError, match="trained or changed"):
        result.undo_()
    recovery.undo_()
    assert are_equal(bits_of(student), expected)
    result.undo_()
    assert are_equal(bits_of(student), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_learn_in_float32_and_end_in_their_own_type(teacher, dtype):
    student = pruned(teacher).to(dtype)
    zeros, before = zeros_of(student), bits_of(student)
    recovery = recover(student, teacher, sequences(12), steps=8, progress=False)
    assert {p.dtype for p in student.parameters()} == {dtype} and recovery.after.kl < recovery.before.kl
    assert are_equal(zeros_of(student), zeros)
    recovery.undo_()
    assert are_equal(bits_of(student), before)


def test_what_train_does_not_name_keeps_its_bits(teacher):
    student = pruned(teacher)
    before = bits_of(student)
    recover(student, teacher, sequences(8), steps=3, train=["*norm*", "*.mlp.*"], progress=False)
    changed = {name for name, values in bits_of(student).items() if not torch.equal(values, before[name])}
    assert changed == {name for name in before if "norm" in name or ".mlp." in name}


def test_a_student_that_gets_worse_ends_as_it_began(teacher):
    student = pruned(teacher, 0.1)
    before = bits_of(student)
    recovery = recover(student, teacher, sequences(8), steps=4, lr=3.0, progress=False)
    assert recovery.best_step == 0 and recovery.after == recovery.before
    assert are_equal(bits_of(student), before)


def test_an_interruption_leaves_the_student_as_it_was(teacher):
    def batches():
        yield from sequences(20)
        raise KeyboardInterrupt

    student = pruned(teacher)
    before = bits_of(student)
    with pytest.raises(KeyboardInterrupt):
        recover(student, teacher, batches(), steps=30, held_out=3, progress=False)
    assert are_equal(bits_of(student), before) and not any(p.grad is not None for p in student.parameters())


def test_without_a_teacher_the_labels_are_learned(teacher):
    student = pruned(teacher)
    zeros = zeros_of(student)
    recovery = recover(student, None, sequences(20), steps=12, progress=False)
    assert recovery.before.kl is None and recovery.after.loss < recovery.before.loss
    assert are_equal(zeros_of(student), zeros)


def test_hard_adds_the_labels_of_the_text(teacher):
    losses = {}
    for hard in (0.0, 5.0):
        student = pruned(teacher)
        losses[hard] = recover(student, teacher, sequences(20), steps=12, hard=hard, progress=False).after.loss
    assert losses[5.0] < losses[0.0]


def test_accumulated_batches_are_the_step_of_one_batch_of_their_tokens(teacher):
    small, padded = sequences(9, size=2), []
    for number, batch in enumerate(small):  # of different lengths: every token weighs the same
        mask = torch.ones_like(batch)
        mask[:, 12 - 5 * (number % 2) :] = 0
        padded.append({"input_ids": batch, "attention_mask": mask})
    large = [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in zip(padded[1::2], padded[2::2], strict=True)]
    held_out, states = padded[:1], []
    for batches, accumulate in ((padded[1:], 2), (large, 1)):
        student = pruned(teacher)
        recover(student, teacher, batches, steps=3, accumulate=accumulate, held_out=held_out, progress=False)
        states.append(bits_of(student))
    for name, values in states[0].items():
        assert float((values - states[1][name]).abs().mean()) < 1e-5  # Adam may turn a gradient of nothing but rounding


def test_padding_does_not_count(teacher):
    """Whatever stands there."""
    states = []
    for filling in (0, 7):
        batches = []
        for batch in sequences(8):
            mask = torch.ones_like(batch)
            mask[:, 8:] = 0
            batches.append({"input_ids": batch.masked_fill(mask == 0, filling), "attention_mask": mask})
        student = pruned(teacher)
        recovery = recover(student, teacher, batches, steps=3, progress=False)
        assert recovery.tokens == 3 * 4 * 8
        states.append(bits_of(student))
    for name, values in states[0].items():
        assert float((values - states[1][name]).abs().mean()) < 1e-5  # Adam may turn a gradient of nothing but rounding


def bert():
    model = BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **TINY))
    return model, [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in sequences(8)]


def t5():
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes))
    return model, [{"input_ids": batch, "labels": batch.flip(0)} for batch in sequences(8)]


def vit():
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, num_channels=1, **TINY))
    images = [torch.randn(4, 1, 8, 8) for _ in range(8)]
    return model, [{"pixel_values": each, "labels": torch.arange(4)} for each in images]


def segmenter():
    return Segmenter(), [(torch.randn(3, 1, 6, 7), torch.randint(3, (3, 6, 7))) for _ in range(8)]


def single_output():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, [(torch.randn(5, 6), torch.randint(2, (5, 1))) for _ in range(8)]


def regression():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), [torch.randn(5, 6) for _ in range(8)]


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (bert, vit)]


@pytest.mark.parametrize("kind", [t5, segmenter, single_output, regression, *SLOW])
def test_every_kind_of_model_learns(kind):
    torch.manual_seed(1)
    model, batches = kind()
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    student, before = pruned(model, 0.5), bits_of(model)
    zeros, buffers = zeros_of(student), {name: b.clone() for name, b in student.named_buffers()}
    recovery = recover(student, model, batches, steps=40, lr=3e-3, progress=False)
    assert recovery.after.kl < 0.97 * recovery.before.kl, recovery
    assert are_equal(zeros_of(student), zeros) and are_equal(bits_of(model), before)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in student.named_buffers())  # batch norms stay


def test_logits_that_the_head_alone_does_not_give_are_computed_whole():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(vocab_size=VOCAB, head_dim=8, num_key_value_heads=2, final_logit_softcapping=2.0, **TINY)
    model = Gemma2ForCausalLM(config).eval()
    recovery = recover(pruned(model), model, sequences(8), steps=3, progress=False)
    assert recovery.notes == ["Logits of whole batches are computed: Gemma2ForCausalLM changes what its head returns."]


def test_a_loader_that_shuffles_keeps_its_held_out_batches_apart(teacher):
    data, seen = TensorDataset(torch.cat(sequences(10))), []
    loader = DataLoader(data, batch_size=4, shuffle=True)
    student = pruned(teacher)
    student.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0] if args else kwargs["input_ids"]),
                                      with_kwargs=True)  # fmt: skip
    recover(student, teacher, loader, steps=17, held_out=2, evaluations=1, progress=False)
    held_out = {tuple(batch.flatten().tolist()) for batch in seen[1:3]}
    trained = [tuple(batch.flatten().tolist()) for batch in seen[3:-2]]
    assert len(trained) == 17 and len(set(trained)) == 8 and not held_out & set(trained)


def test_a_generator_that_ends_early_says_so_and_keeps_the_best(teacher):
    student = pruned(teacher)
    with pytest.warns(UserWarning, match="ended after 5 of 40 steps"):
        recovery = recover(student, teacher, iter(sequences(8)), steps=40, held_out=3, progress=False)
    assert recovery.steps == 5 and recovery.after.kl <= recovery.before.kl


def test_the_folder_has_the_model_its_card_and_the_curve(teacher, tmp_path):
    from transformers import AutoModelForCausalLM

    student = pruned(teacher)
    recovery = recover(student, teacher, sequences(8), steps=3, out=tmp_path / "out", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert are_equal(bits_of(again), bits_of(student))
    figures = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert len(figures["curve"]) == len(recovery.curve) and figures["after"]["kl"] == recovery.after.kl
    assert "recovered" in (tmp_path / "out" / "README.md").read_text()


def test_bad_input_is_refused_in_one_line_and_changes_nothing(teacher, tmp_path):
    student, batches = pruned(teacher), sequences(6)
    before = bits_of(student)
    (tmp_path / "there").mkdir()
    other, shared = llama(vocab_size=VOCAB + 1), deepcopy(student)
    shared.lm_head.weight = student.lm_head.weight
    cases = {
        "different shapes": {"teacher": other},
        "share lm_head.weight": {"teacher": shared},
        "itself pruned": {"teacher": pruned(teacher)},
        "result.dense": {"teacher": object()},
        "matches no parameter": {"train": "nothing*"},
        "steps must be a whole number": {"steps": 0},
        "lr must be a number above 0": {"lr": -1.0},
        "hard, the weight": {"hard": -1.0},
        "is there already": {"out": tmp_path / "there"},
        "one batch was given": {"batches": batches[:1]},
        "no batch was given": {"batches": []},
        "a single batch": {"batches": batches[0]},
        "held_out must be a number": {"held_out": 0},
        "held_out must hold": {"held_out": []},
    }
    for said, change in cases.items():
        options = {"teacher": teacher, "batches": batches, "steps": 2, "progress": False} | change
        with pytest.raises(ValueError, match=said) as refused:
            recover(student, **options)
        assert "\n" not in str(refused.value)
        assert are_equal(bits_of(student), before), said
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_student_that_was_not_pruned_is_warned_of(teacher):
    with pytest.warns(UserWarning, match="nothing was pruned"):
        recover(deepcopy(teacher), teacher, sequences(6), steps=1, progress=False)


def test_labels_that_are_asked_for_and_not_there_are_refused():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="the batches have none"):
        recover(pruned(model), model, [torch.randn(5, 6) for _ in range(4)], steps=1, hard=1.0, progress=False)
