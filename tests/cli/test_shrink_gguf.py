"""A shrunk Llama becomes a GGUF file that llama.cpp loads, also where its heads are narrower than the model."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_prune_command import run

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder, path):
    """What llama.cpp's own converter writes of the configuration and the tensors; the tokens are made up."""
    from gguf import GGUFWriter

    config = json.loads((folder / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer, tokens = GGUFWriter(path, "llama"), ["<s>", *(f"t{i}" for i in range(1, config["vocab_size"]))]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(*renamed(name.removesuffix(".weight"), tensor.numpy(), heads, groups))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed(name, array, heads, groups):
    """Rotary pairs of transformers are halves of a head, those of llama.cpp are neighbours."""
    if name in WHOLE:
        return f"{WHOLE[name]}.weight", array
    _, _, layer, part = name.split(".", 3)
    if part in ("self_attn.q_proj", "self_attn.k_proj"):
        num = heads if part == "self_attn.q_proj" else groups
        array = np.ascontiguousarray(array.reshape(num, 2, -1, array.shape[1]).swapaxes(1, 2)).reshape(array.shape)
    return f"blk.{layer}.{NAMES[part]}.weight", array


def logprobs_of(path, tokens):
    """Logarithms of the largest probabilities of the token that llama.cpp writes next, by the token's text."""
    if importlib.util.find_spec("xllamacpp"):
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(path), 64, 1, False
        answer = xllamacpp.Server(options).handle_completions({"prompt": tokens, "max_tokens": 1, "logprobs": 10})
        return {one["token"]: one["logprob"] for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    import llama_cpp

    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, n_threads=1, verbose=False)
    answer = llama.create_completion(tokens, max_tokens=1, logprobs=10, temperature=0.0)
    return answer["choices"][0]["logprobs"]["top_logprobs"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--size", "0.5"], ["--heads", "1", "--layers", "1"], ["--neurons", "0.5"]], ids=" ".join
)
def test_llama_cpp_predicts_what_transformers_predicts(options, tmp_path):
    pytest.importorskip("gguf")
    if not importlib.util.find_spec("xllamacpp"):
        pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python, or xllamacpp, which has wheels")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}
    LlamaForCausalLM(LlamaConfig(**sizes, **more)).save_pretrained(tmp_path / "dense")
    np.random.default_rng(0).integers(0, 64, 2000).astype("<u2").tofile(tmp_path / "tokens.u16")
    data = ("--tokens", tmp_path / "tokens.u16", "--samples", 16, "--length", 24, "--eval-windows", 2)
    run("shrink", tmp_path / "dense", *data, *options, "--out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"] * config["head_dim"] == 64) == ("--neurons" in options)
    write_gguf(tmp_path / "out", tmp_path / "out.gguf")
    tokens = list(range(3, 19))
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(tmp_path / "out")(torch.tensor([tokens])).logits[0, -1]
    wanted = {f"t{i}": value for i, value in enumerate(logits.log_softmax(-1).tolist())}
    found = logprobs_of(tmp_path / "out.gguf", tokens)
    assert len(found) >= 10 and max(found, key=found.get) == max(wanted, key=wanted.get)
    assert all(abs(wanted[token] - value) < 0.01 for token, value in found.items())  # its cache has 16 bits
