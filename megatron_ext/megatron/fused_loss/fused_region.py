"""One forward call of a patched model: its output layer promises logits, and its loss comes from the fused head."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from megatron_ext.call_stack import caller_outside
from megatron_ext.distributed.groups import group_size
from megatron_ext.head import LmHead
from megatron_ext.head.call.chunk_sizes import cached_columns
from megatron_ext.head.checks import rounds
from megatron_ext.megatron.fused_loss import fusion_decision, fusion_proof, megatron_log
from megatron_ext.megatron.fused_loss.fusion_decision import LOSS, Decision, multi_token_layers, output_layer
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.log_probs import IGNORE_INDEX, HeadRefusal
from megatron_ext.megatron.fused_loss.module_calls import (
    CALL,
    attribute,
    call_with_hooks,
    in_this_call,
    split_hooks,
    standing,
    stands_in_this_call,
)
from megatron_ext.megatron.fused_loss.promised_logits import (
    PromisedLogits,
    Terms,
    check_graph,
    promise_logits,
    tp_group,
)
from megatron_ext.megatron.fused_loss.training_loss import TrainingLoss, linear_training_loss, training_loss
from megatron_ext.megatron.fusion_report import ModelFusion, counters_of, say_once, tell_once
from megatron_ext.megatron.substitute import megatrons_own_layer
from megatron_ext.proof import Proof, cannot_prove_now
from megatron_ext.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

# Our layers and Megatron's own, which are looked up even while ours are substituted for them.
_OURS: tuple[type, ...] = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
_LAYERS = {"megatron_ext": _OURS, "megatron": tuple(map(megatrons_own_layer, _OURS))}

_SAVING = torch._C._autograd._top_saved_tensors_default_hooks  # None, or how tensors are saved for backward
_MORE = f"its {LOSS} is called with more arguments than labels and logits, which the head does not know"


def region_of(model: Any, settings: HeadSettings) -> "Region | None":
    """Return the region for a call of the model; None if logits must not be promised in it.

    So it is if the model has no output layer here, if its logits are promised already (by a call further up the stack,
    or always), or if it keeps its own loss. The last case warns once, or raises what `leave` does.
    """
    layer = output_layer(model)
    if layer is None or getattr(layer, "promises", False) or stands_in_this_call(layer):
        return None
    decision = fusion_decision.decision_of(model, settings)
    if decision.left is not None:
        leave(model, settings, decision.left)
        counters_of(model).stock_losses += 1
        return None
    region = Region(model, settings, layer, decision)
    region.counters.left_to_megatron = None
    return region


def leave(model: Any, settings: HeadSettings, reason: str) -> None:
    """Warn once that a model keeps its own loss, and count its logits; raises ValueError if `settings` ask for options
    that Megatron's own loss lacks."""
    counters = counters_of(model)
    counters.left_to_megatron = reason
    if (asked := settings.beyond_megatron()) is not None:
        raise ValueError(
            f"the fused head was asked for {asked}, and cannot go into {type(model).__name__}: "
            f"{reason}; leave these options at their defaults for Megatron's own loss"
        )
    counters.logits_made["Megatron's own loss"] += 1
    say_once(f"{type(model).__name__} keeps Megatron's own loss, the fused head stays out: {reason}")


