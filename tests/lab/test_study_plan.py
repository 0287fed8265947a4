"""A plan holds what is compared, and refuses what would not be comparable."""

from dataclasses import replace
from pathlib import Path

import pytest

from prunus.cli.study import Command, planned
from prunus.files.json_file import read_json
from prunus.lab.run import Run
from prunus.lab.study.arms import PRESETS, Arm, parse_arm, read_base, score_arm, slug
from prunus.lab.study.study_folder import Folder
from prunus.lab.study.study_plan import Cell, StudyPlan, canonical, extended, key_of, make_plan, only

BASE = Run(data="digits", model="lenet5", steps=100, begin=10, end=80, lr=1e-3)


def plan_of(*texts: str, sparsities=(0.5,), seeds=(0,), base: Run = BASE) -> StudyPlan:
    return make_plan(base, [parse_arm(text) for text in texts], sparsities, seeds)


def test_dense_random_and_magnitude_are_always_in():
    plan = plan_of("late: score=bitter7 end=0.95", sparsities=(0.5, 0.8), seeds=(0, 1))
    assert [arm.name for arm in plan.arms] == ["dense", "random", "magnitude", "late"]
    assert len(plan.cells) == 2 + 3 * 2 * 2  # dense once a seed
    assert {cell.sparsity for cell in plan.cells if cell.arm == "dense"} == {0.0}


def test_one_seed_of_everything_comes_before_the_next():
    order = plan_of(sparsities=(0.5, 0.8), seeds=(0, 1)).ordered()
    assert [cell.seed for cell in order] == sorted(cell.seed for cell in order)
    assert [cell.folder for cell in order[:3]] == ["dense-0-s0", "random-0.5-s0", "random-0.8-s0"]


SAME = [
    ({"score": "bitter1"}, {"score": "magnitude"}),
    ({"score": "bitter2"}, {"score": "magnitude"}),
    ({"score": "bitter4"}, {"score": "bitter3"}),
    ({"score": "bitter8"}, {"score": "bitter3"}),
    ({"score": "fisher", "exponent": 0.0}, {"score": "magnitude"}),
    ({"score": "fisher", "exponent": 0.25}, {"score": "bitter7"}),
    ({"score": "bitter7", "eps": 0.0}, {"score": "bitter7"}),
    ({"score": "none", "end": 0.5, "sparsity": 0.8, "every": 7}, {"score": "none"}),
    ({"begin": 0.1, "end": 0.8}, {"begin": 10, "end": 80}),
    ({"begin": 0.0, "end": 0.8}, {"begin": 0, "end": 80, "every": 4}),
    ({"warmup": 0.1}, {"warmup": 10}),
    ({"schedule": "one_shot", "end": 90}, {"schedule": "one_shot", "every": 3}),
    ({"schedule": "constant", "end": 90}, {"schedule": "constant", "begin": 3}),
    ({"steps": 50, "budget_scale": 2.0}, {"steps": 100}),
    ({"decay": 0.4}, {}),
    ({"decay": 40}, {}),
    ({"score": "none", "rate_power": 0.5}, {"score": "none", "rate_power": 0.0}),
    ({"data": "elsewhere", "device": "cpu", "out": Path("x")}, {}),
]
DIFFERENT = [
    ({"score": "bitter7"}, {"score": "bitter3"}),
    ({"score": "bitter7", "eps": 1e-8}, {"score": "bitter7"}),
    ({"score": "bitter0", "eps": 0.0}, {"score": "bitter0"}),  # whose denominator has Adam's own eps otherwise
    ({"score": "bitter2", "budget_scale": 1.21}, {"score": "magnitude"}),
    ({"score": "bitter4", "allocate": "depth"}, {"score": "bitter3"}),
    ({"score": "bitter8", "eps": 1e-8}, {"score": "bitter3", "eps": 1e-8}),  # the corrected moment is the larger
    ({"score": "fisher", "exponent": 0.25}, {"score": "fisher"}),
    ({"score": "fisher", "exponent": 0.5}, {"score": "fisher"}),
    ({"sparsity": 0.8}, {}),
    ({"seed": 1}, {}),
    ({"score": "none", "seed": 1}, {"score": "none"}),
    ({"score": "none", "beta2": 0.999}, {"score": "none"}),
    ({"compile": True}, {}),
    ({"lr_schedule": "cosine"}, {}),
    ({"decay": 0.3}, {}),
    ({"rate_power": 0.5}, {"rate_power": 0.0}),
]


