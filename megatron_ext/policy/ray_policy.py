"""A policy on many machines: one Ray actor a rank, each with a policy worker, driven as if they were one.

`ray/actors.py` starts, calls and ends the actors; this module has the methods, and shares rows out to ranks.

Legend: B rows, S positions. Global ranks go through the mesh (pp, dp, cp, tp), tp fastest.
"""

import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from megatron_ext.policy.config import read_config
from megatron_ext.policy.data.batch import BatchedDataDict
from megatron_ext.policy.data.batch_plan import RankCoordinates
from megatron_ext.policy.losses import LossFunction
from megatron_ext.policy.losses.worker_protocol import Timer, rows_together, timed
from megatron_ext.policy.ray.actors import Timeouts, import_ray
from megatron_ext.policy.refit.ray_transfer import RayRefit
from megatron_ext.policy.worker.policy_worker import PolicyWorker
from megatron_ext.policy.worker.sampling import pad_token_of

P = ParamSpec("P")


def _on_all(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate["RayPolicy", P], None]:
    """Make the policy's method that calls `method` of every worker, with the same signature; a timer runs here."""
    signature = inspect.signature(method)

    @wraps(method)
    def call(self: "RayPolicy", *args: P.args, **kwargs: P.kwargs) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        with timed(given.arguments.pop("timer", None), method.__name__):
            self._all(method.__name__, *given.args[1:])

    return call