class Region:
    """One call of a model whose output layer promises logits.

    A refusal of the head is raised when the call ends: between the losses of multi-token prediction context-parallel
    ranks exchange labels, and a rank that raised earlier would be missing.
    """

    def __init__(self, model: Any, settings: HeadSettings, layer: Any, decision: Decision | None = None):
        self.model, self.settings, self.layer, self.decision = model, settings, layer, decision
        self.counters: ModelFusion = counters_of(model)
        self.stock_loss = standing(model, LOSS)
        counts = multi_token_layers(model) and model.training
        self.hits = bool(counts and megatron_log.counts_acceptance())
        self.faults: list[ValueError] = []
        self.parameter_hooks, self.other_hooks = split_hooks(layer)
        self.quiet = self.proving = self.looked = False
        self.records, self.saving = torch.is_grad_enabled(), _SAVING(True)
        self.to_verify = 0

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, a forward of the model."""
        if self.counters.megatron_kernel is not None:
            tell_once(
                f"the config asks for Megatron's fused loss ({self.counters.megatron_kernel}) of logits; "
                f"{type(self.model).__name__} has the fused linear head, which makes no logits, and runs instead of it"
            )
        # The method by which a module runs its forward with its hooks; a compiled module has another one.
        name = CALL if getattr(self.layer, "_compiled_call_impl", None) is None else "_compiled_call_impl"
        promise = partial(call_with_hooks, self.layer, self.promise, self.other_hooks)
        with in_this_call((self.layer, name, promise), (self.model, LOSS, self.loss)):
            results = call()
        if self.faults:
            raise HeadRefusal(*self.faults[0].args) from self.faults[0]
        return results

    def promise(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **others: Any
    ):
        """Stand in for the output layer's forward, which itself runs only if the head cannot take over this call."""
        layer = self.layer
        given, reason = others and [name for name, value in others.items() if value is not None], None
        if given:
            reason = f"its output layer is called with {', '.join(given)}"
        elif (self.records and not torch.is_grad_enabled()) or (_SAVING(True) != self.saving and _in_checkpoint()):
            reason = (
                "its output layer is called under no_grad or inside of a checkpoint, which would run it again "
                "without the fused head; for the fused head call output layer and loss outside of checkpoints"
            )
        if reason is not None:
            try:
                leave(self.model, self.settings, reason)
            except ValueError as fault:
                self.faults.append(fault)
            options = {"weight": weight, "runtime_gather_output": runtime_gather_output, **others}
            return call_with_hooks(layer, layer.forward, self.parameter_hooks, input_, **options)

        def make(terms: Terms, hidden: Tensor) -> Tensor:
            self.asked(terms)
            # Promised logits are not gathered over several ranks; over one Megatron's loss cannot change them in place.
            gathered = False if self.proving else runtime_gather_output
            return layer.forward(hidden, weight=terms.weight, runtime_gather_output=gathered)[0]

        logits = promise_logits(layer, input_, weight, runtime_gather_output, make, self.parameter_hooks)
        return logits, layer.bias if layer.skip_bias_add else None

    def loss(self, labels: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for the model's `compute_language_model_loss`; returns `[B, S]`, fp32."""
        try:
            made = _made(logits)
            if made is not None:
                _check_made(made, self.settings, type(self.model).__name__)
                if self.settings.changed_loss() and (own := fusion_decision.what_is_not_known(self.model)) is not None:
                    leave(self.model, self.settings, f"somebody has asked for its logits, and {own}")
        except ValueError as fault:
            return self.refused(fault, labels)
        if made is not None:
            self.counters.stock_losses += 1
            if self.settings.changed_loss() is None:
                return self.stock_loss(labels, made, *args, **kwargs)

        def own_loss(logits: Tensor) -> Tensor:
            return self.stock_loss(labels, logits, *args, **kwargs)

        more = _MORE if {*map(type, (*args, *kwargs.values()))} - {type(None)} else None
        try:
            found = self.redeemed(labels, logits, own_loss, more) if made is None else self.of_made(labels, made)
        except ValueError as fault:
            return self.refused(fault, labels)
        if found.hits is not None and isinstance(logits, PromisedLogits):
            logits.terms.hits = labels, found.hits
        if found.z_loss is not None or found.entropy is not None:
            megatron_log.remember(self.counters, found, labels != IGNORE_INDEX)
        return found.loss

    def refused(self, fault: ValueError, labels: Tensor) -> Tensor:
        """Return zeros in the place of losses that cannot be computed; `run` raises the fault at its end."""
        self.faults.append(fault)
        return torch.zeros(labels.shape, device=labels.device)

    def redeemed(self, labels: Tensor, logits: Any, own_loss: Any, reason: str | None) -> TrainingLoss:
        """Compute losses `[B, S]` of labels `[B, S]` by the head, with hits, z-loss and entropy `[S, B]`; by `own_loss`
        from logits if there is a `reason` not to, or if `why_not` finds one."""
        _check_labels(labels, logits)

        def compute(hidden: Tensor, weight: Tensor) -> Any:
            nonlocal reason
            self.settings.check_layer(self.layer)
            reason = reason or self.why_not(logits.terms, hidden, weight, labels)
            if reason is not None:  # in one call of the layer too: sharded data parallelism counts its calls
                self.quiet = True
                own = own_loss(logits.made_of(hidden))
                return TrainingLoss(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, own))
            if self.to_verify:
                self.verify(logits.terms, weight, labels)
            if not self.counters.sizes:
                self.describe(hidden, weight, labels, self.settings.lm_head(logits.terms, weight, self.model.config))
            # Inside the layer's call, since FSDP2's hooks must not get views.
            return _batch_first(self.fused(logits.terms, hidden, weight, labels))

        with torch.set_grad_enabled(torch.is_grad_enabled() and not logits.detached):
            found = logits.terms.read(compute)
        if reason is not None:
            leave(self.model, self.settings, reason)
        self.counters.stock_losses += reason is not None
        self.counters.losses_fused += reason is None
        return found

    def fused(self, terms: Terms, hidden: Tensor, weight: Tensor, labels: Tensor) -> TrainingLoss:
        """Compute the losses `[S, B]` by the head."""
        head = self.settings.lm_head(terms, weight, self.model.config, labels.shape[0])
        options = {"skip_ignored": self.settings.skip_ignored, "hits": self.hits, **self.settings.loss()}
        return linear_training_loss(head, hidden, labels.transpose(0, 1), **options)

    def describe(self, hidden: Tensor, weight: Tensor, labels: Tensor, head: LmHead) -> None:
        """Write the head's sizes, the share of kept exponentials and the origin of the layers into the report."""
        ranks, cache = group_size(tp_group(self.layer)), head.cache
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(hidden.dtype, "fp32")
        self.counters.layers = layers_of(self.model)
        tokens, columns = labels.numel(), max(weight.shape[0], 1)
        if cache != "auto":  # only the head itself asks how much memory is free
            self.counters.kept = 100 * cached_columns(head.resolved(), tokens, columns, hidden.flatten(0, -2)) / columns
        self.counters.sizes = (
            f"--tokens {tokens} --hidden {hidden.shape[-1]} --vocab {weight.shape[0] * ranks} --tp {ranks} "
            f"--dtype {dtype}{' --sequence-parallel' * getattr(self.layer, 'sequence_parallel', False)}"
            + f" --cache {cache}"
            * (cache != "auto")
        )

    def why_not(self, terms: Terms, hidden: Tensor, weight: Tensor, labels: Tensor) -> str | None:
        """Return why the model computes this loss itself, on all ranks; None if the head computes it."""
        decision = self.decision or fusion_decision.decision_of(self.model, self.settings)
        if not self.looked and fusion_decision.has_changed(self.model, decision, promised=decision.alone):
            if not decision.alone:
                with torch.no_grad(), fusion_decision.telling_of_change(self.model):
                    self.fused(terms, hidden, weight, labels)
            decision = fusion_decision.decide(self.model, self.settings)
        self.decision, self.looked, self.to_verify = decision, True, decision.verify
        if decision.left is None and decision.wants_proof():
            proof = self.proof(terms, weight, labels)
            reason = None if proof.fused else f"{proof}; {fusion_decision.what_is_not_known(self.model)}"
            if cannot_prove_now() is not None:
                return reason
            decision.proof = proof
            if decision.mode == "always":
                return reason
            decision.left = reason
        return decision.left

    def proof(self, terms: Terms, weight: Tensor, labels: Tensor) -> Proof:
        """Prove that the head computes what the model's own output layer and loss do; see `fusion_proof`."""
        with attribute(self, "proving", True):
            proof = fusion_proof.proof_of(self.model, self.settings, terms, weight, labels)
        if self.counters.proof != str(proof):
            self.counters.proof = str(proof)
            if proof.fused and (own := fusion_decision.what_is_not_known(self.model)) is not None:
                say_once(
                    f"the fused head computes what {type(self.model).__name__} does, {proof}, and {own}: other effects "
                    f"of this code than logits and losses are lost; if they matter, remove the patch"
                )
        return proof

    def verify(self, terms: Terms, weight: Tensor, labels: Tensor) -> None:
        """Compute the model's first losses in training by its own code as well; see `fusion_proof`."""
        done = 0 if self.counters.verified is None else len(self.counters.verified.ours)
        if done >= self.to_verify or not self.model.training or cannot_prove_now() is not None:
            return
        with attribute(self, "proving", True):
            fusion_proof.verify_loss(self.model, self.counters, self.settings, terms, weight, labels)
        found = self.counters.verified
        if found is not None and found.fault is not None:
            say_once(f"{type(self.model).__name__} has another loss than the fused head: {found.fault}\n{found}")

    def of_made(self, labels: Tensor, logits: Tensor) -> TrainingLoss:
        """Compute the training loss from logits `[S, B, V/R]` that exist."""
        made = self.settings.of_made(logits, self.layer)
        return _batch_first(training_loss(made.read, labels.transpose(0, 1), **self.settings.loss()))

    def asked(self, terms: Terms) -> None:
        """Warn that code asks for real logits, with its line and the memory that they take."""
        if self.quiet or self.proving:
            return
        frame, _ = caller_outside(torch)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.counters.logits_made[place] += 1
        whose = (
            "Megatron's own function, to which labels of -100 count" if self.settings.changed_loss() is None else "ours"
        )
        mebibytes = torch.Size(terms.shape).numel() * terms.dtype.itemsize / 2**20
        say_once(
            f"{place} asks for the logits of {type(self.model).__name__}, which the fused head had not made: they take "
            f"{mebibytes:.1f} MiB on each rank, {tuple(terms.shape)} in {terms.dtype}, and the loss is taken from them "
            f"by {whose}",
            place,
        )


