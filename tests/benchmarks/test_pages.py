"""The pages in ``docs/`` are what the commands write from the records, and what their words claim is in the figures."""

import shutil
from pathlib import Path

import pytest

from benchmarks import distributed, page, probe, repair_figures, small_models, summary
from benchmarks.__main__ import COMMANDS, main
from benchmarks.benchmark import END, filled, newest_records
from benchmarks.figures import outcome_of

ROOT = Path(page.__file__).parents[1]
RESULTS, PROBE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "evidence"


def test_the_commands_write_the_pages_that_are_in_the_repository(tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    folders = ["--results", RESULTS, "--probe", PROBE, "--studies", ROOT / "studies"]
    main(["page", *map(str, folders), "--docs", str(docs)])
    main(["evidence", "page", "--results", str(PROBE), "--page", str(docs / "evidence" / "probe.md")])
    for path in docs.rglob("*.md"):
        assert path.read_text() == (ROOT / "docs" / path.relative_to(docs)).read_text(), path.name


def test_words_around_the_figures_are_kept_and_a_page_without_marks_is_refused():
    text = f"# By hand\n<!-- a: written by x -->\nold | figures\n{END}\nthe end\n"
    assert filled(text, {"a": "new \\1"}) == text.replace("old | figures", "new \\1")
    for wrong in ("", text + text, text.replace(END, "")):
        with pytest.raises(ValueError, match="<!-- a: written by"):
            filled(wrong, {"a": ""})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_stands_in_the_overview(command, capsys):
    main([])
    assert f"  {command} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    folder = {"reference": "--docs", "programs-text": "--out"}.get(command, "--results")  # these write no records
    assert stop.value.code == 0 and folder in capsys.readouterr().out


# What the words claim


def test_repair_is_better_than_wanda_and_sparsegpt_wherever_they_were_measured():
    rows = [(model, level) for model in repair_figures.read_figures(RESULTS) for level in model.levels]
    for way in ("wanda", "llmc-sparsegpt"):
        compared = [(model.metric, model.mean(way, level), model.mean("repair", level)) for model, level in rows]
        compared = [each for each in compared if None not in each]
        assert compared
        assert all((ours < theirs) == (metric == "perplexity") for metric, theirs, ours in compared)


def test_tuning_is_never_clearly_worse_and_own_targets_are_never_clearly_better():
    for model in repair_figures.read_figures(RESULTS):
        for level in model.levels:
            outcomes = {way: outcome_of(model.gains(way, level, "repair")) for way in repair_figures.CHOICES}
            assert outcomes["tuned"] != "worse" and outcomes["fisher-tuned"] != "worse"
            assert outcomes["own-targets"] != "better"


def test_with_offload_a_block_takes_no_more_where_there_are_more_of_them():
    records = [record for record in newest_records(RESULTS, "repair") if record["settings"]["offload"]]
    few, many = sorted(repair_figures.block_rows(records), key=lambda row: row["blocks"])
    assert many["repair"] <= few["repair"] and many["peak_gib"] <= 1.01 * few["peak_gib"]


def test_at_high_sparsity_bitter7_is_better_than_magnitude():
    rows = [line.split(" | ") for line in summary.in_training(ROOT / "studies").splitlines() if " % | " in line]
    rows = [row for row in rows if int(row[1].removesuffix(" %")) >= 80 and row[4]]
    assert len(rows) == 4
    for name, *_, magnitude, bitter7, _ in rows:
        assert (float(bitter7.split()[0]) < float(magnitude.split()[0])) == ("perplexity" in name)


def test_the_probe_hurts_more_often_than_it_helps_but_for_magnitude_on_one_model():
    for model in probe.read_figures(PROBE):
        compared = [each for way in probe.BESIDE for each in model.against(way)]
        for some in (compared, [each for each in compared if each.usable]):
            better, worse, _ = map(int, probe.counted(some))
            assert worse > better
        for strategy in probe.STRATEGIES:
            better, _, num = map(int, probe.counted(e for e in model.against("probed") if e.strategy == strategy))
            is_exception = model.settings["case"] == "stories15M" and strategy.startswith("magnitude")
            assert (2 * better > num) == is_exception


def test_reap_is_better_than_chance_and_worse_than_repair_inside_the_experts():
    lines = [
        line.split(" | ")
        for line in small_models.parts(RESULTS)["experts"].splitlines()
        if " of " in line and line[0] == "|"
    ]
    for way, is_better in (("random experts", True), ("weights inside, repaired", False)):
        counts = [[*map(int, line[-1].rstrip(" |").split(" of "))] for line in lines if line[1] == way]
        assert len(counts) == 2 and all((2 * better > num) == is_better for better, num in counts)


def test_the_projection_is_arithmetic_on_what_a_gpu_took():
    rows = [{"way": "plain"}, {"way": "cut by counts", "event_ms": 2.0, "num_sums": 10, "bytes_exchanged": 5000}]
    settings = {"num_weights": 1_093_750_000}
    row = distributed.projected({"settings": settings, "environment": {"machine": "m"}, "rows": rows})
    assert row["read"] == 2.0 and row["wait"] == 1.0 and row["total"] == pytest.approx(3.0, abs=1e-3)
