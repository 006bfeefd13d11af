"""Tensor-parallel plans of whole models: ours, transformers' own, or a caller's."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from megatron_ext.dtensor.decoder import output_head_path, text_model, text_model_path
from megatron_ext.dtensor.experts import ExpertsByColumn, ExpertsByExpert, column_layout
from megatron_ext.dtensor.layers import (
    ParallelSizes,
    Plan,
    Unknown,
    check_attention,
    check_draws,
    model_plan,
    takes_attention_functions,
)
from megatron_ext.dtensor.replicated_parameters import cut_in_vain, cuts_heads, modules_of, with_summed_gradients
from megatron_ext.dtensor.sequence_arguments import EmbeddingRows
from megatron_ext.dtensor.styles import FusedColwise

_OF_LINEARS = (ColwiseParallel, RowwiseParallel, FusedColwise, EmbeddingRows)
_NO_DECODER = "embed_tokens, layers and norm are not in one module of it"
_EXPERTS: dict[str, Callable[[], ParallelStyle]] = {
    "moe_tp_experts": ExpertsByColumn,
    "ep_dispatch_experts": ExpertsByExpert,
}


CustomPlan = Mapping[str, Any] | str | None
"""A caller's plan, instead of ours: see `custom_plan`."""


def choose_plan(model: nn.Module, layout: ParallelSizes, custom: CustomPlan = None) -> tuple[Plan, str | None]:
    """Choose the plan that parallelizes `model`, on any device (also meta), as `layout` says.

    Returns:
        Styles by the names of the model's modules, empty for one tensor-parallel rank; and the part of the model that
        is not understood, so that it keeps transformers' attention, or None: it gets our attention.
    """
    plan, unknown = _chosen(model, layout, custom)
    if layout.tp > 1:
        _check_modules(model, plan)
    return plan, unknown


def _chosen(model: nn.Module, layout: ParallelSizes, custom: CustomPlan) -> tuple[Plan, str | None]:
    if layout.expert_parallel and not any(name.endswith(".experts") for name, _ in model.named_modules()):
        raise ValueError(
            f"expert parallelism of {type(model).__name__}, which has no experts: set expert_parallel_size to 1"
        )
    why = _unknown(model, layout if custom is None else ParallelSizes())
    wanted = {
        "context parallelism": layout.cp > 1,
        "sequence parallelism": layout.sequence_parallel and layout.tp > 1 and custom is None,
        "expert parallelism": layout.expert_parallel and layout.tp > 1 and custom is None,
    }
    if why is not None and any(wanted.values()):
        raise _unsupported(model, next(name for name, asked in wanted.items() if asked), why)
    if custom is not None:
        given = custom_plan(custom)
        if layout.tp > 1 and (block := cut_in_vain(model, given)) is not None:
            raise ValueError(
                f"custom_parallel_plan cuts {block}, and what tensor-parallel ranks compute of it does not add up to "
                f"it; leave its modules out of the plan"
            )
        return with_summed_gradients(model, given) if layout.tp > 1 else given, why
    if layout.tp == 1:
        return {}, why
    if why is None:
        plan = structural_plan(model, layout)
        check_draws(model, cuts_heads(model, plan))
        return plan, None
    if why is _NO_DECODER:
        raise _unsupported(model, "tensor parallelism", why)
    try:
        named = get_hf_tp_plan(model, layout.tp)
    except ValueError as error:
        raise _unsupported(model, "tensor parallelism", f"{why}, and {error}") from error
    # Names of existing modules alone: a layer may lack a module, and torch warns of each name that it does not find.
    plan = {name: style for path, style in named.items() for name, _ in modules_of(model, path)}
    if not takes_attention_functions(model):  # older forwards reshape by the whole number of heads
        raise _unsupported(model, "tensor parallelism", why)
    if any(isinstance(style, ExpertsByColumn) for style in plan.values()):
        experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
        if reason := next(filter(None, (column_layout(module, layout.tp) for module in experts)), None):
            # The advice after ";" does not apply: expert parallelism of a model with unknown parts is refused above.
            raise _unsupported(model, "tensor parallelism", f"{why}, and {reason.partition(';')[0]}")
    if (block := cut_in_vain(model, plan)) is not None:
        cut = f"transformers' tp_plan cuts {block}, whose pieces do not add up to it"
        raise _unsupported(model, "tensor parallelism", f"{why}, and {cut}")
    check_draws(model, cuts_heads(model, plan))
    return with_summed_gradients(model, plan), why