@pytest.mark.parametrize(("first", "second"), SAME, ids=lambda fields: "-".join(map(str, fields.values())) or "base")
def test_the_same_computation_is_seen(first, second):
    assert canonical(replace(BASE, **first)) == canonical(replace(BASE, **second))


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=lambda f: "-".join(map(str, f.values())) or "base")
def test_another_computation_is_not_taken_for_it(first, second):
    assert key_of(replace(BASE, **first)) != key_of(replace(BASE, **second))


def test_shared_rows_belong_to_the_first_arm():
    plan = make_plan(BASE, [score_arm(score) for score in ("bitter1", "bitter2", "bitter7")], (0.5,), (0,))
    owners = {cell.arm: owner.arm for cell, owner in plan.owners.items()}
    assert owners["bitter1"] == owners["bitter2"] == "magnitude"
    assert owners["bitter7"] == "bitter7"


REFUSED = {
    "other model": ("x: model=resnet20", "changes model, which all arms share"),
    "other evaluation": ("x: eval_size=3", "changes eval_size, which all arms share"),
    "other weights": ('x: exclude=["fc3*"]', "changes exclude, which all arms share"),
    "a seed of its own": ("x: seed=3", "given by --seeds"),
    "a sparsity of its own": ("x: sparsity=0.3", "given by --sparsity"),
    "more steps": (
        "x: steps=130",
        "2,080 examples, but the base reads 1,600; a longer budget is given by budget_scale=1.3",
    ),
    "larger batch": ("x: batch=32", "steps=50"),
    "impossible run": ("x: score=magnitude eps=1e-8", "arm x"),
    "unknown field": ("x: scroe=bitter7", "no field 'scroe'; did you mean score"),
    "unknown value": ("x: score=bitter77", "score cannot be 'bitter77'; it takes none, magnitude"),
    "wrong type": ("x: every=often", "every cannot be 'often'; it takes int"),
    "no fields": ("x", "field=value"),
    "field twice": ("x: lr=1 lr=2", "each field once"),
    "no reference": ("x: lr=2.0 against=nothing", "against 'nothing', which is not an arm"),
    "no name": (": lr=2.0", "needs a name"),
    "the name of a control": ("dense: score=magnitude", "two arms are named dense"),
    "one folder": ("Magnitude: lr=2.0", "would share a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_comparable_is_refused(case):
    text, said = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        plan_of(text)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_sparsity_lies_between_none_and_all():
    for sparsity in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="dense is always included"):
            plan_of(sparsities=(sparsity,))


def test_equal_tokens_in_other_batches_are_comparable():
    plan = plan_of("x: batch=32 steps=50 begin=5 end=40")
    assert plan.run_of(Cell("x", 0.5, 0)).batch == 32


def test_values_have_the_types_of_their_fields():
    arm = parse_arm("x: score=bitter7 end=0.95 begin=5 lr=1 spam=true optimizer=adamwprune allocate=2:4 against=dense")
    assert (arm.name, arm.against) == ("x", "dense")
    types = {name: (value, type(value)) for name, value in arm.changes.items()}
    assert types["end"] == (0.95, float)
    assert types["begin"] == (5, int)
    assert types["lr"] == (1.0, float)
    assert types["spam"] == (True, bool)
    assert types["allocate"] == ("2:4", str)


def test_a_toml_file_holds_base_and_arms(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "lenet5"\nlr = 1\nend = 0.9\n[[arm]]\nname = "late"\nscore = "bitter7"\nend = 0.95\n')
    base, arms, _ = read_base(path)
    assert base == Run(model="lenet5", lr=1.0, end=0.9)
    assert arms == [Arm("late", {"score": "bitter7", "end": 0.95})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr = ", "not a TOML file"),
        ("learning = 3", "no field"),
        ("[[arm]]\nlr = 2.0", "with a name"),
        ("out = 'x'", "leave it out and pass --out"),
        ("save_every = 10", "pass --save-every"),
        ("device = 'cpu'", "pass --devices"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text, said, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_base(tmp_path / "run.toml")


def test_an_arm_is_held_against_magnitude_and_dense_of_the_same_recipe():
    plan = plan_of(
        "fast: score=bitter7 lr=2e-3",
        "magnitude fast: score=magnitude lr=2e-3",
        "dense fast: score=none lr=2e-3",
        "slow: score=bitter7 lr=1e-4",
        "late: score=fisher exponent=0.5 end=0.95",
        "named: score=bitter3 lr=2e-3 against=slow",
        "asked: score=bitter3 lr=2e-3 against=magnitude",
        "back: score=bitter3 eps=1e-8 regrow=0.1 regrow_by=gradient",
        sparsities=(0.5, 0.8),
    )
    cell = Cell("fast", 0.8, 0)
    assert plan.against(cell) == "magnitude fast"
    assert plan.magnitude_for(cell) == Cell("magnitude fast", 0.8, 0)
    assert plan.dense_for(cell) == Cell("dense fast", 0.0, 0)
    assert plan.against(Cell("magnitude fast", 0.8, 0)) == "magnitude", "the recipe is all that is new"
    assert plan.against(Cell("named", 0.8, 0)) == "slow"
    assert plan.against(Cell("asked", 0.8, 0)) == "magnitude", "who names it gets it, whatever its recipe"
    assert plan.against(Cell("dense fast", 0.0, 0)) == "dense"
    for arm, dense in (("slow", None), ("late", Cell("dense", 0.0, 0)), ("back", Cell("dense", 0.0, 0))):
        assert plan.against(Cell(arm, 0.8, 0)) == "magnitude"
        assert plan.magnitude_for(Cell(arm, 0.8, 0)) is None
        assert plan.dense_for(Cell(arm, 0.8, 0)) == dense


def test_the_arm_to_compare_with_may_have_spaces_in_its_name():
    arm = parse_arm("x: lr=2e-3 warmup=5 against=bitter7 to 0")
    assert (arm.against, dict(arm.changes)) == ("bitter7 to 0", {"lr": 2e-3, "warmup": 5})
    assert parse_arm("x: against=fisher q=0.25 late lr=2e-3 warmup=5").against == "fisher q=0.25 late"
    assert parse_arm("x: lr=2e-3 against=bitter7 lr 2e-3 beta2 0.99 warmup=5").against == "bitter7 lr 2e-3 beta2 0.99"
    with pytest.raises(ValueError, match="against=ARM"):
        parse_arm("x: lr=2e-3 against=")


def test_a_plan_survives_its_file():
    plan = plan_of("late: score=bitter7 end=0.95 against=dense", sparsities=(0.5, 0.8), seeds=(0, 2))
    assert StudyPlan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_the_hash_is_that_of_what_all_arms_share(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"some text of a few words" * 9)
    (tmp_path / "c").write_bytes(b"some text of other words" * 9)
    base = Run(data=str(tmp_path / "a"), steps=100)
    same = plan_of("x: lr=2.0", base=replace(base, data=str(tmp_path / "b"), device="cpu"), seeds=(4,)).hash
    assert plan_of(base=base).hash == same
    assert plan_of(base=replace(base, data=str(tmp_path / "c"))).hash != same
    assert plan_of(base=replace(base, lr=2.0)).hash != same
    assert plan_of(base=replace(base, decay=0.4)).hash == same
    assert plan_of(base=replace(base, lr_schedule="cosine")).hash != same


STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*/study.json"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_published_studies_keep_their_hash_and_presets_continue_them(path):
    plan, name = Folder(path.parent).plan(), path.parent.name
    assert plan.hash == read_json(path)["hash"]
    if name in PRESETS and name != "resnet-cifar10":  # which was made with larger batches
        assert replace(plan, base=PRESETS[name].base, cells=()).hash == plan.hash


def test_a_study_grows_by_arms_sparsities_and_seeds():
    first, second = plan_of(), plan_of("late: end=0.95", sparsities=(0.8,), seeds=(1,))
    both = extended(first, second, Path("s"))
    assert set(both.cells) == set(first.cells) | set(second.cells)
    assert both.hash == first.hash


def test_only_keeps_the_controls():
    plan = only(plan_of("a: lr=2.0", "b: lr=3.0"), ["b"])
    assert {cell.arm for cell in plan.cells} == {"dense", "random", "magnitude", "b"}
    with pytest.raises(ValueError, match="no arm 'c'"):
        only(plan, ["c"])


def test_only_brings_arms_that_are_the_same_along():
    texts = ("bitter7: score=bitter7", "quarter: score=fisher exponent=0.25", "bitter3: score=bitter3")
    for name in ("bitter7", "quarter"):
        plan = only(plan_of(*texts, sparsities=(0.5, 0.8), seeds=(0, 1)), [name])
        seeds = {arm: {cell.seed for cell in plan.cells if cell.arm == arm} for arm in plan.arm}
        assert seeds["bitter7"] == seeds["quarter"] == {0, 1} and not seeds["bitter3"]


@pytest.mark.parametrize(
    ("name", "folder"), [("a b", "a-b"), ("q=1/4", "q-1-4"), ("../x", "x"), ("é", ""), ("A_b.5", "a-b.5")]
)
def test_folder_names_are_plain(name, folder):
    assert slug(name) == folder


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_comparable_plans(name):
    preset = PRESETS[name]
    data = "digits" if preset.base.model in ("lenet5", "resnet20") else "stdlib"
    plan = make_plan(replace(preset.base, data=data), preset.arms, preset.sparsities, (0, 1))
    assert {plan.against(cell) for cell in plan.cells} <= set(plan.arm)
    assert len(set(plan.owners.values())) <= len(plan.cells)


@pytest.mark.parametrize(("name", "of"), [("schedules", "bitter7 cubic 50%"), ("beta2", "magnitude beta2 0.99")])
def test_variations_of_a_score_are_held_against_it(name, of):
    preset = PRESETS[name]
    plan = make_plan(preset.base, preset.arms, preset.sparsities, (0,))
    assert plan.against(Cell(of, preset.sparsities[0], 0)) == of.split()[0]
    assert Cell(of.split()[0], preset.sparsities[0], 0) in plan.cells


def test_the_study_of_rates_needs_no_data_and_replays_runs_of_its_own():
    plan = planned(Command(preset="rates"))
    order = list(plan.owners)
    replays = [cell for cell in plan.cells if plan.run_of(cell).replay]
    assert len(order) == 14 * 3 and len(replays) == 3
    for cell in replays:
        source = plan.replayed_by(cell)
        assert source == Cell("bitter7 rate 1", 0.5, cell.seed) and order.index(source) < order.index(cell)
    assert {"bitter7 rate 1", "dense"} <= {cell.arm for cell in only(plan, [replays[0].arm]).cells}
    with pytest.raises(ValueError, match="the preset lenet-mnist needs --data: the folder of MNIST"):
        planned(Command(preset="lenet-mnist"))


def test_score_and_sparsity_of_the_file_are_taken(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('data = "digits"\nmodel = "lenet5"\nscore = "bitter3"\nsparsity = 0.8\n')
    plan = planned(Command(base=file, arm=("late: end=.95",), seeds="1"))
    assert "bitter3" in plan.arm and {cell.sparsity for cell in plan.cells} == {0.0, 0.8}
    assert plan.arm["late"].changes == {"end": 0.95}
    assert {cell.sparsity for cell in planned(Command(base=file, sparsity="0.5")).cells} == {0.0, 0.5}


def test_a_study_that_is_extended_keeps_its_steps_between_events_and_another_number_is_refused():
    old = plan_of(base=replace(BASE, every=50))
    both = extended(old, plan_of("late: end=90"), Path("s"))
    assert both.base.every == 50 and {both.run_of(cell).every for cell in both.cells} == {50}
    with pytest.raises(ValueError, match="has every = 50, not 7"):
        extended(old, plan_of(base=replace(BASE, every=7)), Path("s"))


def test_runs_have_about_20_events():
    assert [replace(BASE, begin=0, end=end, steps=4000).event_period for end in (3, 40, 4000)] == [1, 2, 200]
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        replace(BASE, every=0)
