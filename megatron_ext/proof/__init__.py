"""The proof of a fusion: a model's own loss and the fused one are taken of the same few tokens, and compared.

Each way in that replaces somebody's loss makes two functions of hidden states at the input of the model's own head, and
asks `Proofs.of(...)` whether they are equal: at the first call, and again when what the proof rests on has changed.
Imports torch and groups alone.
"""

from megatron_ext.proof.comparison import compare
from megatron_ext.proof.proofs import (
    SAMPLE_TOKENS,
    Proof,
    ProofBasis,
    ProofMode,
    Proofs,
    agreed,
    cannot_prove_now,
    error_words,
    fusion_is_on,
    proof_mode,
    warn_of_changes,
    why_fusion_is_off,
    words_of_change,
)
from megatron_ext.proof.values import code_values, config_values, module_parts, module_values

__all__ = [
    "SAMPLE_TOKENS",
    "Proof",
    "ProofBasis",
    "ProofMode",
    "Proofs",
    "agreed",
    "cannot_prove_now",
    "code_values",
    "compare",
    "config_values",
    "error_words",
    "fusion_is_on",
    "module_parts",
    "module_values",
    "proof_mode",
    "warn_of_changes",
    "why_fusion_is_off",
    "words_of_change",
]