def _check_modules(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError for a module that its style cannot cut; torch would raise when other modules are cut already."""
    for path, style in plan.items():
        if type(style) not in _OF_LINEARS:  # a user's own style may cut other modules
            continue
        for name, module in modules_of(model, path):
            if not isinstance(module, nn.Linear | nn.Embedding):
                kind = type(module)
                raise ValueError(
                    f"tensor parallelism of {type(model).__name__}: {name} is a "
                    f"{kind.__module__}.{kind.__qualname__}, and only nn.Linear and nn.Embedding can be cut; if it "
                    "has an adapter, first merge the adapter into the weight (PEFT's merge_and_unload()), leave the "
                    "layer out of target_modules, or run the model data parallel alone"
                )


def structural_plan(model: nn.Module, layout: ParallelSizes) -> Plan:
    """Return the plan that follows from the modules of `model`; raises what `model_plan` does."""
    text, head = text_model_path(model), output_head_path(model)
    prefix = f"{text}." if text else ""
    plan: Plan = {f"{prefix}{name}": style for name, style in model_plan(model, layout).items()}
    plan[f"{prefix}embed_tokens"] = EmbeddingRows(input_layouts=Replicate(), output_layouts=layout.stream)
    plan[head] = _head_style(model.get_submodule(head), layout.tp, layout.stream)
    return plan


def _head_style(head: Any, ranks: int, stream: Placement) -> ParallelStyle:
    """Return the style of the head: sharded by columns, and so are its logits; whole on every rank if some ranks would
    get no column, which FSDP2 does not allow."""
    if head.weight.shape[0] >= ranks:
        return ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    return PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate(), use_local_output=True)


def _unknown(model: nn.Module, layout: ParallelSizes) -> str | None:
    """Return the part of `model` that is not understood; None: all is understood."""
    try:
        text_model(model)
    except ValueError:
        return _NO_DECODER
    try:
        check_attention(model)
        model_plan(model, layout)
    except Unknown as error:
        return f"{error} is not known here"
    return None


def _unsupported(model: nn.Module, what: str, reason: str) -> ValueError:
    return ValueError(
        f"{what} of {type(model).__name__} is not supported ({reason}); run it data parallel alone, or pass a "
        f"custom_parallel_plan for tensor parallelism"
    )


def translate_parallel_style(style: str) -> ParallelStyle:
    """Return torch's parallel style, or ours, for transformers' name of a style.

    Raises:
        ValueError: the name has no counterpart.
    """
    styles: dict[str, Callable[[], ParallelStyle]] = {
        **_EXPERTS,
        "packed_colwise": FusedColwise,
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: EmbeddingRows(input_layouts=Replicate()),
        "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
        # A norm of q or k over the channels of each head, with the heads sharded over ranks.
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    if style not in styles:
        raise ValueError(f"parallel style {style!r} is unknown: it must be one of {sorted(styles)}; pass a custom plan")
    return styles[style]()


def get_hf_tp_plan(model: nn.Module, ranks: int = 1) -> Plan:
    """Return transformers' own plan for `model`, in torch's styles and ours. The lm head's logits stay sharded if the
    vocabulary has at least as many words as there are `ranks`.

    Raises:
        ValueError: transformers has no plan for this model, or its plan has a style that `translate_parallel_style`
            lacks.
    """
    text, head = text_model_path(model), output_head_path(model)
    prefix = f"{text}." if text else ""
    own = getattr(model, "_tp_plan", None) or {}
    inner = getattr(text_model(model).config, "base_model_tp_plan", None) or {}
    names = {f"{prefix}{name}": style for name, style in inner.items()} | own
    if not names:
        raise ValueError(f"transformers has no tp_plan for {type(model).__name__}; pass a custom_parallel_plan")
    stacks = [name for name, style in names.items() if style in _EXPERTS]
    plan = {
        name: translate_parallel_style(style)
        for name, style in names.items()
        # Transformers' plans also name the parameters of experts, which our styles of experts shard.
        if style != "replicate" and name.rpartition(".")[0] not in stacks
    }
    if names.get(f"{prefix}embed_tokens") != "replicate":
        plan.setdefault(f"{prefix}embed_tokens", EmbeddingRows(input_layouts=Replicate()))
    plan[head] = _head_style(model.get_submodule(head), ranks, Replicate())
    return plan


def custom_plan(plan: Mapping[str, Any] | str) -> Plan:
    """Return a caller's plan, a mapping of module names to torch's styles or transformers' names of styles.

    `plan` may be "package.module.NAME" of such a mapping, or of a function without arguments that returns one.
    """
    found: Any = plan
    if isinstance(plan, str):
        path, _, name = plan.rpartition(".")
        try:
            found = getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"custom_parallel_plan is {plan!r}, which cannot be imported ({error}); pass 'package.module.NAME'"
            ) from error
        if callable(found):
            found = found()
    if not isinstance(found, Mapping):
        raise ValueError(
            f"custom_parallel_plan is a {type(found).__name__}: it must map module names to styles, or be the import "
            f"path of such a mapping"
        )
    styles = {
        name: translate_parallel_style(style) if isinstance(style, str) else style for name, style in found.items()
    }
    for name, style in styles.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(
                f"custom_parallel_plan[{name!r}] is a {type(style).__name__}: it must be a "
                f"torch.distributed.tensor.parallel style, or transformers' name of one"
            )
    return styles
