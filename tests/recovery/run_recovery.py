"""A recovery in a process of its own: ``run_recovery.py HOW FOLDER [STEP AT WHICH IT KILLS ITSELF]``."""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from students import are_equal, codes_of, in_codes, llama, pruned, sequences

from prunus import recover
from prunus.oneshot.samples import digest
from prunus.recovery import plan
from prunus.recovery.folder import whole_tensors
from prunus.recovery.recover import training_arguments


def main(how, folder, kill_at=None):
    folder = Path(folder)
    teacher = llama(tie_word_embeddings=True)
    student = pruned(teacher)
    if how.endswith("codes"):
        student = in_codes(student.bfloat16())
    codes = codes_of(student)
    num_zeros = sum(int((p == 0).sum()) for p in student.parameters() if p.ndim > 1)
    args, accumulate = None, 1
    if how in ("ddp", "fsdp", "ddp codes"):
        more = {"fsdp": True, "fsdp_config": {}} if how == "fsdp" else {}
        args = training_arguments(folder / "state", "cpu", **more)
    elif how in ("one", "one codes"):
        accumulate = 2

    def report(step, *_):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    has_trials = how.endswith("trials")
    if how == "all trials":
        plan.HARM = 0.0  # whatever they do counts as harm
    options = {"steps": 320 if has_trials else 12, "lr": None if has_trials else 3e-3, "evaluations": 4, "held_out": 3}
    recovery = recover(
        student, teacher, sequences(24), **options, accumulate=accumulate, args=args, state=folder / "state",
        out=folder / "out" if how in ("one", "ddp", "fsdp") else None, progress=report,
    )  # fmt: skip
    tensors = whole_tensors(student)
    if os.environ.get("RANK", "0") == "0":
        zeros = sum(int((t == 0).sum()) for t in tensors.values() if t.ndim > 1)
        bits = digest([tensors[name].cpu() for name in sorted(tensors)])
        said = {"bits": bits, "zeros": zeros, "zeros_before": num_zeros, "num_zeros": recovery.num_zeros}
        curve = [[point.step, point.tokens, point.kl] for point in recovery.curve]
        said |= {"curve": curve, "before": recovery.before.kl, "after": recovery.after.kl, "lr": recovery.lr}
        said |= {"keeps_codes": are_equal(codes_of(student), codes)}
        (folder / f"{how}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
