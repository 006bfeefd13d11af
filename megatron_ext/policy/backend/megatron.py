"""The backend on Megatron-Core's GPTModel, with our layers and head, and Megatron's data parallelism."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
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

from megatron_ext.distributed.collectives import all_gather_object, all_reduce
from megatron_ext.distributed.groups import VocabShard
from megatron_ext.head.checks import or_refuse, token_bound
from megatron_ext.head.cross_entropy import side_by_side
from megatron_ext.megatron.language_model_patch import forward_with_fused_head
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.megatron.output_processors import ReadOuts
from megatron_ext.policy.backend.base import Backend, Export, Read, ReadRequest, T, Use, whole, whole_vocabulary
from megatron_ext.policy.backend.model_factories import model_factories
from megatron_ext.policy.config import Settings
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.data.batch import BatchedDataDict, Rows
from megatron_ext.policy.data.batch_plan import Step
from megatron_ext.policy.megatron_model import llama
from megatron_ext.policy.megatron_model.chunks import (
    Chunks,
    build_pieces,
    catalogue,
    from_owner,
    is_expert,
    is_sharded,
    laid_out,
    run_pipeline,
)
from megatron_ext.policy.megatron_model.layout import check_layout, join_groups, transformer_config
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.next_token import next_tokens
from megatron_ext.sequence.targets import IGNORE_INDEX
from megatron_on_cpu import megatron_on_cpu


class Inputs(NamedTuple):
    """Whole sequences `[B, S]`, their cut over context-parallel ranks, the padding before it (positions, rows), and the
    keyword arguments that the model takes beside tokens and positions."""

    tokens_BS: Tensor
    parts: SequenceParts
    padded: tuple[int, int]
    options: dict[str, Any]

    def split(self, x: Tensor, fill: int = 0) -> Tensor:
        """Pad `x` `[B, S, ...]` with `fill`, and return this rank's part of it."""
        positions, rows = self.padded
        return self.parts.split(F.pad(x, (0, 0) * (x.dim() - 2) + (0, positions, 0, rows), value=fill), 1)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, None]:
        """Tokens, positions and no attention mask."""
        tokens_BP = self.split(self.tokens_BS)
        length = self.tokens_BS.shape[1] + self.padded[0]
        positions_S = torch.arange(length, device=tokens_BP.device)
        return tokens_BP, self.parts.split(positions_S.expand(tokens_BP.shape[0], length), 1), None


