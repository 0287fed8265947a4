"""Studies: arms x sparsities x seeds from one base run, equal but for what is compared.

A study is a folder that any process may continue:

    study.json          format, base (fields of Run), data (digests of the files), hash (of both), sparsities, seeds,
                        arms: [{name, changes, against, cells: [[sparsity, seed], ...]}], environment
    study_result.json   what is known so far, written anew after every run; see ``results.py``
    runs/ARM-SPARSITY-sSEED/
        run.json, metrics.jsonl, result.json    as every training leaves them; result.json is written last
        cell.json           arm, sparsity, seed, wall_seconds, examples, cold (first of its process), peak_mib,
                            machine, finished and, once known, overlap with magnitude
        masks.safetensors   the final masks as packed bits, shapes in the header; not for dense runs
        failed.json         in place of a result: message, kind, when
    runs.jsonl          runs of a slim study, a line each, in place of their folders; see ``lab/run_files.py``
    locks/              one file for each run that some process has claimed

A dense run has sparsity 0, whatever the others have. Arms that are the same computation share one folder,
which has the name of the first of them.
"""
