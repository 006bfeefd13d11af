"""Megatron's models around a language model, tiny: LLaVA with a vision tower, MIMO with vision."""

import torch
from torch import nn

from tests.gpt import SEQUENCE, VOCAB, tiny_config

IMAGE, PATCH = 8, 4
PATCHES = (IMAGE // PATCH) ** 2
LLAVA_IMAGE = -200  # the token of an image, out of the vocabulary as in LLaVA
MIMO_IMAGE = VOCAB - 1


def tiny_llava():
    """LLaVAModel; its image counts as one token of the text and as `PATCHES` of the language model."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLPSubmodules

    vision_spec = get_gpt_layer_local_spec()
    vision_spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    vision = tiny_config()
    vision.vision_model_type = "internvit"  # "clip" needs Transformer Engine's norm
    torch.manual_seed(0)
    return LLaVAModel(
        language_transformer_config=tiny_config(),
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=VOCAB,
        language_max_sequence_length=2 * SEQUENCE,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=vision_spec,
        drop_vision_class_token=True,
        vision_projection_config=tiny_config(),
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type="rope",
        img_h=IMAGE,
        img_w=IMAGE,
        patch_dim=PATCH,
        image_token_index=LLAVA_IMAGE,
    )


def llava_step(model):
    """Losses `[B, S]`, and the mask that LLaVA makes of them, in one."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (2, SEQUENCE + 1), generator=generator)
    inputs = tokens[:, :-1].clone()
    inputs[:, 3] = LLAVA_IMAGE
    length = SEQUENCE - 1 + PATCHES
    loss, mask = model(
        torch.randn(2, 3, IMAGE, IMAGE, generator=generator),
        inputs,
        torch.arange(SEQUENCE).expand(2, SEQUENCE),
        torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
        labels=tokens[:, 1:],
        loss_mask=torch.ones(2, SEQUENCE),
    )
    assert loss.shape == mask.shape == (2, length)
    return loss * mask


class Patches(nn.Module):
    """An encoder of images, as a user of MIMO brings one: `[B, 3, height, width]` to `[B, patches, hidden]`."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.embed = nn.Conv2d(3, hidden_size, kernel_size=PATCH, stride=PATCH)

    def forward(self, images):
        return self.embed(images).flatten(2).transpose(1, 2)


def tiny_mimo():
    """MimoModel: a GPTModel, and a vision submodule with an encoder and a projection."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mimo.config import MimoModelConfig
    from megatron.core.models.mimo.model.base import MimoModel
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    config = tiny_config()
    torch.manual_seed(0)
    vision = ModuleSpec(
        module=VisionModalitySubmodules,
        submodules={
            "encoders": {"patches": ModuleSpec(module=Patches, params={"hidden_size": 12})},
            "input_projections": [
                ModuleSpec(module=nn.Linear, params={"in_features": 12, "out_features": config.hidden_size})
            ],
        },
    )
    language = {
        "config": config,
        "transformer_layer_spec": get_gpt_layer_local_spec(),
        "vocab_size": VOCAB,
        "max_sequence_length": SEQUENCE,
        "position_embedding_type": "rope",
    }
    return MimoModel(
        MimoModelConfig(
            language_model_spec=ModuleSpec(module=GPTModel, params=language),
            modality_submodules_spec={"images": vision},
            special_token_ids={"images": MIMO_IMAGE},
        )
    )


def mimo_step(model):
    """Losses `[B, S]`; each sample has an image."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB - 1, (2, SEQUENCE + 1), generator=generator)
    inputs = tokens[:, :-1].clone()
    inputs[:, 2 : 2 + PATCHES] = MIMO_IMAGE
    loss, _ = model(
        inputs,
        torch.arange(SEQUENCE).expand(2, SEQUENCE),
        torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None],
        labels=tokens[:, 1:],
        modality_inputs={"images": {"patches": {"images": torch.randn(2, 3, IMAGE, IMAGE, generator=generator)}}},
    )
    return loss
