"""Whatever a file holds, the doctor examines it or refuses it in one line, soon and within bounded memory."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from prunus.doctor import examine

WEIGHTS = {"a.weight": torch.ones(4, 4)}
PRUNER = {"masks": {"a.weight": torch.ones(4, 4, dtype=torch.bool)}}
FLOAT4 = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
DEEP: list = []
WIDE: dict = {}
for _ in range(200):
    DEEP = [DEEP]
for _ in range(6):
    WIDE = {str(i): WIDE for i in range(300)}  # 300^6 paths in a few hundred bytes
NONSENSE = ["x", 0, -1, 10**400, float("nan"), float("inf"), True, None, [1], torch.ones(3), DEEP, WIDE]


def told(path, **options):
    """The diagnosis, or the one line of a refusal."""
    try:
        found = examine(path, **options)
    except (ValueError, OSError) as error:
        assert str(error) and "\n" not in str(error)
        return str(error)
    json.dumps(found.to_json(), allow_nan=False)
    return found


def saved(tmp_path, state):
    torch.save(state, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("key", ["model", "masks", "digest", "pruner", "optimizer", "run", "digests"])
def test_states_that_make_no_sense(tmp_path, key):
    for value in [*NONSENSE, {"state": 3}, {"state": {0: 3}}, {3: torch.ones(2)}, {"a.weight": FLOAT4}]:
        own = {key: value} if key in ("pruner", "optimizer", "run", "digests") else {}
        told(saved(tmp_path, {"model": WEIGHTS, "run": {key: value}, "pruner": PRUNER | {key: value}} | own))


TENSORS = {
    "sparse": (torch.eye(4).to_sparse(), "not a dense CPU tensor"),
    "meta": (torch.ones(4, 4, device="meta"), "not a dense CPU tensor"),
    "repeated": (torch.ones(1).expand(1 << 20, 1 << 20), "but only 4 bytes are stored for it"),
    "float4": (FLOAT4, ""),
    "60 dimensions": (torch.ones([1] * 60), ""),
    "complex": (torch.ones(4, 4, dtype=torch.complex64), ""),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_odd_kinds(tmp_path, name):
    tensor, said = TENSORS[name]
    moments = {"state": {0: {"mask": torch.ones(2, dtype=torch.uint8), "exp_avg": tensor}}}
    for state in ({"a.weight": tensor}, {"model": WEIGHTS, "masks": {"a.weight": tensor}}, {"optimizer": moments}):
        assert said in str(told(saved(tmp_path, WEIGHTS | state)))


def test_many_tensors_that_repeat_few_bytes_are_refused(tmp_path):
    state = {f"a{i}.weight": torch.ones(1, 1).expand(1 << 12, 1 << 12) for i in range(40)}
    assert "but only 4 bytes are stored for it" in told(saved(tmp_path, state))


def test_a_model_without_a_weight_is_examined(tmp_path):
    with pytest.warns(UserWarning, match="zero-element"):
        state = nn.Linear(0, 0).state_dict()
    assert told(saved(tmp_path, state), sparsity=0.5).num_prunable == 0
    save_file(state, tmp_path / "a.safetensors")
    assert told(tmp_path / "a.safetensors", pattern="2:4").is_healthy
    save_file({}, tmp_path / "a.safetensors")
    assert "holds no tensors" in told(tmp_path / "a.safetensors", include="a*")


@pytest.mark.parametrize("names", [["layers.1." * 20000 + "weight"], ["", ".", "module."], ["layers." + "9" * 5000]])
def test_absurd_names(tmp_path, names):
    assert told(saved(tmp_path, {name: torch.ones(2, 2) for name in names})).is_healthy


@pytest.mark.parametrize(
    "config",
    [
        *("[]", "{", "null", "[" * 100_000, '{"a":' * 100_000, '{"n_layer": ' + "9" * 5000 + "}", "\x00"),
        *(
            {"text_config": [1]},
            {"num_hidden_layers": [3]},
            {"n_layer": True},
            {"num_hidden_layers": -1},
            {"tie_word_embeddings": "yes"},
            {"text_config": {"tie_word_embeddings": 10**30}},
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_configurations_that_make_no_sense(tmp_path, config):
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(8, 8) for i in range(3)}
    save_file(tensors | {"model.embed_tokens.weight": torch.ones(4, 8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    found = told(tmp_path)
    assert "config.json" in found if isinstance(config, str) else found.is_healthy


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("F32", [1] * 200, 4), ("F32", [2**62, 0], 0), ("F4", [4], 2), ("F8_E8M0", [2, 2], 4), ("F32", [2**61, 2**61], 4)],
    ids=str,
)
def test_headers_of_odd_types_and_shapes(tmp_path, dtype, shape, size):
    header = json.dumps({"a.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    told(path)
    told(saved(tmp_path, WEIGHTS), masks=path)
