"""The policy worker on Megatron-Core's GPTModel, with our layers and head, and Megatron's data parallelism."""

import math
from contextlib import ExitStack
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_ext.distributed.collectives import all_reduce
from megatron_ext.dtensor import clip_grad_by_total_norm_
from megatron_ext.emulation import megatron_on_cpu
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.megatron.linear_ce import gpt_forward_with_linear_ce_fusion
from megatron_ext.policy import megatron_llama as llama
from megatron_ext.policy.agreement import agree
from megatron_ext.policy.backend import Export, whole
from megatron_ext.policy.factories import model_factories
from megatron_ext.policy.worker import PolicyWorker
from megatron_ext.sequence.parts import SequenceParts


class MegatronPolicyWorker(PolicyWorker):
    """A `PolicyWorker` on a GPTModel that computes what Llama, Qwen2 or Qwen3 do in transformers.

    `model_name` is what `DTensorPolicyWorker` takes for these three, and generators get weights by the same names;
    checkpoints are of its own. Parallel sizes are read from `megatron_cfg`. Weights are float32; the model computes in
    `precision` under autocast. Without a GPU it holds `megatron_on_cpu()` open from the constructor to `shutdown()`.
    """

    parallel_key = "megatron_cfg"

    @cached_property
    def _open(self) -> ExitStack:
        """What `shutdown()` closes."""
        return ExitStack()

    def _build_model(self) -> nn.Module:
        settings = self.settings
        if settings.cpu_offload or settings.custom_parallel_plan is not None:
            raise ValueError(
                "megatron_cfg: cpu_offload and custom_parallel_plan are DTensorPolicyWorker's; leave them out"
            )
        config: Any = None
        state: dict[str, Tensor] = {}

        def load() -> None:
            nonlocal config, state
            make, _, config = model_factories(settings.model)
            if config is None:
                config = make().config
            llama.check(config, settings.tensor_parallel_size)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(settings.seed)
                state = make().float().state_dict()

        agree(load)  # the others would wait for what a rank that fails here has to give
        if self.device.type == "cpu":
            self._open.enter_context(megatron_on_cpu())
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=settings.tensor_parallel_size,
                context_parallel_size=settings.context_parallel_size,
                create_gloo_process_groups=False,
            )
            self._open.callback(parallel_state.destroy_model_parallel)
        _check_groups(settings.tensor_parallel_size, settings.context_parallel_size)
        with torch.random.fork_rng(devices=[]):
            tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)  # for dropout, which asks even at 0
            transformer = self._transformer_config(config)
            model = GPTModel(transformer, gpt_block_spec(transformer), **llama.gpt_arguments(config))
        self._sizes = llama.sizes(config)
        model.to(self.device)
        self._fill(model, state)
        if settings.temperature != 1:  # hidden states divided are logits divided
            model.decoder.final_layernorm.register_forward_hook(lambda *call: call[2] / settings.temperature)
        self._data_parallel: DistributedDataParallel | None = None
        return model

    def _transformer_config(self, config: Any) -> TransformerConfig:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return TransformerConfig(
            **llama.transformer_arguments(config),
            **(recompute if self.settings.activation_checkpointing else {}),
            tensor_model_parallel_size=self.settings.tensor_parallel_size,
            context_parallel_size=self.settings.context_parallel_size,
            sequence_parallel=self.settings.sequence_parallel and self.settings.tensor_parallel_size > 1,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
        )

    @torch.no_grad()
    def _fill(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Gives the model this rank's part of transformers' weights."""
        rank, ranks = self.mesh["tp"].get_local_rank(), self.mesh["tp"].size()
        for name, parameter in model.named_parameters():
            part, dim = _laid_out(name, parameter, parameter)
            weight = llama.from_transformers(name, state, self._sizes)
            part.copy_(weight if dim is None else weight.chunk(ranks, dim)[rank])

    def _next_token_log_probs(self, tokens_BS: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        group, config = parallel_state.get_context_parallel_group(), cast(TransformerConfig, self.model.config)
        ranks, length = self.settings.context_parallel_size, tokens_BS.shape[1]
        slices = self.settings.tensor_parallel_size if config.sequence_parallel else 1
        padding = -length % math.lcm(2 * ranks if ranks > 1 else 1, ranks * slices)
        tokens_BS = F.pad(tokens_BS, (0, padding))
        packing = None
        if cu_seqlens is not None:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding] if padding else [cu_seqlens]).int()
            packing = _packing(cu_seqlens)
        parts = SequenceParts(group, cu_seqlens)
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        dtype = self.settings.dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            found = gpt_forward_with_linear_ce_fusion(
                self.model,
                parts.split(tokens_BS, 1),
                parts.split(positions_BS, 1),
                None,
                labels=tokens_BS,
                packed_seq_params=packing,
                return_logprobs_for_linear_ce_fusion=True,
            )
        return F.pad(found, (0, 1))[:, :length]

    def _end_inference(self) -> None:
        """Megatron leaves nothing behind."""

    def _reduce_gradients(self) -> None:
        """Means over data- and context-parallel ranks, and sums of what sequence parallelism spread."""
        finalize_model_grads([self._data_parallel])
        for parameter in self.model.parameters():
            parameter.grad = cast(Any, parameter).main_grad

    def _clip_gradients(self, max_norm: float | None) -> float:
        squares = torch.zeros(2, device=self.device)  # of sharded weights, and of those that all ranks have
        parameters = list(self.model.parameters())
        for parameter in parameters:
            assert parameter.grad is not None
            squares[0 if _is_sharded(parameter) else 1] += parameter.grad.norm() ** 2
        squares[0] = all_reduce(squares[0], self.mesh["tp"].get_group())
        norm = float(squares.sum().sqrt())
        if max_norm is not None:
            clip_grad_by_total_norm_(parameters, max_norm, norm)
        return norm

    def _move_model(self, device: torch.device) -> None:
        """Megatron's data parallelism hangs its hooks on gradient accumulators, which a parameter that moves to another
        device loses: it is made anew then."""
        moved = next(self.model.parameters()).device.type != device.type
        super()._move_model(device)
        if moved and self._data_parallel is not None:
            self._data_parallel = None
            for parameter in self.model.parameters():
                del cast(Any, parameter).main_grad

    def _zero_grad(self) -> None:
        super()._zero_grad()
        if self._data_parallel is None and torch.is_grad_enabled():
            self._data_parallel = DistributedDataParallel(
                self.model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model
            )
        if self._data_parallel is not None:
            self._data_parallel.zero_grad_buffer()

    @property
    def _vocabulary(self) -> int:
        return cast(int, self.model.vocab_size)

    def _state(self) -> dict[str, Tensor]:
        return {name: self._as_global(name, parameter.detach()) for name, parameter in self.model.named_parameters()}

    def _as_global(self, name: str, x: Tensor) -> Tensor:
        part, dim = _laid_out(name, self.model.get_parameter(name), x)
        placement = Replicate() if dim is None else Shard(dim)
        return DTensor.from_local(part, self.mesh["tp"], [placement], run_check=False)

    def _exports(self) -> dict[str, Export]:
        state = self._state()
        shapes = {name: x.shape for name, x in state.items()}
        parts = llama.to_transformers(shapes, lambda name: whole(state[name]), self._sizes)
        return {name: Export(shape, make) for name, shape, make in parts}

    def shutdown(self) -> None:
        """Leaves nothing behind: Megatron's groups and the emulation end, if they began with this worker."""
        super().shutdown()
        self._open.close()


def _check_groups(tp: int, cp: int) -> None:
    """Raises ValueError unless Megatron's groups, of which a process has one set, are of these sizes."""
    found_tp = parallel_state.get_tensor_model_parallel_world_size()
    found_cp = parallel_state.get_context_parallel_world_size()
    if (found_tp, found_cp) != (tp, cp):
        raise ValueError(
            f"megatron_cfg asks for tensor parallel size {tp} and context parallel size {cp}, and Megatron's groups in "
            f"this process are of {found_tp} and {found_cp}: a process has one set of them; shut the other worker down "
            f"first, or give both the same sizes"
        )


def _is_sharded(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _laid_out(name: str, parameter: Tensor, x: Tensor) -> tuple[Tensor, int | None]:
    """`x`, shaped like this rank's part of a weight, as the part of a tensor that is cut along one dim; and that dim.

    Each rank has its parts of both halves of a gated projection: these are a dim of their own.
    """
    if not _is_sharded(parameter):
        return x, None
    if name.endswith("linear_fc1.weight"):
        return x.view(2, -1, *x.shape[1:]), 1
    return x, cast(Any, parameter).partition_dim


def _packing(cu_seqlens: Tensor) -> PackedSeqParams:
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
