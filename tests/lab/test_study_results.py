"""Rows, verdicts and pages of a study say what its runs did, and parts made apart merge to the whole."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_pages import page_of
from study_command import ASKED, Quiet, losses, rows, stamps, study

from prunus.cli import main
from prunus.cli.console import Terminal
from prunus.cli.study import print_table
from prunus.files.json_file import read_json
from prunus.lab.report.records import read_record
from prunus.lab.run import Run
from prunus.lab.study.merge import merge
from prunus.lab.study.results import summary
from prunus.lab.study.runner import Options, Worker
from prunus.lab.study.study_folder import Folder, jaccard, save_masks
from prunus.lab.study.study_plan import make_plan
from prunus.lab.study.tables import cells_of, page, verdict_of
from prunus.lab.trainer import train

ROOT = Path(__file__).parents[2]
ARMS = ["dense", "random", "magnitude", "bitter7", "bitter1"]


def test_rows_are_the_results_of_ordinary_runs(done, few_weights, tmp_path):
    found = rows(done)
    assert list(found) == ARMS
    alone = train(
        replace(Folder(done).plan().base, score="bitter7", sparsity=0.5, seed=1, out=tmp_path / "run", device="cpu")
    )
    assert found["bitter7"]["values"][1] == pytest.approx(alone.perplexity, rel=1e-12)
    assert found["bitter7"]["measured_sparsity"] == 0.5
    assert found["dense"]["measured_sparsity"] == 0.0
    assert found["bitter1"]["same_as"] == "magnitude"
    assert found["bitter1"]["values"] == found["magnitude"]["values"]
    assert found["bitter1"]["overlap"] == found["magnitude"]["overlap"] == 1.0
    assert 0.3 < found["random"]["overlap"] < 0.37  # two random halves share a third
    assert found["bitter7"]["difference"]["num_seeds"] == 2
    assert found["bitter7"]["cost"]["mean"] == pytest.approx(found["bitter7"]["mean"] - found["dense"]["mean"])


@pytest.mark.parametrize("quality", [None, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("lost", ["loss", "perplexity"])
def test_a_run_that_diverged_or_read_other_data_counts_nowhere(lost, quality, copy):
    for name, change in (("bitter7-0.5-s0", {lost: quality}), ("random-0.5-s0", {"perplexity": 1e200})):
        path = copy / "runs" / name / "result.json"
        path.write_text(json.dumps(read_json(path) | change))
    cell = copy / "runs" / "magnitude-0.5-s1" / "cell.json"
    cell.write_text(json.dumps(read_json(cell) | {"data": {"data": "abc"}}))
    found = summary(Folder(copy), Folder(copy).plan())
    seeds = {row["arm"]: row["seeds"] for row in found["rows"]}
    assert (seeds["bitter7"], seeds["magnitude"], seeds["random"]) == ([1], [0], [0, 1])
    said = {entry["arm"]: entry["message"] for entry in found["off_target"]}
    assert said["bitter7"] == f"the training diverged: its {lost} is not finite"
    assert said["magnitude"] == said["bitter1"] == "it was made with other data than the study's"
    assert all(len(text) < 200 for row in found["rows"] for text in (*cells_of(row).values(), verdict_of(row)))
    json.dumps(found, allow_nan=False)


def test_names_of_arms_are_no_markup(copy, base, capsys):
    assert (
        study(
            base, copy, "--arm", "b [late]: score=bitter7 begin=3", "--arm", "a|b [/x]: score=bitter3", "--seeds", "1"
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "b [late]" in said and "a|b [/x]" in said
    assert "| a\\|b [/x] |" in page([copy])


@pytest.mark.slow
def test_a_budget_that_all_arms_share_hides_no_best_arm(base, few_weights, tmp_path):
    options = ("--scores", "bitter7", "--sparsity", "0.5", "--seeds", "2", "--set", "budget_scale=1.5")
    assert study(base, tmp_path / "study", *options) == 0
    assert "| [study](#study) | 50.0% |" in page([tmp_path / "study"])


def test_a_longer_budget_is_told(copy, base, capsys):
    assert study(base, copy, "--arm", "longer: score=bitter7 budget_scale=1.5", "--seeds", "1") == 0
    assert rows(copy)["longer"]["tokens"] == 1.5 * rows(copy)["dense"]["tokens"]
    assert "; 1.5 times the tokens)" in capsys.readouterr().out.replace("\n", " ")
    assert rows(copy)["longer"]["beside"] == []
    assert "| 50.0% | longer" not in page([copy]).split("##")[1]  # which is best is asked of equal budgets


def test_images_are_compared_by_accuracy(tmp_path):
    plan = make_plan(
        Run(model="lenet5", data="digits", steps=3, begin=1, end=2, every=1, batch=8, eval_size=16), [], (0.7,), (0,)
    )
    folder = Folder(tmp_path / "study")
    folder.join(plan, {})
    Worker(folder, Options(device="cpu"), Quiet([])).work(plan.cells)
    found = read_json(folder.path / "study_result.json")
    assert (found["metric"]["name"], found["metric"]["better"]) == ("accuracy", "higher")
    assert all(0 <= row["mean"] <= 100 for row in found["rows"])


def test_recipes_are_compared_with_dense_and_magnitude_of_their_own(copy, base):
    arms = ("dense fast: score=none lr=3e-3", "fast: score=bitter7 lr=3e-3", "slow: score=bitter7 lr=1e-4")
    assert study(base, copy, "--seeds", "1", *(word for arm in arms for word in ("--arm", arm))) == 0
    found = rows(copy)
    fast, slow = found["fast"], found["slow"]
    assert found["dense fast"]["against"] == "dense"
    assert fast["cost"]["mean"] == pytest.approx(fast["mean"] - found["dense fast"]["mean"])
    assert slow["cost"] is None and slow["overlap"] is None, "no run of that recipe to compare with"
    assert "(against magnitude; lr differs too)" in verdict_of(slow)
    assert found["bitter7"]["beside"] == [] and 0 < found["bitter7"]["overlap"] <= 1


@pytest.mark.slow
def test_a_row_is_compared_where_most_of_its_seeds_are(copy, base):
    assert study(base, copy, "--arm", "fast: score=bitter7 lr=3e-3", "--seeds", "2") == 0
    assert rows(copy)["fast"]["against"] == "magnitude"
    assert study(base, copy, "--arm", "magnitude fast: score=magnitude lr=3e-3", "--seeds", "0,1") == 0
    found = rows(copy)["fast"]
    assert (found["against"], found["difference"]["num_seeds"], found["beside"]) == ("magnitude fast", 2, [])
    assert rows(copy)["magnitude fast"]["overlap"] is None  # there is nothing but itself


@pytest.mark.slow
def test_an_overlap_with_another_recipe_is_not_shown(copy, base):
    assert study(base, copy, "--arm", "fast: score=bitter7 lr=3e-3", "--seeds", "1") == 0
    noted = copy / "runs" / "fast-0.5-s0" / "cell.json"
    noted.write_text(json.dumps(read_json(noted) | {"overlap": 0.4, "overlap_with": "magnitude"}))  # of another recipe
    assert summary(Folder(copy), Folder(copy).plan())["rows"][-1]["overlap"] is None
    assert study(base, copy, "--arm", "magnitude fast: score=magnitude lr=3e-3", "--seeds", "1") == 0
    found = read_json(noted)
    assert found["overlap_with"] == "magnitude fast" and found["overlap"] == rows(copy)["fast"]["overlap"] != 0.4


def test_magnitude_removed_in_another_way_is_held_against_magnitude(copy, base):
    arms = ("--arm", "erk: score=magnitude allocate=erk", "--arm", "late: score=bitter7 begin=3")
    assert study(base, copy, *arms, "--seeds", "1") == 0
    for arm in ("erk", "late"):
        shared = jaccard(copy / "runs" / f"{arm}-0.5-s0", copy / "runs" / "magnitude-0.5-s0")
        assert rows(copy)[arm]["overlap"] == shared < 1
    noted = copy / "runs" / "erk-0.5-s0" / "cell.json"
    noted.write_text(json.dumps(read_json(noted) | {"overlap": 1.0, "overlap_with": "erk"}))  # with itself, as once
    found = summary(Folder(copy), Folder(copy).plan())["rows"]
    assert next(row for row in found if row["arm"] == "erk")["overlap"] is None


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
def test_overlap_is_the_jaccard_index_of_what_was_pruned(numel, tmp_path):
    keep = [{"a": torch.rand(numel) < 0.5, "b": torch.rand(3, 5) < 0.4} for _ in range(2)]
    folders = []
    for number, masks in enumerate(keep):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        save_masks(folders[-1], masks)
    first, second = (torch.cat([~mask.flatten() for mask in masks.values()]) for masks in keep)
    assert jaccard(*folders) == pytest.approx(int((first & second).sum()) / int((first | second).sum()))
    assert jaccard(folders[0], folders[0]) == 1.0
    assert jaccard(folders[0], tmp_path) is None
    (folders[1] / "masks.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="cannot be read"):
        jaccard(*folders)


def test_the_page_is_made_of_the_rows(copy):
    (copy / "notes.md").write_text("A remark.")
    text = page([copy])
    row = rows(copy)["bitter7"]
    assert f"| {row['mean']:.2f} ± {row['sd']:.2f} |" in text
    assert row["verdict"] in text
    assert "A remark." in text
    assert "the same computation as magnitude" in text
    assert ", score " not in text  # every arm has its own
    assert text.count("---: | --- |\n") == 2  # verdicts are words
    with pytest.raises(ValueError, match="name the studies"):
        page([])


def test_the_page_begins_with_the_best_arm_of_each_sparsity(copy):
    """Of those with the most seeds, random and other names of the same runs aside, and only among several."""
    pruned = {arm: row for arm, row in rows(copy).items() if row["sparsity"]}
    best = min(pruned["magnitude"], pruned["bitter7"], key=lambda row: row["mean"])
    start = f"| [study](#study) | 50.0% | {best['arm']} | {best['mean']:.2f} ± {best['sd']:.2f} | 2 |"
    [line] = [line for line in page([copy]).splitlines() if line.startswith("| [study]")]
    assert line.startswith(start)
    shutil.rmtree(copy / "runs" / f"{best['arm']}-0.5-s1")
    other = "bitter7" if best["arm"] == "magnitude" else "magnitude"
    assert f"| [study](#study) | 50.0% | {other} |" in page([copy])
    shutil.rmtree(copy / "runs" / f"{other}-0.5-s1")
    assert "[study](#study)" not in page([copy])  # one seed tells nothing
    shutil.rmtree(copy / "runs" / f"{best['arm']}-0.5-s0")
    assert "[study](#study)" not in page([copy])


@pytest.mark.slow
def test_the_page_in_docs_is_that_of_the_studies_which_are_a_few_files():
    folders = sorted(path for path in (ROOT / "studies").iterdir() if path.is_dir())
    assert page(folders) == (ROOT / "docs" / "evidence" / "results.md").read_text()
    assert sum(path.is_file() for path in (ROOT / "studies").rglob("*")) < 60


def split(done: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The same study as two machines would have it that each did some of the runs."""
    parts = []
    for seed in (0, 1):
        parts.append(Path(shutil.copytree(done, tmp_path / f"machine{seed}")))
        for run in parts[-1].glob(f"runs/*-s{1 - seed}"):
            shutil.rmtree(run)
    return parts[0], parts[1]


