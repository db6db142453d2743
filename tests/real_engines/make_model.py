"""A tiny Qwen2 for real engines, without weights: configuration, byte-level tokenizer, random LoRA.

The engines make the weights up (--load-format dummy). Runs in vLLM's environment.
usage: make_model.py MODEL_DIR LORA_DIR
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 1024
HIDDEN = 64
LAYERS = 2
LORA_RANK = 8
CONTEXT = 4096


def make_model(folder: Path) -> None:
    """Configuration and tokenizer: 3 specials, 256 bytes, and filler words."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_sliding_window": False,
    }
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    symbols = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<filler_{number}>" for number in range(len(symbols), VOCABULARY)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
    }
    _write(folder / "tokenizer_config.json", settings)


def make_lora(folder: Path) -> None:
    """A random adapter on two projections of every layer."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tensors = {}
    modules = ["q_proj", "v_proj"]
    for layer in range(LAYERS):
        for module in modules:
            base = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(LORA_RANK, HIDDEN) * 0.02
            tensors[f"{base}.lora_B.weight"] = torch.randn(HIDDEN, LORA_RANK) * 0.02
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "base_model_name_or_path": "tiny",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    _write(folder / "adapter_config.json", config)


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
    make_lora(Path(sys.argv[2]))
