"""Shared vocabulary layers for models that Megatron builds: each stage gets its rows of the first and last stage's."""

import contextlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_ext.distributed import collectives
from megatron_ext.experimental.pipeline_vocabulary import multi_token_stage
from megatron_ext.experimental.pipeline_vocabulary.groups import PipelineGroups
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Sent
from megatron_ext.experimental.pipeline_vocabulary.shared_vocabulary_layers import (
    SharedEmbedding,
    SharedOutputLayer,
    Sharing,
)
from megatron_ext.head.checks import rounds
from megatron_ext.megatron import language_model_patch
from megatron_ext.megatron.fused_loss import fusion_decision, model_methods
from megatron_ext.megatron.fused_loss.module_calls import attribute
from megatron_ext.megatron.fusion_report import counters_of
from megatron_ext.megatron.output_layer import is_bent
from megatron_ext.numerics.batch_invariance import is_on

SHARED = "megatron_ext_shared_vocabulary"  # marks a model whose vocabulary is shared


class _Holder(nn.Module):
    """Stand-in for the embedding on a stage that has no embedding of its own."""

    def __init__(self, word_embeddings: SharedEmbedding):
        super().__init__()
        self.word_embeddings = word_embeddings

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return self.word_embeddings.sharded_state_dict(f"{prefix}word_embeddings.", sharded_offsets, metadata)


class Builder:
    """Sharing of the vocabulary of models that Megatron builds on this stage, chunk after chunk. Once `end` is closed,
    the models cannot be trained any more."""

    def __init__(self, end: contextlib.ExitStack) -> None:
        self._built: list[Any] = []
        self._end = end

    def add(self, model: Any) -> None:
        """Add a chunk that was built, before it is wrapped; with the last one the vocabulary layers are shared.

        Communicates, with the last chunk: which ranks form groups, and whether the embedding gives slices; one
        broadcast over the pipeline for the embedding and one for an output layer that is not tied to it, each of what
        Megatron would have kept on one stage.

        Raises:
            ValueError: the model or its config cannot be run so; the message says why. The error is raised on every
                stage if all stages can see the reason.
        """
        if hasattr(model, SHARED) or any(one is model for one in self._built):
            return  # a derived class has called the `__init__` of its base class, which is replaced too
        built, self._built = self._built, []  # nothing is left of a model that is refused
        check_config(model.config)
        check_model(model)
        check_vocabulary(model.vocab_size, model.config)
        self._built = [*built, model]
        # Not before: Megatron's first and last stage send each other tied weights while they build their chunks.
        if len(self._built) == (model.config.virtual_pipeline_model_parallel_size or 1):
            built, self._built = self._built, []
            sharing = self._share(built[0], built[-1], model.share_embeddings_and_output_weights)
            for chunk in built:
                # The rows of embedding and output layer lie on the same rank: stages have nothing to sum.
                chunk.share_embeddings_and_output_weights = False
                setattr(chunk, SHARED, sharing)

    def _share(self, front: Any, back: Any, tied: bool) -> Sharing:
        """Give this stage's first chunk its rows of the embedding, and its last chunk those of the output layer."""
        config, size = front.config, front.vocab_size
        mtp_layers = config.mtp_num_layers or 0
        groups = PipelineGroups(output_layer_fault(back))
        self._end.callback(groups.close)
        whole = front.embedding.word_embeddings.weight if groups.is_first else None
        weight = _rows(whole, groups, 0, size, config)
        # Only the stage that has built the embedding knows whether it returns slices of the sequence.
        in_slices = groups.is_first and front.embedding.word_embeddings.reduce_scatter_embeddings
        in_slices = collectives.all_gather_object(in_slices, groups[Sent.TOKENS])[0]
        embedding = SharedEmbedding(weight, size, groups, in_slices=in_slices, mtp_layers=mtp_layers)
        home = back if mtp_layers and groups.is_last else front
        if hasattr(home, "embedding"):
            home.embedding.word_embeddings = embedding
        else:
            home.embedding = _Holder(embedding)
        if mtp_layers and (groups.is_first or groups.is_last):
            multi_token_stage.watch(home)
        if tied:  # with gradient accumulation fusion the embedding's gradient is added beside the output layer's
            weight.zero_out_wgrad = True  # type: ignore[attr-defined]
        else:
            whole = back.output_layer.weight if groups.is_last else None
            weight = _rows(whole, groups, groups.last, size, config)
        output = SharedOutputLayer(weight, size, groups, tied=tied, config=config)
        back.output_layer = output
        if groups.is_last:
            setattr(back, fusion_decision.LOSS, output.losses)
            output.counters = counters_of(back)
            # Megatron's method looks for an entry of the output layer on every stage that has one, and stores a copy of
            # the embedding where multi-token prediction runs. Here rows are stored once, by the module that has them.
            hidden = {"post_process": False} if tied else {}
            hidden |= {"mtp_process": False} if mtp_layers else {}
            if hidden:
                back.sharded_state_dict = _with_attributes(back, back.sharded_state_dict, hidden)
        return Sharing(groups, embedding, output)


