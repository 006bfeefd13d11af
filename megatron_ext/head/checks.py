"""Checks of the head's options and arguments. A fault that every rank sees raises ValueError before anything is sent.

A fault that maybe one rank alone sees (of its weight shard, of its slice of the sequence) is returned as an exception
object: with several ranks the caller announces it in the exchange that the call makes anyway, and every rank raises
after that. `bits_or_mode` resolves the option `bits`, which may follow the batch-invariant mode.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard, group_size
from megatron_ext.head.call.matmul import is_quantised
from megatron_ext.head.call.resolved_head import Bits as Bits
from megatron_ext.head.call.resolved_head import Cache as Cache
from megatron_ext.numerics.batch_invariance import is_on, say_once
from megatron_ext.numerics.tensors import accumulation_dtype, check_plain, check_within, ids_exist

HiddenLayout = Literal["replicated", "sequence"]
Reduction = Literal["none", "sum", "mean"]
P = ParamSpec("P")
R = TypeVar("R")

VLLMS = "VLLM_BATCH_INVARIANT"
LOGIT_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)

LEAST_BYTES = 1024  # of `cache`; a number between 1 and this is refused: it may be meant as a percentage or a factor

# For each option that is a number: other allowed values, the rule, whether a number keeps the rule, and the fix.
_RULES: dict[str, tuple[tuple[str | None, ...], str, Callable[[float], bool], str]] = {
    "label_smoothing": ((), "in [0, 1)", lambda x: 0 <= x < 1, "0.0 turns it off"),
    "z_loss": ((), "at least 0 and finite", lambda x: 0 <= x < math.inf, "0.0 turns it off"),
    "temperature": ((), "above 0 and finite", lambda x: 0 < x < math.inf, "1.0 leaves the logits as they are"),
    "logit_scale": ((), "above 0 and finite", lambda x: 0 < x < math.inf, "1.0 leaves the logits as they are"),
    "softcap": ((None,), "above 0 and finite", lambda x: 0 < x < math.inf, "None turns it off"),
    "cache": (
        ("bounded", "auto"),
        f"in [0, 1], a fraction of the columns, or at least {LEAST_BYTES}, bytes",
        lambda x: 0 <= x <= 1 or LEAST_BYTES <= x < math.inf,
        '"bounded" goes by the sizes, "auto" by free memory',
    ),
}

# Names of arguments in torch (of `chunk_size` in NeMo-RL), each with the names of the argument in this package.
_OURS = {
    "input": ("hidden", "logits"),
    "linear_weight": ("weight",),
    "target": ("labels",),
    "linear_bias": ("bias",),
    "chunk_size": ("chunk_tokens",),
}


def tells_torchs_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise TypeError for torch's or NeMo-RL's name of an argument, and tell the name here."""
    parameters = inspect.signature(function).parameters
    renamed = {torchs: name for torchs, ours in _OURS.items() for name in ours if name in parameters}
    text = ", ".join(f"{torchs} is {ours}" for torchs, ours in renamed.items())
    if "reduction" in parameters:
        text += '; and reduction is "none" unless it is given, where torch takes the mean'

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name in renamed:
                raise TypeError(f"{function.__name__} takes {name} by another name: {text}")
        return function(*given, **named)

    return call


