"""Run by ``accelerate launch``: an undisturbed training, an interrupted one and its end; each rank writes JSON."""

import json
import sys
from pathlib import Path

import torch
from test_huggingface_trainer import StopAt, resumable
from tiny import weights


def told(trainer, callback):
    total = sum(float(w.double().abs().sum()) for w in weights(trainer.model).values())
    pruner = callback.pruner
    return {"digest": pruner.digest(), "total": total, "sparsity": pruner.sparsity, "names": sorted(pruner.masks)}


def main(folder):
    options = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo", "save_steps": 5}
    trainer, callback = resumable(folder / "whole", "as it comes", **options)
    trainer.train()
    results = {"whole": told(trainer, callback), "wrapper": type(trainer.model_wrapped).__name__}
    trainer, _ = resumable(folder / "broken", "as it comes", StopAt(8), **options)
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer, callback = resumable(folder / "broken", "as it comes", **options)
        trainer.train(resume_from_checkpoint=True)
        results["resumed"] = told(trainer, callback)
    rank = trainer.args.process_index
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