def _rows(whole: Tensor | None, groups: PipelineGroups, source: int, size: int, config: Any) -> nn.Parameter:
    """Return this rank's rows of the tensor-parallel shard that stage `source` has made."""
    columns = size // parallel_state.get_tensor_model_parallel_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if whole is None:
        buffer = torch.empty(columns, config.hidden_size, dtype=config.params_dtype, device=device)
    else:
        buffer = whole.detach().to(device).contiguous()
    collectives.start_broadcast(buffer, groups[Sent.HIDDEN], source).wait()
    rows = columns // groups.stages
    own = buffer[groups.stage * rows : (groups.stage + 1) * rows].clone()
    weight = nn.Parameter(own.cpu() if config.use_cpu_initialization else own)
    # Attributes that Megatron reads: the parameter is cut over ranks along dimension 0, and is of the vocabulary.
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    weight.allreduce = True  # type: ignore[attr-defined]
    weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    return weight


def _with_attributes(owner: Any, method: Any, values: dict[str, Any]) -> Any:
    """Wrap a method of `owner` so that `owner` has these attributes during a call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(attribute(owner, name, value))
            return method(*args, **kwargs)

    return call


def check_config(config: Any) -> None:
    """Raise ValueError for a config whose vocabulary cannot be shared over the stages, before anything is sent."""
    if config.pipeline_model_parallel_size < 2:
        raise ValueError(
            "pipeline_model_parallel_size is 1: there are no stages to share the vocabulary; train with at least 2, or "
            "without sharing"
        )
    refused = {
        "mtp_detach_heads": "the output layer's rows get the gradient of all losses in one pass",
        "enable_autocast": "the stages agree on dtypes in advance",
        "defer_embedding_wgrad_compute": "the output layer's weight gradient has its own place in the schedule",
        "num_microbatches_with_partial_activation_checkpoints": "recomputation is the same for all micro-batches here",
        "overlap_moe_expert_parallel_comm": "that is a schedule of its own",
        "fine_grained_activation_offloading": "that is a schedule of its own",
        "use_mup": "its logits are scaled",
        "init_model_with_meta_device": "the stages get their rows from the initial weights",
        "enable_cuda_graph": "the passes of the vocabulary layers change places with those of the layers",
        "cuda_graph_impl": "the passes of the vocabulary layers change places with those of the layers",
        "batch_invariant_mode": "the bits of the vocabulary layers' passes depend on the batch",
    }
    values = {name: getattr(config, name, None) for name in refused} | {"batch_invariant_mode": is_on(config)}
    for name, reason in refused.items():
        if values[name] not in (None, False, 0, "none"):
            raise ValueError(
                f"{name} is {values[name]!r}: a vocabulary shared over pipeline stages cannot be trained with "
                f"it, because {reason}; turn one of them off"
            )


def check_model(model: Any) -> None:
    """Raise ValueError for a model that cannot share its vocabulary, as far as every stage sees it."""
    for name in ("share_embeddings_and_output_weights", "vocab_size", "position_embedding_type"):
        if not hasattr(model, name):
            raise ValueError(
                f"{type(model).__name__} has no {name}: only models as GPTModel and HybridModel can share their "
                f"vocabulary over pipeline stages"
            )
    asked = language_model_patch.settings_of(model, model_methods.loss_method(type(model))).beyond_megatron()
    if asked is not None:
        raise ValueError(
            f"the fused head was asked for {asked}: over a vocabulary shared by pipeline stages the loss is the "
            f"plain cross entropy; leave these options at their defaults"
        )


def output_layer_fault(model: Any) -> ValueError | None:
    """Return why a model cannot share its vocabulary, from what only the last stage has: its output layer, and MTP."""
    layer = fusion_decision.output_layer(model)
    if layer is None:
        return None
    wanted = model.config.mtp_num_layers or 0
    if wanted and not (getattr(model, "mtp_process", False) and model.config.mtp_num_layers == _depth(model)):
        return ValueError(
            f"mtp_num_layers is {wanted}, and the last pipeline stage has {_depth(model)} layers of multi-token "
            f"prediction: a vocabulary shared over pipeline stages wants all of them there; change "
            f"pipeline_model_parallel_layout, or train without sharing"
        )
    reason = fusion_decision.why_not_fused(model) or fusion_decision.what_is_not_known(model)
    if reason is None and is_bent(layer):
        reason = "its output layer has a bias, or caps its logits"
    asked = language_model_patch.settings_of(model, model_methods.loss_method(type(model))).logit_dtype
    rounded = asked or getattr(layer, "output_dtype", None)
    if reason is None and rounds(rounded):
        reason = f"its logits are rounded to {rounded} (logit_dtype)"
    kind = type(model).__name__
    fault = f"{kind} cannot share its vocabulary over pipeline stages: {reason}; train without sharing"
    return None if reason is None else ValueError(fault)


def _depth(model: Any) -> int:
    """Count the layers of multi-token prediction that run in this chunk."""
    layers = getattr(getattr(model, "mtp", None), "layers", ())
    repeated = getattr(model.config, "mtp_use_repeated_layer", False)
    return model.config.mtp_num_layers if layers and repeated else len(layers)


def check_vocabulary(size: int, config: Any) -> None:
    """Raise ValueError for a vocabulary that does not divide by the ranks which share it."""
    stages, ranks = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
    if size % (stages * ranks):
        raise ValueError(
            f"the padded vocabulary has {size} rows: each of {stages} pipeline stages x {ranks} tensor-parallel ranks "
            f"holds an equal share; pad it to {-(-size // (stages * ranks)) * stages * ranks} "
            f"(--make-vocab-size-divisible-by)"
        )