def one_of(argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the allowed words."""
    words = ", ".join(map(repr, allowed))
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(
            f"{argument} is a {type(value).__name__}: it must be one of {words}; if it was meant for another "
            "argument, pass it by that argument's name, a bias as bias="
        )
    if value not in allowed:
        raise ValueError(f"{argument} is {value!r}: it must be one of {words}")


def check_ignore_index(value: Any) -> None:
    if not is_int(value):
        raise ValueError(f"ignore_index is {value!r}: it must be an int; PyTorch's default is -100")


def check_option(argument: str, value: Any) -> None:
    words, rule, holds, fix = _RULES[argument]
    if not ((value is None or isinstance(value, str)) and value in words):
        check_number(argument, value, rule, holds, fix)


def check_options(options: Any, defaults: dict[str, Any]) -> None:
    """Raise ValueError unless the attributes of `options` that `defaults` names keep their rules, as defaults do."""
    for name, usual in defaults.items():
        value = getattr(options, name)
        if value is not usual and (type(value) is not type(usual) or value != usual):
            check_option(name, value)


def check_logit_dtype(value: Any) -> None:
    if value is not None and value not in LOGIT_DTYPES:
        raise ValueError(
            f"logit_dtype is {value!r}: it must be None or torch.float32 for logits as they are summed, or "
            f"torch.bfloat16 or torch.float16 for logits rounded as inference engines round them"
        )


def rounds(logit_dtype: torch.dtype | None) -> bool:
    """Return whether logits are rounded to 16 bits."""
    return logit_dtype is not None and logit_dtype.itemsize == 2


def logit_dtype_fault(logit_dtype: torch.dtype | None, computed: torch.dtype, name: str) -> ValueError | None:
    """Return the fault of a 16-bit `logit_dtype` that is not `computed`, the dtype of the product's operands."""
    if not rounds(logit_dtype) or logit_dtype == computed:
        return None
    return ValueError(
        f"logit_dtype is {logit_dtype} and {name} is multiplied in {computed}: logits are rounded to the dtype that "
        f"the model computes in; pass {computed if computed.itemsize == 2 else None}"
    )


def check_chunk_tokens(value: Any) -> None:
    if value is not None and not is_int(value, 1):
        raise ValueError(f"chunk_tokens is {value!r}: it must be a positive int; None lets the head choose")


def check_sm_margin(value: Any, fused_epilogue: bool) -> None:
    if not is_int(value, 0) or not fused_epilogue:
        raise ValueError(
            f"sm_margin is {value!r} and fused_epilogue {fused_epilogue}: it must be an int of at least 0, and 0 "
            f"without fused_epilogue, whose kernels alone leave multiprocessors free; leave sm_margin out"
        )


def check_number(argument: str, value: Any, rule: str, holds: Callable[[float], bool], fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
        raise ValueError(f"{argument} is {value!r}: it must be a number {rule}; {as_number(value) or fix}")


def as_number(value: Any) -> str | None:
    """Return advice on how to write a number that a configuration has as text; None if the value is no such text.

    YAML 1.1 reads 3e-4 and 1.0e5 as text: there a number with an exponent needs a dot and a sign of the exponent.
    """
    try:
        if not isinstance(value, str) or not math.isfinite(float(value)):
            return None
    except ValueError:
        return None
    mantissa, exponent_sign, exponent = value.strip().lower().partition("e")
    if not exponent_sign:
        return f"write {value.strip()} without quotes, this is text"
    mantissa += "" if "." in mantissa else ".0"
    exponent = exponent if exponent[0] in "+-" else f"+{exponent}"
    return f"write {mantissa}e{exponent}: without its dot and the exponent's sign it is text to YAML"


def is_int(value: Any, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def check_at_most(at_most: Any) -> None:
    if at_most is not None and not is_int(at_most, 1):
        raise ValueError(f"at_most, or skip_ignored, is {at_most!r}: a bound of tokens must be a positive int, or None")


def check_no_bound(at_most: Any) -> None:
    check_at_most(at_most)
    if at_most is not None:
        raise ValueError(f"at_most is {at_most}, and counts is None: it bounds the tokens that count; pass counts too")


def token_bound(skip_ignored: bool | int) -> int | None:
    """Return `at_most`: `skip_ignored` if it is an int, None if it is a bool."""
    return None if isinstance(skip_ignored, bool) else skip_ignored


def bits_or_mode(asked: Bits | None, config: Any = None) -> Bits:
    """Return `asked`; if None, "batch" if a batch-invariant mode is on or the environment sets vLLM's, with a message
    that is printed once, else "fast".

    Megatron's own batch-invariant kernels do not reach the head's products. If the head does not support "batch" in a
    call, it raises an error rather than return other bits.
    """
    if asked is not None:
        return asked
    if is_on(config):
        say_once('batch_invariant_mode is on: the fused head takes bits="batch"')
        return "batch"
    if os.environ.get(VLLMS, "") not in ("", "0"):
        say_once(f'{VLLMS} is set in the environment: the fused head takes bits="batch"')
        return "batch"
    return "fast"


def filters(top_k: Any, top_p: Any) -> bool:
    """Check top-k and top-p, and return whether one of them is on."""
    if top_k is not None and not (is_int(top_k, -1) and top_k != 0):
        raise ValueError(f"top_k is {top_k!r}: it must be an int of at least 1; None or -1 turns it off")
    check_number("top_p", top_p, "in (0, 1]", lambda x: 0 < x <= 1, "1.0 turns it off")
    return top_k not in (None, -1) or top_p < 1


def check_teachers_temperature(name: str, value: float, students: float) -> None:
    if value not in (1.0, students):
        raise ValueError(
            f"{name} has temperature {value}: the student's, {students}, divides the logits of both; leave the "
            f"teacher's at 1.0"
        )


_PLAIN = (Tensor, torch.nn.Parameter)  # types of a weight that need no further checks
_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NO_SIZE = 1 << 40  # no vocabulary has it


def check_floating(argument: str, x: Tensor, dims: int | None = None) -> None:
    check_plain(argument, x)
    if not isinstance(x, Tensor) or x.dtype not in _FLOATING:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        packed = getattr(x, "quant_state", None) or getattr(x, "CB", None)  # bitsandbytes' weights
        fix = "cast it" if packed is None else "dequantise it, by bitsandbytes.functional, and pass that"
        if not isinstance(x, Tensor):
            fix = "pass its .weight, and its .bias as bias" if isinstance(x, torch.nn.Module) else "make one of it"
        raise ValueError(f"{argument} is {kind}: it must be a tensor of float32, bfloat16, float16 or float64; {fix}")
    if x.dim() == 0 or (dims is not None and x.dim() != dims):
        wanted = "at least 1" if dims is None else str(dims)
        raise ValueError(f"{argument} has shape {tuple(x.shape)}: it must have {wanted} dims; reshape it")


def check_integers(argument: str, ids: Any) -> None:
    check_plain(argument, ids)
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{argument} is {kind}: it must be a tensor of integer token ids; cast it with .long()")


def check_counts(counts: Any, leading: torch.Size) -> None:
    if not isinstance(counts, Tensor) or counts.dtype != torch.bool or counts.shape != leading:
        found = f"{counts.dtype} {tuple(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
        raise ValueError(
            f"counts is {found}: it must be a bool tensor {tuple(leading)}, which tokens count; compare labels with "
            f"ignore_index"
        )


def check_labels(
    labels: Tensor, ignore_index: int, size: int, exist: Callable[[Tensor, int, int | None], Tensor] = ids_exist
) -> bool:
    """Raise ValueError unless `labels` are integers in `[0, size)` or `ignore_index`; see `check_within`.

    Returns True if the check saw that all labels are ids, so that all tokens count.
    """
    check_integers("labels", labels)
    fix = f" or ignore_index ({ignore_index}); mark tokens that do not count with ignore_index"
    return check_within("labels", labels, size, fix, ignore_index, exist) and not 0 <= ignore_index < size


def forgotten_group(group: Group, vocab: VocabShard | None) -> str:
    """Return the end of a message about a size, if a group or the widths of shards may have been forgotten."""
    if group is not None:
        if vocab is not None or group_size(group) == 1:
            return ""
        return (
            f". vocab is None, so that the vocabulary was taken for {group_size(group)} shards as wide as this rank's: "
            f"if their widths differ, pass vocab=VocabShard(start, stop, size) on each rank"
        )
    if not dist.is_available():
        return ""
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
    if started == 1:
        return ""
    first = "" if dist.is_initialized() else "call torch.distributed.init_process_group first, and "
    return (
        f". tp_group is None, and {started} ranks run: if what was passed is one rank's shard of the vocabulary, "
        f"{first}pass the group that shares it"
    )


def or_refuse(
    compute: Callable[[], Any], shape: tuple[int, ...], like: Tensor, refusal: type[ValueError] = ValueError
) -> tuple[Any, ValueError | None]:
    """Return the result of `compute` and None; or, if it raises `refusal`, zeros of the result's `shape` and dtype, and
    the fault.

    The head raises a fault of one rank on the ranks of the tensor-parallel group. The ranks of the context-parallel
    group learn of it in the exchange of the results, which takes both: `SequenceParts.gather_or_refuse`.
    """
    try:
        return compute(), None
    except refusal as fault:
        return torch.zeros(shape, dtype=accumulation_dtype(like.dtype), device=like.device), fault


def check_same_shape(argument: str, x: Tensor, labels: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{argument} is {type(x).__name__}: it must be a tensor of the labels' shape, {tuple(labels.shape)}; make "
            f"it by torch.tensor"
        )
    if x.shape != labels.shape:
        raise ValueError(
            f"{argument} has shape {tuple(x.shape)}, labels {tuple(labels.shape)}: they must be equal; pass one "
            "number per token"
        )
    if x.device != labels.device:
        raise ValueError(f"{argument} is on {x.device}, labels on {labels.device}: move them to one device")


def check_vocab(vocab: Any) -> None:
    if not isinstance(vocab, VocabShard):
        raise ValueError(
            f"vocab is {vocab!r}: it must be a VocabShard(start, stop, size) or None; "
            f"VocabShard.equal(columns, group, size) makes the one of a padded vocabulary of `size` ids"
        )


def check_marks(weight: Any, alone: bool) -> None:
    """Raise ValueError for a weight whose attributes say that it is sharded in another way than the head takes it.

    Generalized tensor parallelism cuts a shard once more. `alone`: no group was given; if several ranks run, a weight
    that is marked as a shard of rows, as Megatron-Core's layers and ours mark theirs, is not the whole weight.
    """
    if getattr(weight, "is_distributed_weight", False):
        raise ValueError(
            f"weight is a piece {tuple(weight.shape)} of this rank's shard, cut over {weight.gtp_remat_size} ranks by "
            "generalized tensor parallelism: it must be the shard [V/R, D]; set the size of generalized tensor "
            "parallelism to 1, or use the layer's logits"
        )
    marked = getattr(weight, "tensor_model_parallel", False) and getattr(weight, "partition_dim", -1) == 0
    if alone and marked and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"tp_group is None, {dist.get_world_size()} ranks run, and weight is marked as one rank's shard of the "
            "vocabulary (tensor_model_parallel, partition_dim 0): pass the group that shares it, such as "
            "layer.tp_group, or use LmHead.of(layer); if the weight is whole, pass a group of this rank alone"
        )


def shard_fault(vocab: VocabShard, columns: int, argument: str, ranks: int) -> ValueError | None:
    """Return the fault of a shard that is not as wide as the tensor, or on one rank is not the whole vocabulary."""
    if ranks == 1 and vocab.counted != vocab.size:
        return ValueError(
            f"vocab is {vocab}, a part of the vocabulary, on one rank: it must be the whole; pass the tp_group whose "
            f"ranks hold the rest"
        )
    if vocab.columns == columns:
        return None
    fix = f"pass the VocabShard of this rank's own columns, or this rank's shard of {argument}"
    if ranks == 1 and argument.startswith("teacher"):
        n = min(columns, vocab.columns)
        fix = f"if the larger vocabulary is padded, pass its first {n} ids alone: weight[:{n}], or logits[..., :{n}]"
    return ValueError(
        f"vocab is {vocab} with {vocab.columns} columns, {argument} has {columns}: they must be equal; {fix}"
    )


def computed_dtype(hidden: Tensor, weight: Any) -> torch.dtype:
    """Return the dtype to compute in: autocast's if it is on; fp32 for 16-bit hidden states with an fp32 weight that is
    not quantised; else that of the hidden states. fp64 stays."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return hidden.dtype if hidden.dtype == torch.float64 else torch.get_autocast_dtype(kind)
    wide = hidden.itemsize == 2 and isinstance(weight, Tensor) and weight.dtype == torch.float32
    return torch.float32 if wide and not is_quantised(weight) else hidden.dtype


def linear_fault(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    vocab: VocabShard | None,
    ranks: int,
    whose: str = "",
) -> ValueError | None:
    """Return the fault of this rank's weight or bias beside `hidden`; `whose` is a prefix of their names."""
    its_hidden, its_weight, its_bias = whose + "hidden", whose + "weight", whose + "bias"
    casts = torch.is_autocast_enabled(hidden.device.type)
    plain = type(weight) in _PLAIN and weight.dtype in _FLOATING and weight.dim() == 2
    quantised = not plain and is_quantised(weight)
    if quantised and (weight.dim() != 2 or weight.requires_grad):
        return ValueError(
            f"{its_weight} is a quantised {type(weight).__name__} of shape {tuple(weight.shape)}, requires_grad "
            f"{weight.requires_grad}: it must be [V/R, D] and frozen; call weight.requires_grad_(False), or pass "
            f"weight.dequantize()"
        )
    try:
        if not plain and not quantised:
            check_floating(its_weight, weight, 2)
        if bias is not None:
            check_floating(its_bias, bias, 1)
    except ValueError as fault:
        return fault
    if weight.shape[1] != hidden.shape[-1]:
        return ValueError(
            f"{its_weight} has shape {tuple(weight.shape)}, {its_hidden} {tuple(hidden.shape)}: their last dims must "
            f"be equal; {its_weight} is this rank's [V/R, D]"
        )
    for name, x in ((its_weight, weight), (its_bias, bias)):
        if x is not None and x.device != hidden.device:
            return ValueError(f"{name} is on {x.device}, {its_hidden} on {hidden.device}: move them to one device")
        made = casts or (x is weight and quantised)  # cast to the dtype to compute in when it is used
        if x is None or made or x.dtype == hidden.dtype == weight.dtype:
            continue
        if x.dtype != computed_dtype(hidden, weight):
            return ValueError(
                f"{name} is {x.dtype}, {its_hidden} {hidden.dtype}: they must be equal, or weight and bias "
                f"float32 beside hidden states of 16 bits; cast one, or autocast"
            )
    if bias is not None and bias.shape[0] != weight.shape[0]:
        return ValueError(
            f"{its_bias} has shape {tuple(bias.shape)}, {its_weight} {tuple(weight.shape)}: bias must have one entry "
            f"per row of weight; pass this rank's shard of it"
        )
    return None if vocab is None else shard_fault(vocab, weight.shape[0], its_weight, ranks)


def check_tokens_of(argument: str, x: Tensor, name: str, logits: Tensor) -> None:
    if x.shape != logits.shape[:-1] or x.device != logits.device:
        raise ValueError(
            f"{argument} has leading dims {tuple(x.shape)} on {x.device}, {name} {tuple(logits.shape[:-1])} on "
            f"{logits.device}: they must be equal, a row of logits for each token, on the same device; reshape one of "
            f"them"
        )


def layout_fault(hidden: Tensor, labels: Tensor, in_slices: bool, ranks: int, argument: str) -> ValueError | None:
    """Raise or return the fault of `hidden` that does not fit `labels`, as a whole or as this rank's slice of dim 0.

    Only a slice can be wrong on one rank alone, and is returned; a fault that all ranks see is raised.
    """
    if hidden.device != labels.device:
        raise ValueError(f"{argument} is on {labels.device}, hidden on {hidden.device}: move them to one device")
    if not in_slices:
        if hidden.shape[:-1] != labels.shape:
            raise ValueError(
                f"hidden has shape {tuple(hidden.shape)}, {argument} {tuple(labels.shape)}, and hidden_layout is "
                f'"replicated": hidden must have that shape and D; {_fix_of_layout(hidden, labels, ranks, argument)}'
            )
        return None
    if labels.dim() == 0 or labels.shape[0] % ranks:
        raise ValueError(
            f'{argument} has shape {tuple(labels.shape)}: with hidden_layout="sequence" its dim 0, the full sequence, '
            f"must divide by the {ranks} ranks of tp_group; pad the sequence"
        )
    wanted = (labels.shape[0] // ranks, *labels.shape[1:])
    if tuple(hidden.shape[:-1]) == wanted:
        return None
    return ValueError(
        f"hidden has shape {tuple(hidden.shape)}, {argument} {tuple(labels.shape)} over {ranks} ranks: with "
        f'hidden_layout="sequence" hidden must be [{", ".join(map(str, wanted))}, D], this rank\'s slice of dim 0, and '
        f'{argument} the full sequence; use hidden_layout="replicated" if hidden is full'
    )


def _fix_of_layout(hidden: Tensor, labels: Tensor, ranks: int, argument: str) -> str:
    """Return the fix for whole hidden states that do not fit the labels, by the likely reason."""
    leading, wanted = tuple(hidden.shape[:-1]), tuple(labels.shape)
    if ranks == 1 and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        group = "tp_group= and "
    else:
        group = ""
    if ranks > 1 and leading[1:] == wanted[1:] and leading and leading[0] * ranks == wanted[0]:
        return (
            f"it is a slice of dim 0, one of {ranks}, as under sequence parallelism: pass "
            f'{group}hidden_layout="sequence", or gather hidden'
        )
    if len(wanted) > 1 and leading == (wanted[1], wanted[0], *wanted[2:]):
        return "the sequence and batch dims are swapped: transpose one of them"
    return f"pass the hidden states and {argument} of the same tokens"
