"""Models of transformers and timm, unmodified, with random weights: cut anywhere they equal themselves uncut, to the bit."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from recorded_models import check, recorded

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SEEN = {"image_size": 32, "num_labels": 5}


def ids(rows: int, count: int) -> torch.Tensor:
    return torch.randint(1, 100, (rows, count))


def mask(rows: int, count: int) -> torch.Tensor:
    found = (torch.arange(count) < torch.randint(count // 2, count, (rows, 1))).long()
    return found


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 100, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2 | NO_DROPOUT, lambda: {"input_ids": ids(2, 16)}, ""),
    "gpt2 with dropout": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False}, lambda: {"input_ids": ids(2, 16)}, ""),
    "gpt2's own loss": ("GPT2LMHeadModel", GPT2 | NO_DROPOUT | {"tie_word_embeddings": False},
                        lambda: {"input_ids": ids(2, 16), "labels": ids(2, 16)}, "loss"),
    "bert": ("BertForSequenceClassification", SMALL | {"vocab_size": 100, "max_position_embeddings": 32},
             lambda: {"input_ids": ids(3, 16), "attention_mask": mask(3, 16)}, ""),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
                                          "vocab_size": 100, "decoder_start_token_id": 0},
           lambda: {"input_ids": ids(3, 12), "attention_mask": mask(3, 12), "labels": ids(3, 8)}, "loss"),
    "llama": ("LlamaForCausalLM", SMALL | {"num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 64},
              lambda: {"input_ids": ids(2, 16)}, ""),
    "mixtral": ("MixtralForCausalLM", SMALL | {"num_key_value_heads": 1, "vocab_size": 100, "num_local_experts": 4},
                lambda: {"input_ids": ids(2, 16)}, ""),
    "mixtral's own loss": ("MixtralForCausalLM", SMALL | {"num_key_value_heads": 1, "vocab_size": 100,
                                                           "num_local_experts": 4, "output_router_logits": True},
                           lambda: {"input_ids": ids(2, 16), "attention_mask": mask(2, 16), "labels": ids(2, 16)}, "loss"),
    "bert's hidden states": ("BertForSequenceClassification",
                             SMALL | {"vocab_size": 100, "max_position_embeddings": 32, "output_hidden_states": True},
                             lambda: {"input_ids": ids(3, 16), "attention_mask": mask(3, 16)}, "hidden_states"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SMALL | {"num_key_value_heads": 1, "vocab_size": 100, "num_experts": 4,
                                                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
                  lambda: {"input_ids": ids(2, 16)}, ""),
    "switch": ("SwitchTransformersForConditionalGeneration",
               {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
                "num_experts": 3, "vocab_size": 100, "decoder_start_token_id": 0},
               lambda: {"input_ids": ids(3, 12), "labels": ids(3, 8)}, "loss"),
    "vit": ("ViTForImageClassification", SMALL | SEEN | {"patch_size": 8}, pixels, ""),
    "swin": ("SwinForImageClassification", SEEN | {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
                                                   "window_size": 4, "patch_size": 2}, pixels, ""),
    "convnext": ("ConvNextForImageClassification",
                 {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_labels": 5}, pixels, ""),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32],
                                                "depths": [1, 1, 1, 1], "layer_type": "basic", "num_labels": 5},
               pixels, ""),
}  # fmt: skip


def some_cuts(count: int) -> Sequence[Sequence[int]]:
    return [[], [count // 2], [count // 3, 2 * count // 3], list(range(1, count))]


def squares(result: Any) -> torch.Tensor:
    if isinstance(result, tuple):
        return torch.stack([(n + 1) * squares(one) for n, one in enumerate(result)]).sum()
    return (result["logits"] if isinstance(result, dict) else result).float().square().mean()


@pytest.mark.parametrize("name", CASES)
def test_transformers(name: str) -> None:
    kind, args, value, output = CASES[name]
    cls = getattr(transformers, kind)
    chain = check(lambda: cls(cls.config_class(**args)), [value(), value()], squares, some_cuts, output)
    assert len(chain) >= 10


def test_padded_in_some_micro_batches_only() -> None:
    """Where nothing is masked the library leaves out the mask; here it is made, and computes the same up to rounding."""
    cls = transformers.BertForSequenceClassification
    config = cls.config_class(**CASES["bert"][1])
    padded = CASES["bert"][2]()
    chain = recorded(lambda: cls(config).eval(), padded)
    torch.manual_seed(7)
    plain, value = cls(config).eval(), {"input_ids": ids(3, 16), "attention_mask": torch.ones(3, 16, dtype=torch.int64)}
    found: Any = value
    with torch.no_grad():
        for layer in chain.build_range(0, len(chain), 0):
            found = layer.eval()(found)
        assert torch.allclose(found, plain(**value)["logits"], atol=1e-5)


@pytest.mark.parametrize("name", ["mobilenetv3_small_100", "convnext_atto", "efficientnet_b0"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    check(lambda: timm.create_model(name, num_classes=5), [torch.randn(2, 3, 32, 32)], squares, some_cuts)
