"""The schedule that replaces Megatron's for a model that shares its vocabulary over the pipeline stages."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.same_on_ranks import require_same
from megatron_ext.experimental.pipeline_vocabulary import side_stream
from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import NoOrder, Run, Times
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Shape
from megatron_ext.experimental.pipeline_vocabulary.order.stage_programs import stage_programs
from megatron_ext.experimental.pipeline_vocabulary.shared_vocabulary_layers import Sharing
from megatron_ext.experimental.pipeline_vocabulary.stage_run import ScheduleArguments, StageRun
from megatron_ext.experimental.pipeline_vocabulary.vocabulary_sharing import SHARED
from megatron_ext.megatron.fused_loss.module_calls import attribute


def sharing_of(model: Any) -> Sharing | None:
    """Return the sharing of the vocabulary of a model (a chunk or a list of them); None: it is not shared."""
    chunk = model[0] if isinstance(model, list) else model
    try:
        return get_attr_wrapped_model(chunk, SHARED)
    except RuntimeError:
        return None


def forward_backward(*, model: Any, data_iterator: Any, **arguments: Any) -> list[Any]:
    """Run a step as Megatron's schedules do, with their arguments and their result.

    Communicates, before any message of the step: one all-gather of six int64 over the ranks that share the vocabulary,
    which tells whether all of them have the same order of passes before them. The host waits for it.

    Raises:
        ValueError: the call asks for something that this schedule lacks; or the ranks of this pipeline were called with
            other sizes, and would send in orders that do not fit each other. On every rank.
        RuntimeError: a rank of this pipeline failed; on that rank its own error.
    """
    refuse_others(arguments)
    sharing = sharing_of(model)
    assert sharing is not None
    if isinstance(sharing.output.weight, DTensor):
        raise ValueError(
            "the weights are sharded by FSDP: a vocabulary shared over pipeline stages is trained in Megatron's "
            "DistributedDataParallel; leave FSDP out, or train without sharing"
        )
    models = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(models)
    config = get_model_config(models[0])
    known = {name: value for name, value in arguments.items() if name in ScheduleArguments._fields}
    call = ScheduleArguments(model=models, data_iterator=iterators, **known)
    num_microbatches, forward_only = call.num_microbatches, call.forward_only
    stages = sharing.groups.stages
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
    group = group if len(models) > 1 else num_microbatches
    beside = not sharing.groups.one_queue and side_stream.has_streams(sharing.output.weight.device)
    shape = Shape(stages, len(models), num_microbatches, group, forward_only, sharing.output.mtp_layers > 0, beside)
    times = estimated_times(config, shape, sharing, call.seq_length)
    fault: ValueError | None = None
    try:
        programs = stage_programs(shape, times)
    except NoOrder:
        fault = ValueError(
            f"num_microbatches is {num_microbatches}: with {len(models)} chunks on each of {stages} stages and "
            f"microbatch_group_size_per_vp_stage {group} the last {num_microbatches % group} have no order; what "
            f"is left over from whole groups must be 0 or at least the number of stages"
        )
    _require_same_order(call, shape, times, sharing, fault)
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    # Megatron's timers of single passes cannot be nested, and passes here pause within each other.
    with attribute(config, "timers", None):
        run = StageRun(call, shape, config, sharing)
        found = run.run(programs[sharing.groups.stage], _recordings[-1] if _recordings else None)
        if not forward_only:
            _finish(config, models, run)
    if timers is not None:
        timers("forward-backward").stop()
    return found


def _require_same_order(
    call: ScheduleArguments, shape: Shape, times: Times, sharing: Sharing, fault: ValueError | None
) -> None:
    """Raise on all ranks if `shape` or `times` differ: programs follow from these alone, and so does the order."""
    require_same(
        "the schedule of a vocabulary shared over pipeline stages",
        {
            "num_microbatches": call.num_microbatches,
            "micro_batch_size": call.micro_batch_size,
            "seq_length": call.seq_length,
            "forward_only": call.forward_only,
            "the order of passes": (shape, times),
        },
        [sharing.groups.statistics],
        sharing.output.weight.device,
        fault,
        advice="their messages would not fit each other; call it with the same arguments on every rank",
    )


_recordings: list[Callable[[Run], None]] = []


@contextlib.contextmanager
def recorded() -> Iterator[list[Run]]:
    """Record the passes that this stage's schedule runs inside the context, with the host's `time.perf_counter()`."""
    runs: list[Run] = []
    _recordings.append(runs.append)
    try:
        yield runs
    finally:
        _recordings.pop()


def _finish(config: Any, models: list[Any], run: StageRun) -> None:
    functions = config.grad_sync_func
    if functions is not None:
        functions = functions if isinstance(functions, (list, tuple)) else [functions]
        for function, chunk in zip(functions, models, strict=True):
            function(chunk.parameters())
    if config.finalize_model_grads_func is not None:
        # With multi-token prediction Megatron sums gradients of the embedding's copies, and here there are no copies.
        with attribute(config, "mtp_num_layers", None):
            config.finalize_model_grads_func(models, run.tokens if config.calculate_per_token_loss else None)


def refuse_others(others: dict[str, Any]) -> None:
    """Raise ValueError for arguments that would change how the schedule runs."""
    for name in ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"):
        if others.get(name) is not None:
            raise ValueError(
                f"{name} was given: the schedule of a vocabulary shared over pipeline stages uses Megatron's own "
                f"process groups and shapes; leave it out, or train without sharing"
            )
    if others.get("decoder_seq_length") not in (None, 0):
        raise ValueError(
            "decoder_seq_length was given: encoder-decoder models cannot share their vocabulary; leave it out"
        )


def estimated_times(config: Any, shape: Shape, sharing: Sharing, seq_length: int) -> Times:
    """Estimate durations of passes in FLOPs per token of a rank: all stages count alike, and so find the same order."""
    width, rows = config.hidden_size, sharing.output.vocab.columns
    tp = config.tensor_model_parallel_size
    feed_forward = (config.ffn_hidden_size or 4 * width) * (3 if config.gated_linear_unit else 2)
    layer = 2 * (4 * width * width + width * feed_forward + 2 * width * seq_length) / tp
    forward = layer * config.num_layers / (shape.stages * shape.chunks)
    further = sharing.output.mtp_layers * (layer + 4 * width * width / tp)  # with its projection of two into one
    even = (forward,) * shape.chunks
    per_stage = (*(even for _ in range(shape.stages - 1)), (*even[1:], forward + further))
    twice = tuple(tuple(2 * time for time in stage) for stage in per_stage)
    head = 2 * width * rows * (1 + sharing.output.mtp_layers)
    message = forward / 20
    return Times(
        per_stage,
        twice,
        lookup=forward / 100,
        products=2 * head,
        weight=head,
        rows=forward / 100,
        send=message,
        tokens=message / 10,
        embedding=message,
        hidden=message,
        statistics=message / 10,
        sum=message,
        grad_loss=message / 10,
        grad_embedding=message,
    )
