"""Files that would run code in whoever unpickles them, or fetch it: none may, whichever reader opens them."""

import io
import json
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzzing import copied
from readers import READERS


class Runs:
    """Unpickles as a call."""

    def __init__(self, function: Callable, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def calls(mark: Path) -> dict[str, object]:
    """Values that leave ``mark`` behind if they are executed."""
    code = f"open({str(mark)!r}, 'w').close()"
    return {
        "os.system": Runs(os.system, f"touch {mark}"),
        "eval": Runs(eval, code),
        "exec": Runs(exec, code),
        "open": Runs(open, str(mark), "w"),
        "Path.touch": Runs(Path.touch, mark),
        "subprocess": Runs(subprocess.call, ["touch", str(mark)]),
        "__import__": Runs(exec, "__import__('os').system('touch " + str(mark) + "')"),
        "pickle.loads": Runs(pickle.loads, pickle.dumps(Runs(os.system, f"touch {mark}"))),
        "inside a list": [1, {"a": Runs(os.system, f"touch {mark}")}],
        "as a key": {Runs(os.getcwd): Runs(os.system, f"touch {mark}")},
        "state": _with_state(mark),
    }


def _with_state(mark: Path) -> object:
    value = Runs(dict)
    value.call = (dict, (), None, None, iter([("a", Runs(os.system, f"touch {mark}"))]))
    return value


def forms(value: object) -> dict[str, bytes]:
    """The value as files of the formats that hold pickles."""
    found = {f"pickle {protocol}": pickle.dumps(value, protocol) for protocol in (0, 2, 4, 5)}
    state = {"format": "prunus-1", "model": {"a": torch.ones(3)}, "payload": value}
    for name, is_new in (("torch", True), ("old torch", False)):
        out = io.BytesIO()
        torch.save(state, out, _use_new_zipfile_serialization=is_new)
        found[name] = out.getvalue()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, 2))
        archive.writestr("archive/version", "3")
    return found | {"zip": out.getvalue()}


TARGETS = {  # which file of which reader's sample becomes a payload
    "torch file": "*.pt",
    "checkpoint": "checkpoint.pt",
    "sharded checkpoint": "checkpoint-*/*",
    "plain pickle": "*.pickle",
    "train --resume": "checkpoint.pt",
    "eval": "checkpoint.pt",
    "doctor, checkpoint": "checkpoint.pt",
    "doctor, distributed": "*",
    "doctor, masks": "*",
    "doctor, folder": "model.safetensors",
    "Hugging Face model": "model/*.safetensors",
    "exported model": "model/*.safetensors",
}
MODULE = "open({mark!r}, 'w').close()\n"
CONFIGS = {
    "auto_map": {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"},
    "attn_implementation": {"attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel"},
    "architectures": {"architectures": ["evil.Model"]},
}


def torture(home: Path) -> dict[str, Any]:
    """How many payloads were opened by readers, and those that ran."""
    opened, ran, mark = 0, [], home / "it-ran"
    for call, value in calls(mark).items():
        pickle.loads(pickle.dumps(value))
        assert mark.exists(), f"{call} is no payload"
        mark.unlink()
    for name, pattern in TARGETS.items():
        sample = home / name.replace(" ", "_") / "sample"
        sample.mkdir(parents=True)
        READERS[name].make(sample)
        for call in calls(mark):
            for form in forms(None):
                with copied(sample) as folder:
                    data = forms(calls(mark)[call])[form]  # made anew: a value may be pickled once only
                    for path in [path for path in folder.glob(pattern) if path.is_file()]:
                        path.write_bytes(data)
                    opened += 1
                    ran += _opened(name, folder, f"{name}: {call} in {form}", mark)
    for kind, change in CONFIGS.items():
        sample = home / "Hugging_Face_model" / "sample"
        with copied(sample) as folder:
            path = folder / "model/config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
            (folder / "model/evil.py").write_text(MODULE.format(mark=str(mark)))
            opened += 1
            ran += _opened("Hugging Face model", folder, f"config.json: {kind}", mark)
    return {"opened": opened, "ran": ran}


def _opened(name: str, folder: Path, what: str, mark: Path) -> list[str]:
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            READERS[name].read(folder)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    if mark.exists():
        mark.unlink()
        return [what]
    return []
