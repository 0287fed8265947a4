"""What is published: the wheel and the archive of sources hold the package alone, and what is installed works."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import prunus

ROOT = Path(prunus.__file__).parents[1]
SMOKE = """
import sys
import torch
import prunus
from prunus.cli import main

assert prunus.__file__.startswith(sys.argv[1]), prunus.__file__
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
assert prunus.prune(model, [torch.randn(32, 16)], sparsity=0.5).sparsity == 0.5
prunus.save_sparse(model.state_dict(), "small.safetensors")
main(["doctor", "small.safetensors"])
main(["--version"])
"""


def test_the_version_has_one_home():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert f"\nversion: {prunus.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {prunus.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_an_extra_that_a_message_names_is_one_that_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text() for path in [*ROOT.glob("prunus/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]]
    named = {name for text in texts for names in re.findall(r"prunus\[([\w,]+)\]", text) for name in names.split(",")}
    assert named <= set(extras) and "hf" in named


@pytest.mark.slow
def test_the_built_files_hold_the_package_alone_and_install(tmp_path):
    if find_spec("build") is None:
        pytest.skip("needs pip install build")
    build = [sys.executable, "-m", "build", "--outdir", tmp_path, ROOT]
    done = subprocess.run(build, capture_output=True, text=True, timeout=600)
    if done.returncode and re.search("connection|network|resol|No matching distribution", done.stdout + done.stderr):
        pytest.skip("building needs hatchling from the network")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (archive,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"prunus", f"prunus-{prunus.__version__}.dist-info"}
    missing = [path for path in ROOT.glob("prunus/**/*") if path.is_file() and "__pycache__" not in path.parts]
    assert [path for path in missing if path.relative_to(ROOT).as_posix() not in names] == []
    with tarfile.open(archive) as opened:
        inside = {name.split("/")[1] for name in opened.getnames() if "/" in name}
    assert not inside & {"tests", "studies", "benchmarks", "docs"}

    place = tmp_path / "place"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    smoke = [sys.executable, "-c", SMOKE, str(place)]
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run(smoke, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"prunus {prunus.__version__}" in done.stdout