def _in_checkpoint() -> bool:
    """Return whether the innermost hooks for saved tensors are those of torch's non-reentrant checkpoint."""
    hooks = _SAVING(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def _made(logits: Tensor) -> Tensor | None:
    """Return the logits if they exist; None if they are only promised."""
    if not isinstance(logits, PromisedLogits):
        check_graph(logits)
        return logits
    logits.check_own()
    return None if logits.terms.made is None else logits.logits()


def _check_made(made: Tensor, settings: HeadSettings, model: str) -> None:
    """Raise ValueError if the settings ask for bits or a dtype that logits made by Megatron do not have."""
    if rounds(settings.logit_dtype) and made.dtype != settings.logit_dtype:
        raise ValueError(
            f"logit_dtype is {settings.logit_dtype}, and the loss of {model} is taken from logits that Megatron made, "
            f"in {made.dtype}: remove the code that asks for them (fusion_report() names it), or pass logit_dtype=None"
        )
    if settings.bits not in (None, "fast"):
        raise ValueError(
            f'bits is "{settings.bits}", and the loss of {model} is taken from logits that Megatron made, whose bits '
            f"may depend on the batch: remove the code that asks for them (fusion_report() names it), or pass "
            f'bits="fast"'
        )


def _batch_first(found: TrainingLoss) -> TrainingLoss:
    return found._replace(loss=found.loss.transpose(0, 1).clone(memory_format=torch.contiguous_format))


def _check_labels(labels: Tensor, logits: PromisedLogits) -> None:
    wanted = tuple(logits.terms.shape[1::-1])
    if tuple(labels.shape) != wanted:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}: the hidden states that the model made are of shape "
            f"{tuple(logits.terms.hidden.shape)} on this rank, which takes labels [batch, sequence] of {wanted}; "
            "under context parallelism pass this rank's part of the labels, as of the tokens"
        )


def layers_of(model: Any) -> Counter[str]:
    """Count the tensor-parallel layers of a model by the package that they come from."""
    homes = (next((home for home, kinds in _LAYERS.items() if isinstance(one, kinds)), "") for one in model.modules())
    return Counter(filter(None, homes))
