"""What a run computes, in one form: equal keys are the same computation, equal digests the same data."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...score import SCORES
from ..run import Run

PRUNING = "sparsity schedule begin end every allocate eps exponent regrow regrow_by".split()
UNSEEN = "out device save_every log_every track eval_every data validation".split()  # which change nothing computed
PLACES = "out device save_every log_every track seed sparsity data validation".split()  # which are not in the hash


def shared_fields(base: Run) -> dict[str, Any]:
    return {name: value for name, value in base.to_json().items() if name not in PLACES}


def num_examples(run: Run) -> int:
    """Windows or images that a run reads."""
    return run.total_steps * run.batch * run.accumulate


def key_of(run: Run) -> str:
    """Equal for runs that compute the same, bit for bit."""
    return digest(canonical(run))


def dense_of(run: Run) -> Run:
    """The dense run that is equal in all but pruning."""
    return replace(run, score="none", sparsity=0.0, regrow=0.0, regrow_by="snr", eps=None, exponent=None)


def canonical(run: Run) -> dict[str, Any]:
    """The fields that decide what is computed, each in one form."""
    values = {name: value for name, value in run.to_json().items() if name not in UNSEEN}
    values |= {"steps": run.total_steps, "budget_scale": 1.0, "warmup": run.step_of(run.warmup)}
    if run.score == "none":
        return {name: value for name, value in values.items() if name not in PRUNING}
    values |= _formula(run) | {"begin": run.step_of(run.begin), "end": run.step_of(run.end)}
    unread = {"constant": ("begin", "end", "every"), "one_shot": ("end", "every")}.get(run.schedule, ())
    if not values.get("regrow"):
        unread += ("regrow", "regrow_by")
    return {name: value for name, value in values.items() if name not in unread}


def _formula(run: Run) -> dict[str, Any]:
    """Score, eps and exponent in one form: bitter1 is magnitude, bitter4 is bitter3.

    All weights of a run take the same steps, so that no bias is corrected: bitter8 is bitter3, fisher's 1/4 bitter7.
    """
    name, options = SCORES[run.score].canonical({"eps": run.eps, "q": run.exponent})
    return {"score": name, "eps": options.get("eps"), "exponent": options.get("q")}


def digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def data_digests(base: Run) -> dict[str, str]:
    """Digests of the bytes of the data and of the held-out file."""
    found = {"data": _digest_of(base.data)}
    return found | ({"validation": _digest_of(str(base.validation))} if base.validation else {})


def _digest_of(spec: str) -> str:
    path, total = Path(spec), sha256()
    if spec == "stdlib":
        from ..data.stdlib_text import read_stdlib

        for part in read_stdlib():
            total.update(part.tobytes())
    elif spec == "digits":
        return spec
    elif not path.exists():
        raise ValueError(f"{spec} is neither a file nor a folder; --data says where the data is")
    for file in sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []:
        if file.is_file():
            with file.open("rb") as opened:
                while block := opened.read(1 << 24):
                    total.update(block)
    return total.hexdigest()[:16]
