"""Tiny models that see, of the ten classes that NeMo-RL's module has plans for: their configs, and images for them.

Each row of a batch has one image, which stands for `Seeing.tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

IMAGE_TOKEN, VIDEO_TOKEN = 255, 254
PATCH, SIDE = 4, 16  # pixels; four tokens where 2 x 2 patches are merged
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
GEMMA3 = {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2, "final_logit_softcapping": 30.0}
TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
INDICES = {"image_token_index": IMAGE_TOKEN, "video_token_index": VIDEO_TOKEN}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
QWEN_VISION = {"depth": 2, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
CLIP = {**VISION, "model_type": "clip_vision_model", "image_size": 8, "projection_dim": 16}
LLAMA, QWEN2, MISTRAL = ({**SIZES, "model_type": name} for name in ("llama", "qwen2", "mistral"))
LLAMA4 = {
    "intermediate_size_mlp": 128,
    "head_dim": 8,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
    "no_rope_layer_interval": 2,
}
LLAMA4_VISION = {
    "intermediate_size": 128,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
    "vision_output_dim": 24,
}

Pictures = Callable[[int, torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Seeing:
    """A class of model that sees.

    Attributes:
        name: its class, without ``ForConditionalGeneration``.
        fields: of its config.
        tokens: how many an image stands for.
        pictures: what the model is given for as many images, one for each row.
        kinds: the argument that tells image tokens from others, where it takes one.
    """

    name: str
    fields: dict[str, Any]
    tokens: int
    pictures: Pictures
    kinds: str = ""

    @property
    def model_class(self) -> Any:
        """Of transformers."""
        return getattr(transformers, f"{self.name}ForConditionalGeneration")

    def config(self, **changes: Any) -> Any:
        """The config with ``changes`` in the language model."""
        text = {**self.fields["text_config"], **changes}
        return self.model_class.config_class(**{**self.fields, "text_config": text})


def pixels(*shape: int, sizes: bool = False) -> Pictures:
    """Square images as they come; with their ``sizes`` beside them where the model asks for these."""

    def make(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        images = torch.randn(rows, *shape, generator=generator)
        return {"pixel_values": images} | ({"image_sizes": torch.full((rows, 2), shape[-1])} if sizes else {})

    return make


def patches(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images of 4 x 4 patches one behind the other, as Qwen's models take them."""
    values = torch.randn(rows * 16, 3 * 2 * PATCH * PATCH, generator=generator)
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(rows, 1)}


def _llava(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": vision, **INDICES, **more}


ONE_SIZE = {"image_grid_pinpoints": [[8, 8]]}  # of images that are cut into tiles: the whole and one tile
SEEING: dict[str, Seeing] = {
    "qwen2-vl": Seeing(
        "Qwen2VL",
        {
            "text_config": {**SIZES, **MROPE},
            "vision_config": {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64},
            **TOKENS,
        },
        4,
        patches,
        "mm_token_type_ids",
    ),
    "qwen2.5-vl": Seeing(
        "Qwen2_5_VL",
        {
            "text_config": {**SIZES, **MROPE},
            "vision_config": {
                **QWEN_VISION,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
            **TOKENS,
        },
        4,
        patches,
        "mm_token_type_ids",
    ),
    "llava": Seeing("Llava", _llava(LLAMA, CLIP), 4, pixels(3, 8, 8)),
    "llava-next": Seeing("LlavaNext", _llava(LLAMA, CLIP, **ONE_SIZE), 10, pixels(2, 3, 8, 8, sizes=True)),
    "llava-next-video": Seeing("LlavaNextVideo", _llava(LLAMA, CLIP, **ONE_SIZE), 10, pixels(2, 3, 8, 8, sizes=True)),
    "llava-onevision": Seeing(
        "LlavaOnevision",
        _llava(
            QWEN2,
            {**VISION, "model_type": "siglip_vision_model", "image_size": 8, "vision_use_head": False},
            **ONE_SIZE,
        ),
        10,
        pixels(2, 3, 8, 8, sizes=True),
    ),
    "mistral3": Seeing(
        "Mistral3",
        _llava({**MISTRAL, "head_dim": 8}, {**VISION, "model_type": "pixtral", "head_dim": 8}),
        4,
        pixels(3, SIDE, SIDE, sizes=True),
    ),
    "smolvlm": Seeing(
        "SmolVLM", {"text_config": LLAMA, "vision_config": VISION, **TOKENS}, 4, pixels(1, 3, SIDE, SIDE)
    ),
    "llama4": Seeing(
        "Llama4",
        _llava({**SIZES, **LLAMA4}, {**VISION, **LLAMA4_VISION}),
        4,
        pixels(3, SIDE, SIDE),
    ),
    "gemma3-vision": Seeing(
        "Gemma3",
        {"text_config": {**SIZES, **GEMMA3}, "vision_config": VISION, "mm_tokens_per_image": 4, **TOKENS},
        4,
        pixels(3, SIDE, SIDE),
        "token_type_ids",
    ),
}


def seeing_of(model: nn.Module) -> Seeing:
    """What is known of a model that sees."""
    return next(seeing for seeing in SEEING.values() if isinstance(model, seeing.model_class))


def with_images(seeing: Seeing, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """What a model is given beside ``ids``, in which tokens 1 to `Seeing.tokens` of each row become an image."""
    ids[ids >= VIDEO_TOKEN] = 0
    ids[:, 1 : 1 + seeing.tokens] = IMAGE_TOKEN
    kinds = {seeing.kinds: (ids == IMAGE_TOKEN).long()} if seeing.kinds else {}
    return {**seeing.pictures(len(ids), generator), **kinds}