class RayPolicy(RayRefit):
    """A group of policy workers as Ray actors: the methods of a worker, for the whole batch at once.

    Actors are placed together where possible; each gets its share of the rows, and results come back in order. Ray must
    be running (`ray.init`; on one machine see `local_ray`).

    Args:
        config: the configuration of the workers.
        worker_cls: `DTensorPolicyWorker` (None), `MegatronPolicyWorker`, or a function that makes such a worker and has
            the attribute `parallel_key` of its class.
        num_workers: the number of ranks, a multiple of tensor- times context-parallel size times pipeline stages.
        weights_path, optimizer_path: a checkpoint to begin with.
        init_optimizer, init_reference_model, tokenizer: as for the worker.
        cpus_per_worker, gpus_per_worker: CPUs and GPUs that Ray reserves for an actor, which sees no other GPUs.
        env_vars: environment variables of the actors.
        start_timeout_s: seconds that actors may take to start and to build their model.
        call_timeout_s: seconds that a call may take; None: no limit.
        heartbeat_timeout_s: seconds that an actor may be stopped (SIGSTOP), its host not answer, or all actors stand
            still with one waiting for the others in a collective; None: this is not checked. A step in which any rank
            computes, reads or writes goes on; mark a wait for another service by `megatron_ext.policy.outside_wait`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the configuration, the number of workers, the function or the checkpoint cannot be used.
        RuntimeError: the cluster has no room for the actors within `start_timeout_s`. From every call: an actor died,
            stopped, or hung, its host is lost, or the call took longer than `call_timeout_s`. The message names ranks,
            hosts and the ranks' last activity; all actors are ended, and `restart` makes new ones.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        num_workers: int,
        worker_cls: Callable[..., Any] | None = None,
        *,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        tokenizer: Any = None,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 0,
        env_vars: Mapping[str, str] | None = None,
        start_timeout_s: float = 300,
        call_timeout_s: float | None = None,
        heartbeat_timeout_s: float | None = 6,
    ):
        if worker_cls is None:
            from megatron_ext.policy.dtensor_worker import DTensorPolicyWorker

            worker_cls = DTensorPolicyWorker
        make = {
            "config": config,
            "tokenizer": tokenizer,
            "init_optimizer": init_optimizer,
            "init_reference_model": init_reference_model,
        }
        bundle = {"CPU": cpus_per_worker} | ({"GPU": gpus_per_worker} if gpus_per_worker else {})
        timeouts = Timeouts(start_timeout_s, call_timeout_s, heartbeat_timeout_s)
        super().__init__(worker_cls, make, num_workers, bundle, env_vars, timeouts)
        self._coordinates = _coordinates(config, worker_cls, num_workers)
        self.dp_size, self._unit = self._coordinates.dp_size, 1
        self._start(weights_path, optimizer_path)

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Run the workers' `train` on the rows of all data-parallel ranks; "all_mb_metrics" holds all ranks' metrics.

        Raises:
            ValueError: the rows are no multiple of the global batch size, or that is none of the data-parallel size;
                or a worker raised it.
            RuntimeError: a worker died.
        """
        gbs = self._make["config"]["train_global_batch_size"] if gbs is None else gbs
        with timed(timer, "train"):
            shards = BatchedDataDict(data).shard_by_batch_size(self.dp_size, batch_size=gbs)
            return _with_all_metrics(self._each("train", shards, loss_fn, eval_mode, gbs, mbs))

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Open a step: `train_microbatch` takes its rows, `finish_train_step` updates the weights; see the worker's."""
        self._all("begin_train_step", loss_fn, gbs, mbs)
        self._unit = rows_together(loss_fn)

    def train_microbatch(self, data: Mapping[str, Any], timer: Timer | None = None) -> None:
        """Train on some rows of the open step, cut as evenly as possible over the data-parallel ranks.

        Raises:
            ValueError: fewer rows than data-parallel ranks, or pairs that would be parted; or a worker raised it.
        """
        batch = BatchedDataDict(data)
        units, rest = divmod(batch.size, self._unit)
        if units < self.dp_size or rest:
            raise ValueError(
                f"data has {batch.size} rows for {self.dp_size} data-parallel ranks, in units of {self._unit}: each "
                f"rank must get one, and none is parted; collect more rows first"
            )
        cuts = [units * i // self.dp_size * self._unit for i in range(self.dp_size + 1)]
        with timed(timer, "train_microbatch"):
            parts = [batch.select_indices(range(*ends)) for ends in itertools.pairwise(cuts)]
            self._each("train_microbatch", parts)

    def finish_train_step(self, timer: Timer | None = None) -> dict[str, Any]:
        """Finish the open step, see the worker's; "all_mb_metrics" holds the metrics of all ranks."""
        with timed(timer, "finish_train_step"):
            found = self._all("finish_train_step")
            return _with_all_metrics([found[rank] for rank in self._coordinates.first_ranks()])

    def get_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """ "logprobs" `[B, S]` of all rows; see the worker's."""
        return self._score("get_logprobs", timer, data, micro_batch_size)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """ "reference_logprobs" `[B, S]` of all rows; see the worker's."""
        return self._score("get_reference_policy_logprobs", timer, data, micro_batch_size)

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """ "topk_logits" and "topk_indices" `[B, S, k]` of all rows; see the worker's."""
        return self._score("get_topk_logits", timer, data, k, micro_batch_size)

    def score(self, data: Mapping[str, Any]) -> BatchedDataDict:
        """ "scores" `[B]` of all rows, of a reward model; see the worker's."""
        return self._score("score", None, data)

    def generate(self, data: Mapping[str, Any], greedy: bool = False, seed: int | None = None) -> BatchedDataDict:
        """Run the workers' `generate` on all rows, an equal share on every worker: each has the whole model.

        The answers do not depend on how many workers there are. `prepare_for_generation` before and
        `finish_generation` after several calls save copying the weights for each.
        """
        batch = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
        shares = _shares(batch.size, self.world_size)
        args = [(batch.select_indices(share), greedy, seed, list(share)) for share in shares]
        found = self._collect(self._begin_each("generate", args))
        padding = {"output_ids": pad_token_of(self._make["config"], self._make["tokenizer"])}
        return BatchedDataDict.from_batches(found, padding).slice(0, batch.size)

    abort_train_step = _on_all(PolicyWorker.abort_train_step)
    prepare_for_generation = _on_all(PolicyWorker.prepare_for_generation)
    finish_generation = _on_all(PolicyWorker.finish_generation)
    save_checkpoint = _on_all(PolicyWorker.save_checkpoint)
    load_checkpoint = _on_all(PolicyWorker.load_checkpoint)
    prepare_for_training = _on_all(PolicyWorker.prepare_for_training)
    prepare_for_lp_inference = _on_all(PolicyWorker.prepare_for_lp_inference)
    finish_training = _on_all(PolicyWorker.finish_training)
    finish_inference = _on_all(PolicyWorker.finish_inference)
    offload_before_refit = _on_all(PolicyWorker.offload_before_refit)
    offload_after_refit = _on_all(PolicyWorker.offload_after_refit)
    start_gpu_profiling = _on_all(PolicyWorker.start_gpu_profiling)
    stop_gpu_profiling = _on_all(PolicyWorker.stop_gpu_profiling)

    def return_model_config(self) -> Any:
        """Return the first worker's model configuration: transformers' or Megatron's object."""
        return self._all("return_model_config")[0]

    def get_free_memory_bytes(self) -> int:
        """Return the free bytes of the device that has the fewest."""
        return min(self._all("get_free_memory_bytes"))

    def _score(self, method: str, timer: Timer | None, data: Mapping[str, Any], *args: Any) -> BatchedDataDict:
        """Run `method` on all rows, an equal share of them on each data-parallel rank."""
        batch = BatchedDataDict(data)
        # Copies: Ray would send the whole storage of a view.
        shards = [batch.select_indices(share) for share in _shares(batch.size, self.dp_size)]
        with timed(timer, method):
            found = BatchedDataDict.from_batches(self._each(method, shards, *args))
        return found.slice(0, batch.size)

    def _each(self, method: str, shards: list[BatchedDataDict], *args: Any) -> list[Any]:
        """Call `method` with each data-parallel rank's shard; return the results of the first rank of each."""
        self._check_alive()
        kept = [self._ray.put(shard) for shard in shards]  # once, not once for each rank that shares it
        by_rank = [(kept[self._coordinates.replica(rank)], *args) for rank in range(self.world_size)]
        found = self._collect(self._begin_each(method, by_rank))
        return [found[rank] for rank in self._coordinates.first_ranks()]


def _shares(rows: int, ranks: int) -> list[range]:
    """Cut rows into equal runs, one a rank; a rank for which none is left gets the last row, so as to take part."""
    own = -(-rows // ranks)
    return [range(own * i, min(own * (i + 1), rows)) or range(max(rows - 1, 0), rows) for i in range(ranks)]


def _with_all_metrics(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first data-parallel rank's result with the metrics of all."""
    metrics: dict[str, list[float]] = {}
    for result in found:
        for name, values in result["all_mb_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    return found[0] | {"all_mb_metrics": metrics}


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Run a small Ray on this machine alone: no dashboard, no usage statistics, 128 MiB of shared objects.

    Ray, its actors and the ranks' process groups listen on the loopback interface.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 s are too few where processors are busy
    ray = import_ray()
    small = {"address": "local", "include_dashboard": False, "object_store_memory": 128 << 20, "log_to_driver": False}
    constants = ray._private.ray_constants
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False  # else Ray takes an outer address
    try:
        ray.init(num_cpus=cpus, **small)
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters
    try:
        yield
    finally:
        ray.shutdown()


def _coordinates(config: Mapping[str, Any], worker_cls: Any, num_workers: int) -> RankCoordinates:
    """Return the coordinates that say which ranks get the same rows."""
    parallel_key = getattr(worker_cls, "parallel_key", None)
    if not isinstance(parallel_key, str):
        raise ValueError(
            f"worker_cls is {worker_cls}, with parallel_key {parallel_key}: that must name the part of config with the "
            f"parallel sizes; set it to that of the class whose workers the function makes"
        )
    settings = read_config(config, parallel_key)
    copies, stages = settings.tensor_parallel_size * settings.context_parallel_size, settings.pipeline.stages
    if num_workers < 1 or num_workers % (copies * stages):
        raise ValueError(
            f"num_workers is {num_workers}: it must be a multiple of {copies * stages}, the ranks that share one copy "
            f"of the model; change it, or the parallel sizes"
        )
    return RankCoordinates(0, num_workers // copies // stages, copies, stages)
