"""Recovery on one GPU: in bfloat16, compiled, and with the teacher in main memory."""

import pytest
import torch
from students import are_equal, bits_of, llama, pruned, sequences, zeros_of

from prunus import prune, recover

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"offload_teacher": True}, {"bf16": False}], ids=str)
def test_the_student_comes_nearer_and_every_zero_stays(options):
    torch.compiler.reset()
    teacher = llama()
    student = pruned(teacher).cuda()
    zeros, before = zeros_of(student), bits_of(student)
    recovery = recover(student, teacher, sequences(20), steps=12, progress=False, **options)
    assert recovery.after.kl < 0.9 * recovery.before.kl
    assert are_equal(zeros_of(student), zeros) and {p.device.type for p in student.parameters()} == {"cuda"}
    assert {p.device.type for p in teacher.parameters()} == {"cpu"}
    recovery.undo_()
    assert are_equal(bits_of(student), before)


def test_figures_are_those_of_the_cpu_up_to_rounding():
    teacher, figures = llama(), []
    for device in ("cpu", "cuda"):
        student = pruned(teacher).to(device)
        recovery = recover(student, teacher, sequences(20), steps=8, lr=1e-3, bf16=False, progress=False)
        figures.append([point.kl for point in recovery.curve])
    assert figures[0] == pytest.approx(figures[1], rel=0.02)


def test_the_dense_model_of_a_result_teaches_from_main_memory():
    model = llama().cuda()
    dense, batches = bits_of(model), sequences(12)
    result = prune(model, batches[:2], sparsity=0.6)
    teacher = result.dense()
    assert are_equal({name: values.cuda() for name, values in bits_of(teacher).items()}, dense)
    assert recover(model, teacher, batches, steps=6, progress=False).num_zeros >= result.num_pruned
