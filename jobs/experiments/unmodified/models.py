"""The models: how a job names each, what its data are, and where torch's pipelining is told to split it."""

from typing import Any, NamedTuple

import torch


class Model(NamedTuple):
    """A model of the table."""

    title: str
    name: str
    args: dict[str, Any]
    data: str
    splits: tuple[str, str]
    """Modules in front of which torch's pipelining splits it, in three."""
    output: str = ""


_TEXT = {"vocab_size": 100, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
_BERT = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
         "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
_GPT2 = {
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 100,
       "use_cache": False, "dropout_rate": 0.0,
       "decoder_start_token_id": 0}  # fmt: skip
_VIT = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
        "patch_size": 8, "num_labels": 5}  # fmt: skip
_SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 2,
         "num_labels": 5, "drop_path_rate": 0.0}  # fmt: skip

MODELS = [
    Model("GPT-2, tied words (transformers)", "transformers:GPT2LMHeadModel", _TEXT | _GPT2, "tokens",
          ("transformer.h.1", "transformer.h.3")),
    Model("BERT with masks of padding (transformers)", "transformers:BertForSequenceClassification", _BERT, "masked",
          ("bert.encoder.layer.1", "bert.encoder.layer.3")),
    Model("T5, its own loss (transformers)", "transformers:T5ForConditionalGeneration", _T5, "translation",
          ("encoder.block.1", "decoder.block.1"), "loss"),
    Model("Llama (transformers)", "transformers:LlamaForCausalLM", _TEXT | _LLAMA, "tokens",
          ("model.layers.1", "model.layers.3")),
    Model("ViT (transformers)", "transformers:ViTForImageClassification", _VIT, "pixels", ("vit.layers.1", "vit.layers.3")),
    Model("Swin (transformers)", "transformers:SwinForImageClassification", _SWIN, "pixels",
          ("swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1")),
    Model("MobileNetV3 (timm)", "timm:mobilenetv3_small_100", {"num_classes": 5}, "images", ("blocks.1", "blocks.4")),
    Model("ConvNeXt (timm)", "timm:convnext_atto", {"num_classes": 5}, "images", ("stages.1", "stages.3")),
    Model("EfficientNet-B0 (timm)", "timm:efficientnet_b0", {"num_classes": 5}, "images", ("blocks.2", "blocks.5")),
    Model("ResNet-50 (timm)", "timm:resnet50", {"num_classes": 5}, "images", ("layer2", "layer4")),
    Model("U-Net with long skips", "recorded_nets:UNet", {}, "pictures", ("down.2", "up.1")),
    Model("keywords, masks, a dict as result, tied words", "recorded_nets:Language", {}, "sentences",
          ("blocks.1", "blocks.2")),
]  # fmt: skip


class Rows:
    """Samples that are dicts."""

    def __init__(self, table: dict[str, torch.Tensor]) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(next(iter(self.table.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[index] for name, rows in self.table.items()}


_COUNT, _LENGTH = 24, 16


def _made(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    if kind == "tokens":
        ids = torch.randint(3, 100, (_COUNT, _LENGTH))
        return {"input_ids": ids, "labels": ids.roll(-1, 1)}
    if kind == "masked":
        lengths = torch.randint(6, _LENGTH, (_COUNT, 1))
        mask = (torch.arange(_LENGTH) < lengths).long()
        return {"input_ids": torch.randint(100, (_COUNT, _LENGTH)), "attention_mask": mask,
                "labels": torch.randint(2, (_COUNT,))}  # fmt: skip
    if kind == "translation":
        mask = (torch.arange(_LENGTH) < torch.randint(6, _LENGTH, (_COUNT, 1))).long()
        return {"input_ids": torch.randint(1, 100, (_COUNT, _LENGTH)), "attention_mask": mask,
                "labels": torch.randint(1, 100, (_COUNT, 8))}  # fmt: skip
    return {"pixel_values": torch.randn(_COUNT, 3, 32, 32), "labels": torch.randint(5, (_COUNT,))}


def tokens() -> tuple[Rows, Rows]:
    return Rows(_made("tokens")), Rows(_made("tokens"))


def long_tokens() -> tuple[Rows, Rows]:
    ids = torch.randint(100, (256, 64), generator=torch.Generator().manual_seed(3))
    rows = Rows({"input_ids": ids, "labels": ids})
    return rows, rows


def masked() -> tuple[Rows, Rows]:
    return Rows(_made("masked")), Rows(_made("masked"))


def translation() -> tuple[Rows, Rows]:
    return Rows(_made("translation")), Rows(_made("translation"))


def pixels() -> tuple[Rows, Rows]:
    return Rows(_made("pixels")), Rows(_made("pixels"))


def images() -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    table = _made("images")
    both = table["pixel_values"], table["labels"]
    return both, both
