"""Names and shapes tell of real architectures what their modules tell: what is pruned, and which way round."""

from contextlib import ExitStack

import pytest

from prunus.doctor import examine
from prunus.doctor.findings import Expected
from prunus.doctor.sources import read_contents
from prunus.doctor.tensor_checks import roles
from prunus.eligible import eligible

SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
WIDE = SMALL | {"intermediate_size": 64}
SEQ = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
MODELS = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64}),
    "LlamaForCausalLM": ("LlamaConfig", WIDE),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", WIDE | {"head_dim": 8, "num_key_value_heads": 2}),
    "OPTForCausalLM": ("OPTConfig", SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 16}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", WIDE),
    "FalconForCausalLM": ("FalconConfig", SMALL),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 32, "d_ff": 64, "num_layers": 3, "num_heads": 4, "d_kv": 8, "vocab_size": 64},
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        SEQ | {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "vocab_size": 64},
    ),
    "BertForMaskedLM": ("BertConfig", WIDE),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_agree_with_modules(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    kind, options = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, kind)(**options))
    model.save_pretrained(tmp_path)
    with ExitStack() as stack:
        tensors = read_contents(tmp_path, stack).tensors
    named = {name: role.outputs for name, role in roles(tensors, Expected()).items() if role.kind == "weight"}
    assert named == {weight.name: weight.outputs for weight in eligible(model).weights}
    assert examine(tmp_path).findings == []