def test_parts_merge_to_the_whole(done, tmp_path):
    merge(split(done, tmp_path), tmp_path / "whole")
    assert losses(tmp_path / "whole") == losses(done)
    assert rows(tmp_path / "whole") == rows(done)
    assert read_json(tmp_path / "whole" / "study.json")["hash"] == read_json(done / "study.json")["hash"]


def test_doubled_runs_must_agree_and_studies_be_alike(done, copy, base, tmp_path):
    assert merge([done, copy], tmp_path / "same")["num_finished"] == 8
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    path.write_text(json.dumps(read_json(path) | {"loss": 1.0}))
    with pytest.raises(ValueError, match=r"are the same run but ended with loss .* and 1\.0"):
        merge([done, copy], tmp_path / "other")
    plan = Folder(done).plan()
    Folder(tmp_path / "b").write(replace(plan, base=replace(plan.base, lr=0.5)), {})
    with pytest.raises(ValueError, match=r"has lr = 0\.002, not 0\.5"):
        merge([done, tmp_path / "b"], tmp_path / "other")
    with pytest.raises(ValueError, match="not empty"):
        merge([done], tmp_path / "same")
    assert not (tmp_path / "other").exists()


def paths(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and sparsities of the events of each run, as a report reads them."""
    records = {name: read_record(run) for name, run in Folder(out).runs().items()}
    return {name: [(e["step"], e["sparsity"]) for e in record.events] for name, record in records.items()}


@pytest.fixture
def slim(copy, tmp_path) -> Path:
    main(["study", "merge", str(copy), "--out", str(tmp_path / "slim"), "--slim"])
    return tmp_path / "slim"


def test_a_slim_copy_says_the_same_and_is_continued(copy, slim, base):
    assert sorted(path.name for path in slim.iterdir()) == ["runs.jsonl", "study.json", "study_result.json"]
    assert rows(slim) == rows(copy)
    assert str(copy.parent) not in "".join(path.read_text() for path in slim.rglob("*.json*"))
    assert paths(slim) == paths(copy) and all(paths(slim)[name] for name in paths(slim) if "dense" not in name)
    before = (slim / "runs.jsonl").read_bytes()
    assert study(base, slim, *ASKED) == 0
    assert stamps(slim) == {} and (slim / "runs.jsonl").read_bytes() == before, "nothing is run again"
    assert rows(slim)["random"]["overlap"] == rows(copy)["random"]["overlap"]


def test_a_slim_copy_has_the_same_table_page_and_report(copy, slim, capsys):
    capsys.readouterr()
    shown = []
    for folder in (copy, slim):
        main(["study", "show", str(folder)])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "8 of 8 runs" in shown[0]
    assert page([copy]).replace("study", "slim") == page([slim]).replace("study", "slim")
    whole, small = page_of(copy), page_of(slim)
    assert whole.texts["h1"] == small.texts["h1"]
    assert whole.texts["h2"] == small.texts["h2"] and whole.texts["p"] == small.texts["p"]
    found = [
        {name: [row for row in rows if row[0] != "data"] for name, rows in each.tables.items() if name != "Environment"}
        for each in (whole, small)
    ]
    assert found[0] == found[1], "but for the paths of files, which a slim study leaves out"


def test_slim_and_live_studies_merge_and_grow(done, slim, base, tmp_path):
    parts = split(done, tmp_path)
    merge([parts[0]], tmp_path / "first", slim=True)
    assert merge([tmp_path / "first", parts[1]], tmp_path / "mixed")["num_finished"] == 8
    assert rows(tmp_path / "mixed") == rows(done) and len(stamps(tmp_path / "mixed")) == 4
    assert merge([tmp_path / "mixed"], tmp_path / "whole", slim=True)["num_finished"] == 8
    assert (tmp_path / "whole" / "runs.jsonl").read_text() == (slim / "runs.jsonl").read_text()
    merge([tmp_path / "whole"], tmp_path / "again", slim=True)
    assert (tmp_path / "again" / "runs.jsonl").read_bytes() == (slim / "runs.jsonl").read_bytes()
    assert study(base, slim, "--scores", "bitter3", "--seeds", "1") == 0  # an arm more
    assert set(stamps(slim)) == {"bitter3-0.5-s0"} and read_json(slim / "study_result.json")["num_finished"] == 9
    assert {run["folder"] for run in map(json.loads, (slim / "runs.jsonl").read_text().splitlines())} == set(
        stamps(done)
    )


def test_long_curves_are_thinned_and_keep_their_ends(copy, tmp_path):
    run = copy / "runs" / "bitter7-0.5-s0" / "metrics.jsonl"
    first, *_, last = [json.loads(line) for line in run.read_text().splitlines()]
    logs = [{"step": step, "loss": float(step), "lr": 1e-3} for step in range(1, 1000)]
    events = [{"step": step, "event": {"step": step, "sparsity": step / 1000, "seconds": 1}} for step in range(1, 500)]
    lines = [first, *sorted([*logs, *events], key=lambda line: line["step"]), last | {"step": 1000}]
    run.write_text("".join(json.dumps(line) + "\n" for line in lines))
    merge([copy], tmp_path / "slim", slim=True)
    kept = list(Folder(tmp_path / "slim").runs()["bitter7-0.5-s0"].metrics())
    assert kept[0] == first and kept[-1] == last | {"step": 1000}, "layers and evaluations are whole"
    losses = [line for line in kept[1:-1] if "loss" in line]
    events = [line for line in kept if "event" in line]
    assert 50 <= len(losses) <= 60 and losses[-1] == {"step": 999, "loss": 999.0}
    assert 50 <= len(events) <= 60 and events[-1]["event"] == {"step": 499, "sparsity": 0.499}


def test_damage_in_a_slim_study_is_told(copy, slim, tmp_path, capsys):
    (copy / "runs" / "bitter7-0.5-s0" / "result.json").write_text("{")
    found = merge([copy], tmp_path / "damaged", slim=True)
    [failed] = found["failed"]
    assert failed["message"].startswith("runs/bitter7-0.5-s0/result.json cannot be read")
    again = summary(Folder(tmp_path / "damaged"), Folder(tmp_path / "damaged").plan())
    assert again["num_finished"] == 7 and [entry["arm"] for entry in again["failed"]] == ["bitter7"]
    text = (slim / "runs.jsonl").read_text()
    for broken in (text[:-20], text + "[1]\n", text + '{"folder": "../x", "metrics.jsonl": []}\n'):
        (slim / "runs.jsonl").write_text(broken)
        for command in (["study", "show", str(slim)], ["report", str(slim)]):
            with pytest.raises(SystemExit):
                main(command)
            assert "runs.jsonl: line" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_table_fits_the_terminal_and_cuts_nothing(width, done, monkeypatch, capsys):
    values = summary(Folder(done), Folder(done).plan())
    long = "bitter7 with a recipe whose name is longer than a column"
    values["rows"] = [row | {"arm": long} if row["arm"] == "bitter7" else row for row in values["rows"]]
    monkeypatch.setattr("prunus.cli.study.wide_console", lambda: Terminal(width=width))
    print_table(values)
    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if line[:1] in "┏┃┡│├└"]
    assert max(map(len, table)) <= width and "…" not in said
    names = " ".join(line.split("│")[1].strip() for line in table if line.startswith("│"))
    assert long in names and "magnitude" in names
    assert ("time per run" in said) == (width == 140) and "against dense" in said
    assert f"{long} at 50.0%:" in " ".join(said.split())  # the verdict stands below


def test_the_page_of_a_study_is_written_beside_it(copy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["study", "page", str(copy)])
    assert (copy / "results.md").read_text() == page([copy])
    assert {path.name for path in tmp_path.iterdir()} == {copy.name}
    with pytest.raises(SystemExit) as stop:
        main(["study", "page", str(copy), str(copy)])
    assert stop.value.code == 2 and "--page FILE.md" in capsys.readouterr().err
    main(["study", "page", str(copy), str(copy), "--page", "both.md"])
    assert (tmp_path / "both.md").is_file()
