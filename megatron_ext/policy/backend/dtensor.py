"""The backend on Hugging Face models: tensor parallel by DTensor, data parallel by FSDP2, context parallel."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_ext.distributed.groups import Group, VocabShard
from megatron_ext.dtensor import (
    _parallelize_model,
    causal_lm_from_logits,
    causal_lm_read,
    get_grad_norm,
    tie_word_embeddings,
)
from megatron_ext.dtensor.layers import ParallelSizes
from megatron_ext.dtensor.plans import choose_plan
from megatron_ext.dtensor.pretrained.loading import load_whole
from megatron_ext.dtensor.pretrained.saving import own_weights
from megatron_ext.policy.backend.base import Backend, ReadRequest, whole_vocabulary
from megatron_ext.policy.backend.model_factories import model_factories
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.data.batch import Rows
from megatron_ext.policy.device_memory import move_buffers


class DTensorBackend(Backend):
    """A model of transformers: DTensor plans shard its layers, FSDP2 its weights and gradients."""

    def build_model(self) -> None:
        try:
            from accelerate import init_empty_weights
        except ImportError as error:
            raise ImportError("DTensorPolicyWorker needs accelerate: pip install 'megatron-ext[hf]'") from error

        settings, mesh = self.settings, self.mesh
        whole: dict[str, Any] = {}
        empty: nn.Module = nn.Identity()

        def load() -> None:
            nonlocal whole, empty
            make, make_empty, _ = model_factories(settings.model, settings.gives_rewards, settings.config_overrides)
            with init_empty_weights():
                empty = make_empty().float()
            self._refuse_unsupported(empty)
            if self.rank == 0:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(settings.seed)
                    whole = make().float().state_dict()

        agree(load)  # raises on all ranks if one fails: the others would wait for it
        tie_word_embeddings(empty)  # on the meta device each module has a weight of its own
        dp_cp = mesh["dp", "cp"]._flatten("dp_cp")
        model = _parallelize_model(
            empty,
            dp_cp,
            mesh["tp"],
            param_dtype=settings.dtype,
            sequence_parallel=settings.sequence_parallel,
            activation_checkpointing=settings.activation_checkpointing,
            cpu_offload=settings.cpu_offload,
            custom_parallel_plan=settings.custom_parallel_plan,
            cp_mesh=mesh["cp"],
            expert_parallel=settings.expert_parallel,
        )
        self._dp_cp_group, self._tp_group = dp_cp.get_group(), mesh["tp"].get_group()
        load_whole(model, whole, "cpu" if settings.cpu_offload else None)
        move_buffers(model, self.device)
        self.model, self.vocabulary = model, cast(int, cast(Any, model).get_input_embeddings().num_embeddings)

    def _refuse_unsupported(self, model: nn.Module) -> None:
        settings = self.settings
        layout = ParallelSizes(
            settings.tensor_parallel_size,
            settings.context_parallel_size,
            settings.sequence_parallel,
            settings.expert_parallel,
        )
        _, unknown = choose_plan(model, layout, settings.custom_parallel_plan)
        if settings.batching.kind == "packed" and unknown is not None:
            raise ValueError(
                f"sequence_packing of {type(model).__name__} is not supported ({unknown}): tokens would attend "
                "to other documents; set sequence_packing.enabled to False"
            )

    def read_out(self, asked: ReadRequest) -> Tensor:
        return causal_lm_read(
            self.model,
            asked.rows.tokens,
            asked.readouts,
            columns=asked.columns,
            cu_seqlens=asked.rows.cu_seqlens,
            beside=asked.beside,
            labels=asked.labels,
            skip_ignored=asked.labels is not None and self.settings.skip_masked_tokens,
            **self.head_options,
        )

    def whole_logits(self, rows: Rows, columns: int) -> Tensor:
        def whole(logits: Tensor, _: Any, tp_group: Group, vocab: VocabShard) -> Tensor:
            return whole_vocabulary(logits.float() / self.settings.temperature, tp_group, vocab)

        return causal_lm_from_logits(self.model, rows.tokens, whole, columns=columns, cu_seqlens=rows.cu_seqlens)

    def end_inference(self) -> None:
        """Reshard: without a backward pass FSDP2 leaves unsharded casts in place of the root's own parameters."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def gradient_norm(self) -> float:
        return get_grad_norm(list(self.model.parameters()), self._dp_cp_group, self._tp_group)

    def state(self) -> dict[str, Tensor]:
        return own_weights(self.model)
