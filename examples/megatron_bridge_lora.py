"""LoRA of a model by a recipe of Megatron-Bridge, with the fused head or with Megatron's own.

    torchrun --nproc-per-node 8 examples/megatron_bridge_lora.py --pretrained-checkpoint DIR
    torchrun ... examples/megatron_bridge_lora.py --pretrained-checkpoint DIR --recipe gemma2_2b_peft_config
    torchrun ... examples/megatron_bridge_lora.py --pretrained-checkpoint DIR --head spec   # or own: Megatron's

The fused head comes by the patch of all models, or in the layer spec of the recipe's model alone. Megatron-Bridge runs
on GPUs, with Transformer Engine; it is imported when the program runs, so `--help` works without it.
"""

import argparse
import importlib
import inspect
from collections.abc import Callable
from typing import Any

HEADS = ("patch", "spec", "own")


def fuse(config: Any, head: str) -> None:
    """Prepare the recipe's model, before it is built, for the head named in `HEADS`."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ext.megatron.spec_head import with_fused_head
    from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion

    if head == "own":
        return
    config.model.register_pre_wrap_hook(name_softcap)
    if head == "patch":
        patch_gpt_model_forward_for_linear_ce_fusion()
        return
    own = config.model.transformer_layer_spec

    def fused_spec(provider: Any, vp_stage: int | None = None) -> Any:
        return with_fused_head(own if isinstance(own, ModuleSpec) else _made(own, provider, vp_stage))

    config.model.transformer_layer_spec = fused_spec


def _made(spec: Callable[..., Any], provider: Any, vp_stage: int | None) -> Any:
    """Make the layer spec from a function, called as Megatron-Bridge's model providers call it."""
    staged = "vp_stage" in inspect.signature(spec).parameters
    return spec(provider, vp_stage=vp_stage) if staged else spec(provider)


def name_softcap(models: list[Any]) -> list[Any]:
    """Set `softcap` on Gemma 2's output layer, which caps logits in its own forward; the fused head reads it."""
    for part in (part for model in models for part in model.modules()):
        cap = getattr(getattr(part, "config", None), "final_logit_softcapping", None)
        if cap and getattr(part, "output_layer", None) is not None:
            part.output_layer.softcap = cap
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--pretrained-checkpoint", metavar="DIR", required=True, help="in Megatron's format")
    parser.add_argument("--recipe", default="llama3_8b_peft_config", help="of megatron.bridge.recipes")
    parser.add_argument("--head", choices=HEADS, default="patch", help="how the fused head comes in, or Megatron's own")
    parser.add_argument("--train-iters", type=int, metavar="N", help="default: the recipe's")
    options = parser.parse_args()
    try:
        recipes = importlib.import_module("megatron.bridge.recipes")
        from megatron.bridge.training.finetune import finetune
        from megatron.bridge.training.gpt_step import forward_step
    except ImportError as missing:
        parser.error(f"Megatron-Bridge cannot be imported: it needs GPUs, and pip install megatron-bridge. {missing}")
    config = getattr(recipes, options.recipe)(peft_scheme="lora")
    config.checkpoint.pretrained_checkpoint = options.pretrained_checkpoint
    if options.train_iters is not None:
        config.train.train_iters = options.train_iters
    fuse(config, options.head)
    finetune(config=config, forward_step_func=forward_step)
    if options.head != "own":
        from megatron_ext.megatron.fusion_report import fusion_report

        print(fusion_report())


if __name__ == "__main__":
    main()