class MegatronBackend(Backend):
    """A GPTModel with our layers and head, cut into pipeline stages, with Megatron's data parallelism."""

    model: Chunks

    def __init__(self, settings: Settings, init_reference_model: bool = True):
        self._open = ExitStack()  # contexts that `close()` closes
        self._data_parallel: list[DistributedDataParallel] = []
        self._passed_on: Tensor | None = None
        self._least_shape: tuple[int, ...] = (0, 0)  # rows and places that every micro-batch is padded to
        self.plain_shards = settings.tensor_parallel_size > 1
        super().__init__(settings, init_reference_model)

    def build_model(self) -> None:
        settings = self.settings
        config: Any = None
        state: dict[str, Tensor] = {}

        def load() -> None:
            nonlocal config, state
            make, _, config = model_factories(settings.model, overrides=settings.config_overrides)
            if config is None:
                config = make().config
            check_layout(settings, config)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(settings.seed)
                state = make().float().state_dict()
            self._together = llama.experts_together(state)

        agree(load)  # raises on all ranks if one fails: the others would wait for it
        if self.device.type == "cpu":
            self._open.enter_context(megatron_on_cpu())
        join_groups(settings, self._open)
        with torch.random.fork_rng(devices=[]):
            tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)  # dropout reads its state even at rate 0
            transformer = transformer_config(settings, config)

            def make(vp_stage: int | None, **which: bool) -> GPTModel:
                layers = gpt_block_spec(transformer, vp_stage)
                return GPTModel(transformer, layers, **llama.gpt_arguments(config), vp_stage=vp_stage, **which)

            pieces = build_pieces(make, settings.pipeline.virtual)
        self._sizes = llama.sizes(config)
        own = self._sizes.experts // settings.expert_parallel_size
        model = Chunks(pieces, own * parallel_state.get_expert_model_parallel_rank())
        model.to(self.device)
        self._fill(model, state)
        self._piece, self._catalogue = pieces[-1], catalogue(model)
        self.model, self.vocabulary = model, cast(int, model.vocab_size)

    @torch.no_grad()
    def _fill(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Copy this rank's part of transformers' weights, `state`, into the model."""
        rank, ranks = self.mesh["tp"].get_local_rank(), self.mesh["tp"].size()
        for name, parameter in model.named_parameters():
            part, dim = laid_out(name, parameter, parameter)
            weight = llama.from_transformers(name, state, self._sizes)
            part.copy_(weight if dim is None else weight.chunk(ranks, dim)[rank])

    def run_passes(self, step: Step, batch: BatchedDataDict, read: Read, use: Use) -> None:
        pipeline = self.settings.pipeline
        if pipeline.stages == 1:
            return super().run_passes(step, batch, read, use)
        passes = step.rows()
        if pipeline.virtual > 1:  # the schedule then takes a multiple of the number of stages
            passes += [(passes[0][0], False)] * (-len(passes) % pipeline.stages)
            shapes = [self.rows(self.micro_batch(batch, rows)).tokens.shape for rows, _ in passes]
            self._least_shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))

        def run(piece: GPTModel, number: int) -> Tensor:
            self._piece, self._passed_on = piece, None
            found = read(self.micro_batch(batch, passes[number][0]))
            return found if self._passed_on is None else self._passed_on

        def use_of(found: Tensor, number: int) -> Tensor | None:
            rows, counts = passes[number]
            return use(found, self.micro_batch(batch, rows), rows, counts)

        try:
            rows_, length = self._least_shape
            shape = (rows_, length + -length % self._length_multiple)
            run_pipeline(self.model.pieces, len(passes), shape, run, use_of)
        finally:
            self._piece, self._passed_on, self._least_shape = self.model.pieces[-1], None, (0, 0)

    def from_last_stage(self, found: T) -> T:
        if self.settings.pipeline.stages == 1:
            return super().from_last_stage(found)
        last = parallel_state.is_pipeline_last_stage()
        group = parallel_state.get_pipeline_model_parallel_group()
        return cast(T, all_gather_object(found if last else None, group)[-1])

    def read_out(self, asked: ReadRequest) -> Tensor:
        rows, beside, labels = asked.rows, asked.beside, asked.labels
        labels_BS = next_tokens(rows.tokens if labels is None else labels, rows.cu_seqlens)
        at_most = token_bound(self.settings.skip_masked_tokens)

        def read(inputs: Inputs) -> tuple[Tensor, ValueError | None]:
            parts = [inputs.split(labels_BS, IGNORE_INDEX), *([] if beside is None else [inputs.split(beside)])]
            given = [x.transpose(0, 1) for x in parts]  # [S, B, ...], as the model's hidden states
            only: Any = {} if labels is None else {"counts": given[0] != IGNORE_INDEX, "at_most": at_most}
            processor = ReadOuts(readouts=asked.readouts(*given), **only, **self.head_options)
            forward = partial(forward_with_fused_head, self._piece, output_processor=processor)
            if not self._piece.post_process:
                return forward(*inputs.arguments, **inputs.options), None
            shape = (*given[0].t().shape, asked.columns)
            like = next(self._piece.parameters())
            return or_refuse(lambda: side_by_side(forward(*inputs.arguments, **inputs.options), 2), shape, like)

        return self._on_whole_sequences(rows, read, asked.columns)

    def whole_logits(self, rows: Rows, columns: int) -> Tensor:
        def read(inputs: Inputs) -> tuple[Tensor, ValueError | None]:
            made = self._piece(*inputs.arguments, **inputs.options)
            if self._piece.post_process:
                group = parallel_state.get_tensor_model_parallel_group()
                logits = made.float() / self.settings.temperature
                made = whole_vocabulary(logits, group, VocabShard.split(self.vocabulary, group))
            return made, None

        return self._on_whole_sequences(rows, read, columns)

    def _on_whole_sequences(
        self, rows: Rows, read: Callable[[Inputs], tuple[Tensor, ValueError | None]], columns: int
    ) -> Tensor:
        """Gather `[B, S, columns]` from `read` of each context-parallel rank's part; raise one rank's fault on all."""
        inputs = self._inputs(rows)
        dtype = self.settings.dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            made, fault = read(inputs)
        count, length = rows.tokens.shape
        if not self._piece.post_process:  # hidden states, for the next stage; the zeros are not read
            self._passed_on = made.float()
            return made.new_zeros(count, length, columns, dtype=torch.float32)
        return inputs.parts.gather_or_refuse(made, 1, fault)[:count, :length]

    def _inputs(self, rows: Rows) -> Inputs:
        (count, length), cu_seqlens = rows.tokens.shape, rows.cu_seqlens
        more = max(self._least_shape[1] - length, 0)
        more += -(length + more) % self._length_multiple
        padded = (more, max(self._least_shape[0] - count, 0))
        options = {}
        if cu_seqlens is not None:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + more] if more else [cu_seqlens]).int()
            longest = int(cu_seqlens.diff().max())
            options["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
        parts = SequenceParts(parallel_state.get_context_parallel_group(), cu_seqlens)
        return Inputs(rows.tokens, parts, padded, options)

    @property
    def _length_multiple(self) -> int:
        """Return the number that must divide a micro-batch's length, so that ranks can share it out."""
        ranks, config = self.settings.context_parallel_size, cast(TransformerConfig, self.model.config)
        slices = self.settings.tensor_parallel_size if config.sequence_parallel else 1
        return math.lcm(2 * ranks if ranks > 1 else 1, ranks * slices)

    def reduce_gradients(self) -> None:
        """Average gradients over data- and context-parallel ranks; sum those that sequence parallelism left partial."""
        finalize_model_grads(self._data_parallel)
        for parameter in self.model.parameters():
            parameter.grad = cast(Any, parameter).main_grad

    def gradient_norm(self) -> float:
        square = torch.zeros((), device=self.device)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            if not self.model.is_second_copy(parameter):
                square += parameter.grad.norm() ** 2 / self._copies_of(parameter)
        return float(all_reduce(square, dist.group.WORLD).sqrt())

    def move_model(self, device: torch.device) -> None:
        """Move the model, and drop Megatron's data parallelism if the device changes: its hooks hang on gradient
        accumulators, which a parameter loses when it moves. `zero_grad` makes it anew."""
        moved = next(self.model.parameters()).device.type != device.type
        super().move_model(device)
        if moved and self._data_parallel:
            self._data_parallel = []
            for parameter in self.model.parameters():
                del cast(Any, parameter).main_grad

    def zero_grad(self) -> None:
        super().zero_grad()
        if not self._data_parallel and torch.is_grad_enabled():
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
            self._data_parallel = [
                DistributedDataParallel(self.model.config, options, piece) for piece in self.model.pieces
            ]
        for piece in self._data_parallel:
            piece.zero_grad_buffer()

    def state(self) -> dict[str, Tensor]:
        return {name: self.as_global(name, parameter.detach()) for name, parameter in self.model.named_parameters()}

    def as_global(self, name: str, x: Tensor) -> Tensor:
        part, dim = laid_out(name, self.model.get_parameter(name), x)
        if is_expert(name):  # whole on the ranks that have it
            return part
        placement = Replicate() if dim is None else Shard(dim)
        return DTensor.from_local(part, self.mesh["tp"], [placement], run_check=False)

    def exports(self) -> dict[str, Export]:
        state = self.state()
        shapes = {name: place.shape for name, place in self._catalogue.items()}

        def whole_of(name: str) -> Tensor:
            mine = whole(state[name]) if name in state else None
            return from_owner(mine, self._catalogue[name], self.device)

        parts = llama.to_transformers(shapes, whole_of, self._sizes, self._together)
        return {name: Export(shape, make) for name, shape, make in parts}

    def _copies_of(self, parameter: Tensor) -> int:
        """Count the ranks that hold the same part of a weight."""
        ranks = dist.get_world_size() // self.settings.pipeline.stages
        if not getattr(parameter, "allreduce", True):
            return ranks // self.settings.expert_parallel_size
        return ranks // self.settings.tensor_parallel_size if is_sharded(parameter) else ranks

    def close(self) -> None:
        """End Megatron's groups and the emulation, if they began with this backend."""
        self._open.close()
