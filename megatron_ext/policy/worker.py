"""A policy on this rank's share of the model: trains it, scores with it, saves it, hands its weights on.

`PolicyWorker` is what the backends have in common; a backend builds the model and says how its tokens get their
log-probabilities. The interface is NeMo-RL's `DTensorPolicyWorker`.

Legend: B rows of this data-parallel rank, S positions. Global ranks go through the mesh (dp, cp, tp), tp fastest.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.between_jobs import JobsGroup
from megatron_ext.distributed.collectives import all_gather
from megatron_ext.policy import memory, refit
from megatron_ext.policy.agreement import agree
from megatron_ext.policy.batch import BatchedDataDict
from megatron_ext.policy.config import Settings, read_config
from megatron_ext.policy.loss_scale import LossScale
from megatron_ext.policy.losses import LossFunction
from megatron_ext.policy.optimization import make_optimizer, make_scheduler
from megatron_ext.policy.plan import Place, Shape, Step, scoring_step, training_steps
from megatron_ext.policy.rows import row_log_probs
from megatron_ext.policy.state import load_policy, save_policy


class Export(NamedTuple):
    """A weight for generators: its whole shape, and a function that makes it, which all ranks call."""

    shape: torch.Size
    make: Callable[[], Tensor]


class PolicyWorker(ABC):
    """A policy's model, optimizer and reference model, as far as they lie on this rank.

    Runs under torchrun, in an actor, or in a process alone: it joins the default process group, or makes it (NCCL on
    GPUs, gloo on the CPU). All ranks call every method, with the same arguments but for `data`.

    Args:
        config: the keys of `megatron_ext.policy.config.read_config`.
        tokenizer: saved with checkpoints where it is asked for; else not needed.
        weights_path, optimizer_path: a checkpoint to begin with.
        init_optimizer: False for a policy that is only scored with.
        init_reference_model: keep a copy of the first weights in host memory, as the reference policy.

    Raises:
        ValueError: the configuration, or a checkpoint, cannot be used.
    """

    parallel_key: str  # the part of the configuration with the parallel sizes

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
    ):
        self.cfg, self.tokenizer = config, tokenizer
        self.settings = read_config(config, self.parallel_key)
        self.device = memory.join_world()
        self.rank = dist.get_rank()
        self.mesh = _mesh(self.settings, self.device)
        self.dp_rank, self.dp_size = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        self.model = self._build_model()
        self.reference = memory.copies_on_cpu(self._state().items()) if init_reference_model else None
        self.optimizer = make_optimizer(self.model.parameters(), self.settings.optimizer) if init_optimizer else None
        self.scheduler = None if self.optimizer is None else make_scheduler(self.optimizer, self.settings.scheduler)
        self._loss_scale = LossScale(dynamic=self.settings.dtype == torch.float16)
        self._held: refit.HeldWeights | None = None
        self._to_generators: JobsGroup | None = None
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self.rank}]"

    @abstractmethod
    def _build_model(self) -> nn.Module:
        """The sharded model, with weights."""

    @abstractmethod
    def _next_token_log_probs(self, tokens_BS: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """fp32 `[B, S]`: of each position's next token; differentiable. See `dtensor.causal_lm_log_probs`."""

    @abstractmethod
    def _end_inference(self) -> None:
        """Called after passes without backward, which may leave whole weights behind."""

    @abstractmethod
    def _reduce_gradients(self) -> None:
        """What is left of summing gradients over the ranks, after the last backward pass."""

    @abstractmethod
    def _clip_gradients(self, max_norm: float | None) -> float:
        """The norm of all gradients, which are scaled down to `max_norm`."""

    @abstractmethod
    def _state(self) -> dict[str, Tensor]:
        """The weights by name, each once: DTensors, or the same on all ranks. They share the model's memory."""

    def _exports(self) -> dict[str, "Export"]:
        """The weights that generators get, by transformers' names."""
        return {name: Export(x.shape, partial(whole, x)) for name, x in self._state().items()}

    def _as_global(self, name: str, x: Tensor) -> Tensor:
        """A tensor shaped like this rank's part of the weight `name`, as the DTensor that it is a part of."""
        return x

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for every global batch in `data`; with `eval_mode` none, only losses.

        Losses and gradients are those of the global batch in one piece, whatever the micro-batches and the layout.

        Args:
            data: this data-parallel rank's rows, right-padded: `input_ids` `[B, S]`, `sample_mask` `[B]` (which rows
                count), `input_lengths` `[B]` (needed for dynamic or packed micro-batches), and what the loss reads.
            loss_fn: see `megatron_ext.policy.losses`; it gets log-probabilities `[rows, S]`, 0 in the first column.
            gbs: rows of a global batch over all data-parallel ranks; None: `train_global_batch_size`.
            mbs: rows of a micro-batch on this rank; None: `train_micro_batch_size`.

        Returns:
            "global_loss" `[steps]` on the CPU; "grad_norm" `[steps]`, before clipping (None with `eval_mode`); "rank";
            "all_mb_metrics": for each name the numbers of this rank's micro-batches, made to be summed over these and
            over data-parallel ranks.

        Communicates: beside the model, three collectives of a few bytes and one for each step.

        Raises:
            ValueError: data that cannot be trained on, or a loss or gradient that is not finite, on every rank. The
                weights are those after the last good step.
            RuntimeError: `loss_fn` raised; on other ranks than its own, where that error appears itself.
        """
        if not eval_mode and self.optimizer is None:
            raise ValueError("train() without an optimizer: the worker was made with init_optimizer=False")
        batching = self.settings.batching
        rows = batching.train_rows if mbs is None else mbs
        shape = Shape(batching.kind, rows, batching.train_tokens, self._places_multiple)
        steps = training_steps(data, loss_fn, gbs or self.settings.global_batch_size, shape, self._place)
        batch = BatchedDataDict(data).to(self.device)
        losses, norms = [], []
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.model.train(not eval_mode)
        for number, step in enumerate(steps):
            with torch.set_grad_enabled(not eval_mode):
                losses.append(self._run_step(number, step, batch, loss_fn, metrics, len(steps)))
            if not eval_mode:
                norms.append(self._update(number))
        if eval_mode:
            self._end_inference()
        else:
            assert self.scheduler is not None
            self.scheduler.step()
        return {
            "global_loss": torch.tensor(losses),
            "grad_norm": None if eval_mode else torch.tensor(norms),
            "rank": self.rank,
            "all_mb_metrics": dict(metrics),
        }

    @torch.no_grad()
    def get_logprobs(self, data: Mapping[str, Any], micro_batch_size: int | None = None) -> BatchedDataDict:
        """Log-probabilities of the tokens of right-padded rows.

        Args:
            data: this data-parallel rank's `input_ids` `[B, S]` and `input_lengths` `[B]`. Ranks may have different B.
            micro_batch_size: rows of a micro-batch; None: `logprob_batch_size`.

        Returns:
            "logprobs", fp32 `[B, S]` on the CPU: at position t that of token t; 0 for the first, and for padding.

        Communicates: beside the model, two collectives of a few bytes.

        Raises:
            ValueError: data that cannot be scored, on every rank.
        """
        batching = self.settings.batching
        rows = batching.logprob_rows if micro_batch_size is None else micro_batch_size
        step = scoring_step(
            data, Shape(batching.kind, rows, batching.logprob_tokens, self._places_multiple), self._place
        )
        batch = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")}).to(self.device)
        self.model.eval()
        log_probs_BS = torch.zeros(batch["input_ids"].shape)
        for rows_, counts in step.rows():
            found = self._row_log_probs(self._micro_batch(batch, rows_))
            if counts:
                log_probs_BS[rows_, : found.shape[1]] = found.cpu()
        self._end_inference()
        return BatchedDataDict(logprobs=log_probs_BS)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """As `get_logprobs`, of the reference policy; the key is "reference_logprobs"."""
        with self.use_reference_model():
            return BatchedDataDict(reference_logprobs=self.get_logprobs(data, micro_batch_size)["logprobs"])

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """While it lasts, the model has the reference policy's weights, and host memory those of the model."""
        if self.reference is None:
            raise ValueError("there is no reference policy: the worker was made with init_reference_model=False")
        memory.exchange(self._state().items(), self.reference)
        try:
            yield
        finally:
            memory.exchange(self._state().items(), self.reference)

    def prepare_refit_info(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Names, whole shapes and dtype of the weights that generators get, in order."""
        return {name: (x.shape, self.settings.dtype) for name, x in self._exports().items()}

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """The size of each weight in bytes, and how many of them should be asked for at a time."""
        self._move_model(self.device)
        sizes = [(name, shape.numel() * dtype.itemsize) for name, (shape, dtype) in self.prepare_refit_info().items()]
        return sizes, float(self.settings.refit_buffer_bytes)

    @torch.no_grad()
    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, refit.WeightsHandle]:
        """Lays these weights open, whole, for processes on the same device: by its id what `load_weights` takes.

        The last ones are gone then. On the CPU one rank of each host shares them, and the others return {}.

        Communicates: the all-gathers that make each weight whole; on the CPU the names of the hosts.

        Raises:
            ValueError: a name that the model lacks.
        """
        self._free_held()
        info = self.prepare_refit_info()
        keys = list(keys)
        if unknown := [key for key in keys if key not in info]:
            raise ValueError(f"the model has no weights {unknown}: pass names of prepare_refit_info()")
        chosen = refit.buckets(
            {key: info[key] for key in keys}, sum(s.numel() * d.itemsize + 64 for s, d in info.values())
        )
        hosts = agree(lambda: memory.device_id(self.device))
        own = hosts.index(memory.device_id(self.device)) == self.rank

        def lay_open() -> None:
            if own and chosen:
                self._held = refit.HeldWeights(chosen[0], self.device)

        agree(lay_open)  # memory may be short on one rank
        exports = self._exports()
        for row in chosen[0].rows if chosen else ():
            weight = exports[row.name].make()
            if self._held is not None:
                self._held.write(row, weight)
        if self._held is None:
            return {}
        self._held.finish()
        return {memory.device_id(self.device): self._held.handle}

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Rank 0 joins the generators, who call `join_collective`, in a group of `world_size`, as its rank 0.

        Raises:
            RuntimeError: they did not all come in time; on every rank.
        """

        def join() -> None:
            if self.rank == 0:
                self._to_generators = JobsGroup(ip, port, 0, world_size, self.device)

        agree(join)

    @torch.no_grad()
    def broadcast_weights_for_collective(self) -> None:
        """Sends all weights to the generators, who call `receive_weights`.

        Communicates: the all-gathers that make each weight whole; one broadcast for each bucket of weights, of
        `refit_buffer_bytes` at most; two collectives of a few bytes.

        Raises:
            ValueError: before `init_collective`; on every rank.
        """

        def joined() -> None:
            if self.rank == 0 and self._to_generators is None:
                raise ValueError("broadcast_weights_for_collective() came before init_collective(); call that first")

        agree(joined)
        weights = ((name, x.make()) for name, x in self._exports().items())
        try:
            if self._to_generators is not None:
                budget = self.settings.refit_buffer_bytes
                refit.send_weights(weights, self.prepare_refit_info(), self._to_generators, budget)
        finally:
            for _ in weights:  # the other ranks need this one's part, also where the generators are gone
                pass

    def prepare_for_lp_inference(self) -> None:
        """Model on the device, optimizer in host memory."""
        self._move_model(self.device)
        self.model.eval()
        self.offload_before_refit()

    def prepare_for_training(self) -> None:
        """Model and optimizer on the device."""
        self._move_model(self.device)
        self.model.train()
        if not self.settings.cpu_offload:
            memory.move_optimizer(self.optimizer, self.device)
        memory.free_cached_memory(self.device)

    def offload_before_refit(self) -> None:
        """Optimizer to host memory."""
        memory.move_optimizer(self.optimizer, torch.device("cpu"))
        memory.free_cached_memory(self.device)

    def offload_after_refit(self) -> None:
        """Model and optimizer to host memory; weights that were laid open are gone."""
        self._free_held()
        self._move_model(torch.device("cpu"))
        self.model.eval()
        self.offload_before_refit()

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Writes the weights, and where asked optimizer with schedule, and tokenizer, to folders of these names.

        A folder is complete or has what it had before; see `megatron_ext.policy.checkpoint`.

        Raises:
            ValueError, OSError: on every rank.
        """
        if tokenizer_path is not None and self.tokenizer is None:
            raise ValueError("tokenizer_path without a tokenizer: give the worker one, or leave the path out")
        save_policy(self, weights_path, optimizer_path)

        def save_tokenizer() -> None:
            if self.rank == 0:
                self.tokenizer.save_pretrained(tokenizer_path)

        if tokenizer_path is not None:
            agree(save_tokenizer)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Reads what `save_checkpoint` wrote, in this or another layout. Executes nothing of it.

        Raises:
            ValueError: on every rank, if it is incomplete, damaged, or of another model. Nothing has changed.
        """
        load_policy(self, weights_path, optimizer_path)

    def is_alive(self) -> bool:
        return True

    def get_gpu_info(self) -> dict[str, Any]:
        """This rank's device by name, and its memory in MiB."""
        return {"rank": self.rank, "world_size": dist.get_world_size(), **memory.device_info(self.device)}

    def report_device_id(self) -> str:
        """ "GPU-..." as NVML has it, or "CPU-" and the name of the host."""
        return memory.device_id(self.device)

    def reset_peak_memory_stats(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def start_gpu_profiling(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.profiler.stop()

    def shutdown(self) -> None:
        """Leaves nothing behind that outlives this process."""
        self._free_held()
        self._to_generators = None

    @property
    def _place(self) -> Place:
        return Place(self.dp_rank, self.dp_size, dist.get_world_size() // self.dp_size)

    @property
    def _places_multiple(self) -> int:
        """Under context parallelism each sequence is cut into two pieces a rank."""
        ranks = self.settings.context_parallel_size
        return 2 * ranks if ranks > 1 else 1

    def _micro_batch(self, batch: BatchedDataDict, rows: list[int]) -> BatchedDataDict:
        micro_batch = batch.select_indices(rows)
        dynamic = self.settings.batching.kind == "dynamic"
        return micro_batch.cut(max(2, int(micro_batch["input_lengths"].max()))) if dynamic else micro_batch

    def _row_log_probs(self, micro_batch: BatchedDataDict) -> Tensor:
        packed = self.settings.batching.kind == "packed"
        return row_log_probs(self._next_token_log_probs, micro_batch, packed, self._places_multiple)

    def _run_step(
        self,
        number: int,
        step: Step,
        batch: BatchedDataDict,
        loss_fn: LossFunction,
        metrics: defaultdict[str, list[float]],
        steps: int,
    ) -> float:
        """Forward and backward over a global batch: its loss, once all ranks know that it is one."""
        counts = [torch.tensor(n, device=self.device) for n in (step.valid_seqs, step.valid_toks)]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        fault: Exception | None = None
        self._zero_grad()
        for rows, real in step.rows():
            micro_batch = self._micro_batch(batch, rows)
            log_probs = self._row_log_probs(micro_batch)
            loss, found = log_probs.sum() * 0.0, None
            if real and fault is None:
                try:
                    loss, found = _validated(*loss_fn(log_probs, micro_batch, *counts))
                except Exception as error:  # the other ranks wait for this one's share of the model
                    fault = error
            total += loss.detach()
            if torch.is_grad_enabled():
                self._backward(loss * self._loss_scale.value)
            if found is not None:
                self._note(metrics, found, step, steps)
        return self._agreed_loss(number, total, fault)

    def _backward(self, loss: Tensor) -> None:
        """FSDP2 averages gradients over the data-parallel ranks, whose losses add up."""
        (loss * self.dp_size).backward()

    def _note(self, metrics: defaultdict[str, list[float]], numbers: dict[str, float], step: Step, steps: int) -> None:
        """Adds a micro-batch's metrics, unless no row of it counts."""
        valid = numbers.pop("num_valid_samples", 1.0)
        if valid <= 0:
            return
        numbers = {name: value / steps for name, value in numbers.items()}
        numbers |= {
            "num_valid_samples": valid,
            "global_valid_seqs": step.valid_seqs,
            "global_valid_toks": step.valid_toks,
        }
        if self.optimizer is not None:
            numbers["lr"] = self.optimizer.param_groups[0]["lr"]
        for name, value in numbers.items():
            metrics[name].append(value)

    def _agreed_loss(self, number: int, own: Tensor, fault: Exception | None) -> float:
        """The sum of all data-parallel ranks' losses, unless one of them is none."""
        mine = torch.stack([own, own.new_tensor(float(fault is not None))])
        found = all_gather(mine[None], dist.group.WORLD)
        if not bool(torch.isfinite(found[:, 0]).all()) or bool(found[:, 1].any()):
            self._zero_grad()
            if fault is not None:
                raise fault
            if failed := found[:, 1].nonzero().flatten().tolist():
                raise RuntimeError(
                    f"loss_fn failed on ranks {failed} in global batch {number}; see what it raised there"
                )
            wrong = {rank: value for rank, value in enumerate(found[:, 0].tolist()) if not abs(value) < float("inf")}
            raise ValueError(
                f"the loss of global batch {number} is not finite, by rank {wrong}: the weights are those before it; "
                f"look into its data, or lower the learning rate"
            )
        return float(found[:: self._place.copies, 0].sum())

    def _update(self, number: int) -> float:
        """Clips the gradients and steps the optimizer. The norm before clipping."""
        assert self.optimizer is not None
        self._reduce_gradients()
        self._loss_scale.unscale(self.model.parameters())
        norm = self._clip_gradients(self.settings.max_grad_norm)
        if self._loss_scale.overflowed(norm):
            self._zero_grad()
            return norm
        if not abs(norm) < float("inf"):
            self._zero_grad()
            raise ValueError(
                f"the gradient norm of global batch {number} is {norm}: it must be finite; the weights are those "
                f"before it; look into its data, or lower the learning rate"
            )
        self.optimizer.step()
        self._zero_grad()
        return norm

    def _zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _move_model(self, device: torch.device) -> None:
        memory.move_buffers(self.model, device)
        if not self.settings.cpu_offload:
            self.model.to(device)

    def _free_held(self) -> None:
        if self._held is not None:
            self._held.free()
            self._held = None


def _validated(loss: Tensor, metrics: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """What a loss function returned, if it can be trained on and its metrics are numbers."""
    if not isinstance(loss, Tensor) or loss.dim() or (torch.is_grad_enabled() and not loss.requires_grad):
        raise ValueError("loss_fn's loss must be a 0-d tensor with a gradient to the log-probabilities; reduce it")
    return loss, {name: float(value) for name, value in metrics.items()}


def _mesh(settings: Settings, device: torch.device) -> DeviceMesh:
    world, tp, cp = dist.get_world_size(), settings.tensor_parallel_size, settings.context_parallel_size
    if world % (tp * cp):
        raise ValueError(
            f"{world} ranks with tensor_parallel_size {tp} and context_parallel_size {cp}: the ranks must be a "
            f"multiple of {tp * cp}"
        )
    return init_device_mesh(device.type, (world // (tp * cp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))


def whole(x: Tensor) -> Tensor:
    """All of a DTensor, on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x
